"""Turns a configuration into a service: where to compute, how much memory, what is wired to what.

Owns the composition root (`wiring.py`), the sizes of pools, the process's log, and the reload of the
configuration. Commands and embedded engines (`service.llm`) call it; no other package imports it. Invariant:
a configuration that cannot be met is a ConfigError that names its key, raised before a request is taken.
"""
