"""A client of the wire contract that measures a running service. Never imports the service."""
