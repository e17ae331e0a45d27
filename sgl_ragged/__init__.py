"""A KV cache for SGLang in which every attention head keeps its own share of the history.

The core (profile, budgets, layout) is plain numpy and imports neither SGLang nor torch.
"""

__version__ = "0.1.0"
