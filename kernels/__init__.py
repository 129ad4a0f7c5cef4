"""Arrays in, arrays out: paged attention and cache operations. Knows nothing of requests."""
