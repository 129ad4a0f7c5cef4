"""The operations for the CPU: C++ that the machine's own compiler builds when they are first needed.

Owns its sources and how they are built and loaded; `kernels.selection` may call it. Invariant: a row's bits
depend on its own tokens alone.
"""
