"""The gRPC server: messages to the engine's values and back, health, errors to statuses.

Owns: the port, the bounds of messages and connections, and the text of statuses. Only the command line
starts it; the clients share `status`. It sees the engine as `engine.api.EngineClient`, never the scheduler
or the model. Invariant: a client that leaves, by cancelling, deadline or silence, leaves no request behind.
"""
