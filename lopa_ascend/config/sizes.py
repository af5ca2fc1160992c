"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a size such as 4096, 512MiB or 1.5 GiB.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([KMGT]iB|)", text)
    if match is None:
        raise ValueError(f"must be a number of bytes, or a number with a unit, e.g. 512MiB or 4GiB; got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def format_size(num_bytes: float) -> str:
    """A size rounded to one decimal, in the largest unit of which it has at least one: "1.5 GiB"."""
    unit = max((unit for unit in UNITS if UNITS[unit] <= num_bytes), key=UNITS.__getitem__, default="")
    return f"{num_bytes / UNITS[unit]:.1f} {unit}" if unit else f"{num_bytes:.0f} B"


def exact_size(num_bytes: int) -> str:
    """A size without rounding, in the largest unit that divides it: "8MiB". ``parse_size`` reads it back."""
    unit = max((unit for unit in UNITS if num_bytes % UNITS[unit] == 0), key=UNITS.__getitem__) if num_bytes else ""
    return f"{num_bytes // UNITS[unit]}{unit}"
