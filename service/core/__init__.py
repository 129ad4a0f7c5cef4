"""Block management and scheduling. Pure Python: no gRPC, no torch, no asyncio, no wall clock."""
