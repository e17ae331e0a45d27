"""Layers with sliding windows beside the slabs of the others."""
