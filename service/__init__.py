"""The service: core (memory, scheduling), policy host, flight recorder, model, engine, rpc, command line.

`startup` wires them; each package's docstring says what it owns and who may call it.
"""
