"""What the commands that evaluate a model share: whole numbers as arguments, and refusals in plain words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import ConfigError, ParameterError
from lopa_ascend.serve.flags import option
from scripts.evaluation.files import TaskFileError


def number_from(least: int) -> Callable[[str], int]:
    """Reads whole numbers from a least one on, for argparse."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)

    return parse


@contextmanager
def refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the command with a message where an argument or a file turns out to be wrong.

    Args:
        parser: of the command's arguments.
    """
    try:
        yield
    except ParameterError as error:
        parser.error(f"argument {option(error.param)}{str(error).removeprefix(error.param)}")
    except (TaskFileError, ConfigError, CheckpointError) as error:
        parser.error(str(error))
