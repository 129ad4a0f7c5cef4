"""Traces of real traffic: when requests came, how long they were, what their prompts shared. Never text.

It owns the formats and their readers. The load test sends a trace to a server, the simulator to a scheduler
on a virtual clock; both read it here. Standard library only. A file is read whole and once, or refused with
its line and field.
"""
