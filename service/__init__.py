"""The Pageturner service: core (pure), model, engine, rpc, and the command line that wires them."""
