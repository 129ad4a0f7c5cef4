"""The kernels for the CPU: C++ built by the compiler at hand, torch where there is none."""
