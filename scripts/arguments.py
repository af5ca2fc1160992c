"""Values of command lines that scripts share. What makes no sense is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path


def number_from(least: int) -> Callable[[str], int]:
    """Reads whole numbers from a least one on, for argparse."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)

    return parse


def share(text: str) -> float:
    """Reads a share from 0 to 1, for argparse."""
    message = f"must be a share from 0 to 1, got {text!r}"
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(message) from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(message)
    return value


def new_file(text: str) -> Path:
    """Reads the name of a file to write, for argparse; its folder must be there."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return file


def picture(text: str) -> Path:
    """Reads where a picture goes, for argparse. Without matplotlib it is refused."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib; install it: pip install -e '.[bench]'")
    return Path(text)
