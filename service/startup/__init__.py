"""A configuration becomes a service: where to compute, how much memory, how fast, and what is wired to what.

The commands call it; nothing else knows every package.
"""
