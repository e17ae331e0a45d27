"""Prefill and decode in servers of their own: pages go from one pool to another."""
