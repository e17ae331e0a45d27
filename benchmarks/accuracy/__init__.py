"""Accuracy of text suites through the server: `python -m benchmarks.accuracy`."""
