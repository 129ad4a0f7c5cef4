"""KV blocks: who references them, which are cached, which hold which sequence's tokens."""
