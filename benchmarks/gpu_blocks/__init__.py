"""The parts of `benchmarks/gpu.py`, one concept a file."""
