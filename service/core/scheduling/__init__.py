"""One step decided, carried out and accounted for. `service.core.scheduler` is its only caller."""
