"""The argument of scripts that draw. Without matplotlib it is refused at once, and not after hours of measuring."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def picture(text: str) -> Path:
    """Where pictures go, for argparse.

    Raises:
        ArgumentTypeError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib; install it: pip install -e '.[bench]'")
    return Path(text)
