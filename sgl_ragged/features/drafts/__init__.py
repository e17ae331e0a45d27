"""Speculative decoding over slabs: chains of drafts, verified many tokens a step."""
