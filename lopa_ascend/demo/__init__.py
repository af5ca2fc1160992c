"""The bundled model and its held-out problems: paths only."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "model"
HELD_OUT = Path(__file__).parent / "heldout.jsonl"
