"""What compression costs a real model: `python -m benchmarks.quality`."""
