"""One scheduler, N processes: what rank 0 plans, the other ranks of the model carry out beside it.

Owns the processes of ranks 1 to N-1, the bytes of a step (`codec.py`), what is said besides (`messages.py`),
and the news that a rank is lost. `service.startup` starts it and lends it the model; the engine meets it as
`RankedSteps`, one more `StepComputation`. Invariant: a step counts as done only when every rank has said so.
"""
