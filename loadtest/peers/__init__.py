"""Pageturner beside other servers: the same prompts to each, in turns, on the same cores.

Owns how a peer is started, asked and measured, one small adapter a peer. A peer runs in the Python or the
program that the caller names; nothing of it is imported here. Invariant: while one engine is measured, the
processes of all others are stopped, so that a thread of theirs that spins while idle takes no time from it.
"""
