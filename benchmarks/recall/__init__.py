"""A small Llama trained from scratch on synthetic multi-turn recall, and the task it is trained and measured on."""

from pathlib import Path

MODEL = Path(__file__).parent / "checkpoint"
"""The trained model's folder."""
