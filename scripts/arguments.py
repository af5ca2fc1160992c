"""Values of command lines that scripts share. What makes no sense is refused before anything is measured."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError, ParameterError
from lopa_ascend.hub import directory_of


class InputError(ValueError):
    """What a command was given cannot be used; the message says what and why."""


def is_refusal(error: Exception) -> bool:
    """Whether an error says that what the user gave cannot be used, and not that this program is wrong."""
    if isinstance(error, InputError | ConfigError | ParameterError | OSError):
        return True
    from lopa_ascend.checkpoint import CheckpointError  # imports torch, which whoever raises it has done

    return isinstance(error, CheckpointError)


def number_from(least: int) -> Callable[[str], int]:
    """Reads whole numbers from a least one on, for argparse."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)

    return parse


def add_numbers(parser: argparse.ArgumentParser, *flags: tuple[str, int | Sequence[int] | None, int, str]) -> None:
    """Adds flags of whole numbers.

    Args:
        parser: of the command.
        flags: name, default, least number and help. A sequence as the default stands for several numbers.
    """
    for name, default, least, text in flags:
        several = isinstance(default, Sequence)
        shown = " ".join(map(str, default)) if isinstance(default, Sequence) else default
        text += "" if shown in (None, "") else f" (default: {shown})"
        parser.add_argument(
            name, type=number_from(least), nargs="+" if several else None, default=default, metavar="N", help=text
        )


def positive(text: str) -> float:
    """Reads a finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # which no comparison takes for right
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def named_value(text: str) -> tuple[str, Any]:
    """Reads NAME=VALUE, for argparse; the value is JSON, or a text without quotes."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def model_directory(text: str) -> Path:
    """Reads a directory of a model, or its name on the hub, which is then downloaded, for argparse."""
    return _directory(text, "model")


def adapter_directory(text: str) -> Path:
    """The same for an adapter."""
    return _directory(text, "lora")


def _directory(text: str, param: str) -> Path:
    try:
        return directory_of(text, param)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def new_file(text: str) -> Path:
    """Reads the name of a file to write, for argparse; its folder must be there."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return file
