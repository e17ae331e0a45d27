"""Conversations that come back after a pause: `python -m benchmarks multi_turn --shape return`."""
