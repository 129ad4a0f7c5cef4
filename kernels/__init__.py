"""Arrays in, arrays out: paged attention and cache operations.

Owns the layout of the KV pool and every operation on it, in C++, CUDA and torch. `service/model` and the
benchmarks may call it; it knows nothing of requests. Invariant: each backend gives what `reference` defines,
within its dtype, and writes nothing where it refuses an argument.
"""
