"""Bounded histories: the segments that a request sees, and the score by which segments leave."""
