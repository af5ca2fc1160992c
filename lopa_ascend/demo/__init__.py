"""Where the bundled model and its held-out problems are."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "model"
"""Hugging Face directory of a small Dream that solves word problems."""
HELD_OUT = Path(__file__).parent / "heldout.jsonl"
"""500 problems that it was not trained on, one JSON object with question and answer a line."""
