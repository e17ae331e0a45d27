"""The parts of `benchmarks.multi_turn`, one concept a file."""
