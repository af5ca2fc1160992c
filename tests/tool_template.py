"""A chat template that knows tools, in the form of Hermes and Qwen."""

from pathlib import Path

FILE = Path(__file__).parent / "judges" / "programs" / "tools.jinja"
TEMPLATE = FILE.read_text(encoding="utf-8")
