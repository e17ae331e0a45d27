"""Names of the two servers, and of what they have in common."""

NAME = "disaggregation"
"""Of the feature, and of what it attaches to the pool."""

PREFILL, DECODE = "prefill", "decode"
"""SGLang's names of the two servers, which are the feature's settings."""
