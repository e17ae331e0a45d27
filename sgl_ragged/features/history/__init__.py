"""Bounded histories: which segments a request sees, and by what score others leave."""
