"""CUDA kernels, compiled by NVRTC and launched through CuPy; the same text runs on CPU fibers in tests.

Owns sources, plans and launches; `kernels.selection`, the graphs of `service/model` and the benchmarks may
call it. Invariant: only `compiler` imports CuPy, so that serving on the CPU does not.
"""
