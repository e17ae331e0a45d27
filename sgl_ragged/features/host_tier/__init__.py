"""The host tier: how slabs lie in host memory and storage, and how they come back."""
