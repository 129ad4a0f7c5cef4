"""The log: what a line holds, and the thread that writes it.

Owns the logger and its writer thread. The commands set it up; all others are handed a logger. Invariant:
writing a line neither blocks nor fails the caller, whatever becomes of standard error.
"""
