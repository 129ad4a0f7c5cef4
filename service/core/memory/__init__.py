"""KV blocks: which tables name them, which are cached, which hold which sequence's tokens.

Owned by the scheduler's parts: they plan on a ledger and then change tables here. Invariant: a block's count
is that of the table entries that name it, and what is cached can be found from its chain's head.
"""
