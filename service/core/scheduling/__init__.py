"""One step decided, carried out and accounted for.

Owns the waiting queue, the plan of a step and the moves of a request between waiting, running and swapped.
`service.core.scheduler` is its caller. Invariant: deciding changes nothing, carrying out never falls short.
"""
