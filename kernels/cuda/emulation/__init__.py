"""The kernels on the CPU: one fiber a CUDA thread, for tests on machines without a GPU.

Owns the emulator's C++ sources and its runtime; the tests call it, the service never does.
Invariant: it runs the kernels' own text, and stops at a race, a deadlock or an access out of bounds.
"""
