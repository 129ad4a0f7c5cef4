"""One step decided, carried out and accounted for.

`service.core.scheduler` is its caller. Invariant: deciding changes nothing, carrying out never falls short.
"""
