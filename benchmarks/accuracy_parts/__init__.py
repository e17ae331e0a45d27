"""Parts of `benchmarks.accuracy`."""
