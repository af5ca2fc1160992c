"""The bundled model, and problems that it was not trained on."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "model"
"""Hugging Face directory of the bundled model."""
EXAMPLES = (
    "Peter owns 46 marbles. He loses 9 of them in the park. How many does he still have?",
    "Carlos read 35 pages on Saturday and 42 pages on Sunday. How many pages did he read over the weekend?",
    "A baker packs 48 rolls equally into 6 bags. How many rolls go into each bag?",
)
"""Problems that it solves, for those who see it for the first time."""
HELD_OUT = Path(__file__).parent / "heldout.jsonl"
"""The problems: JSON objects with "question" and "answer", one on each line."""
HANDWRITTEN = Path(__file__).parent / "handwritten.jsonl"
"""Easy problems worded by hand, from which no training problem is made: JSON objects with "question", "answer" (a
number) and "kind" (of problem), one on each line."""
INDEPENDENT = Path(__file__).parent / "independent.jsonl"
"""Easy problems of one and two steps by an author who knew nothing of this project, in the same form; from them no
training problem is made either."""
