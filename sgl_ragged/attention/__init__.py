"""Attention over slabs and tails: the SGLang backend and its kernels."""
