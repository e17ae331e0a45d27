"""Triton kernels: append, seal, decode, extend. One file each, the kernel and its launcher."""
