"""Facts of conversations, asked for through the server: `python -m benchmarks accuracy`."""
