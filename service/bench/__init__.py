"""The project's own benchmarks; each prints figures and offers --json."""
