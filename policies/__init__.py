"""Pure scheduling decisions: frozen views in, a ranking or a choice out. Standard library only.

Owns the views, the interface of each axis, the built-in policies and their registry. `service.policy_host`
asks policies; startup, engine, simulator and commands make them by name; any program may import this package
to write one. Invariant: a policy is a frozen value, and the same views get the same answer.
"""
