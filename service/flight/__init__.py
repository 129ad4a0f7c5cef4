"""What a scheduler was told and decided: recorded, written, read, replayed and explained.

It listens to the core (`core.listener`) and takes snapshots of it; the core never imports it. The engine
asks it for dumps, the command line reads its files. Invariant: a record replays to the same decisions, and
holds no prompt and no answer.
"""
