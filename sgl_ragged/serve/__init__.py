"""What a worker runs: hooks, pool, allocator, radix cache, attention backend."""
