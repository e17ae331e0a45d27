"""Fitted slabs: what a head keeps of a segment is corrected to stand for all of it."""
