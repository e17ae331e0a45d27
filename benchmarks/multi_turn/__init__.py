"""Conversations of many clients on several pools: `python -m benchmarks multi_turn`."""
