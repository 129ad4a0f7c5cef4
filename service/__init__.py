"""The Pageturner service: core (pure), model, engine, rpc, and the command line that wires them."""

__version__ = "0.1.0"
