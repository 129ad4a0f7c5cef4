"""The project's own measurements of itself: start-up, throughput, preemption, kernels, scheduler, simulator.

Only `commands/bench.py`, `commands/calibrate.py` and the tests call it. Servers that it measures are
processes of their own, loaded over the wire. Each measurement returns frozen figures and prints nothing;
what is compared runs in turns, so that a busy machine is as busy for both.
"""
