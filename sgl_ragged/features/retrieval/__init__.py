"""Retrieval: pivots watch for other heads, and what these dropped is fetched again from host memory."""
