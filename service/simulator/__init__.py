"""The policy laboratory: the scheduler that serves, on a virtual clock and a model that takes no time.

It owns workloads (recipes, traces, recordings), machines and their step times, and what runs say together.
The commands `simulate`, `calibrate` and `study` and the benchmarks call it. The scheduler, block manager
and policies are the very classes that serve; nothing here decides. The same workload, machine and policies
give the same figures, to the last digit. README.md is the way in.
"""
