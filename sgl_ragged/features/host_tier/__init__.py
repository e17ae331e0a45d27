"""The host tier: slabs in host memory and storage, and their way back."""
