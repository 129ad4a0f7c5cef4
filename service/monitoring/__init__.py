"""What operators see of a running server: metrics for Prometheus, probes and pages over HTTP.

Owns the monitoring port and the form of what it shows; what is counted belongs to `engine/metrics.py`.
Start-up and the command line build it. It reads the engine by `engine.api.EngineClient` and changes nothing.
Invariant: whatever comes to its port costs the service a bounded share of time and memory, and no prompt or
answer leaves by it.
"""
