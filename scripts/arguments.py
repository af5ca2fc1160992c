"""Values of command lines that scripts share. What makes no sense is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path


def number_from(least: int) -> Callable[[str], int]:
    """Reads whole numbers from a least one on, for argparse."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Reads a finite number above 0, for argparse."""
    return _number(text, "a number above 0", lambda value: 0 < value < math.inf)


def share(text: str) -> float:
    """Reads a share from 0 to 1, for argparse."""
    return _number(text, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def _number(text: str, expected: str, is_right: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # which no comparison takes for right
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
    return value


def new_file(text: str) -> Path:
    """Reads the name of a file to write, for argparse; its folder must be there."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return file


def picture(text: str) -> Path:
    """Reads the name of a picture to write, for argparse; matplotlib and the picture's folder must be there."""
    _check_matplotlib()
    return new_file(text)


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib; install it: pip install -e '.[bench]'")
