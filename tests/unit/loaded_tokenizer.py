"""Loads the tokenizer that a test has written, and changes its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_tokenizer
from tests.tiny import VOCAB_SIZE


def some(path: Path) -> Tokenizer:
    """The tokenizer of a directory that has one."""
    tokenizer = load_tokenizer(path, VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


def edit(file: Path, **changes: Any) -> None:
    """Sets fields of a JSON file; ``...`` as a value takes a field away."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
