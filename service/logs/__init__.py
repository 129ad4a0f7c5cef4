"""The log: what a line holds, and the thread that writes it.

The commands set it up; everything else is handed a logger. Invariant: writing a line neither blocks nor fails
the caller, whatever becomes of standard error.
"""
