"""The policy laboratory: the scheduler that serves, on a virtual clock and a model that takes no time."""
