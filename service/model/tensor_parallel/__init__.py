"""One model on several ranks: each holds a shard of every weight and the KV of its own heads.

`build.py` is given `Collectives` and builds what its rank holds; the runner and all above it see one model.
Invariant: every rank has the same bits in every row that all of them hold, in the same order of steps.
"""
