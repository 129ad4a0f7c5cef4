"""Decides which tokens of which requests each step computes, and in which KV blocks.

The engine and the simulator call `scheduler.Scheduler`, from one thread; all others use the values that cross
its borders. Pure Python: no gRPC, torch, asyncio or wall clock. Invariant: `Scheduler.check_integrity`.
"""
