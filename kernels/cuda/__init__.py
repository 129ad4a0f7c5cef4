"""CUDA kernels, compiled by NVRTC and launched through CuPy; the same text runs on CPU fibers in tests."""
