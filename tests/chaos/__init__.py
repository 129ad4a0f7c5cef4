"""Chaos: a real server process, clients of every bad kind, and what must hold after each.

`Site` is one server with honest neighbours beside it; `faults/` holds what is done to it, by name; `run.py`
does them in a seeded order and settles after each: every accepted request had exactly one end, the blocks,
descriptors and threads are back, health is right, and an ordinary request is answered with the right tokens.

    PYTHONPATH=tests python -m chaos --minutes 10 --json
"""
