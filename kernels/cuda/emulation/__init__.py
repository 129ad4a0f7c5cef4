"""The kernels on the CPU: one fiber a CUDA thread, for tests on machines without a GPU."""
