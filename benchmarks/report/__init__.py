"""One page of all results: `python -m benchmarks.report`."""
