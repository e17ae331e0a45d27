"""The parts of `benchmarks.report`."""
