"""Layers with sliding windows, in a pool of their own."""
