"""What the ragged pool costs a real model: `python -m benchmarks quality`."""
