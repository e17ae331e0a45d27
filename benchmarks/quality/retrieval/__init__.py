"""Fetching back what heads dropped, while real texts are decoded."""
