"""Runs the cases of a client that asks for answers in a form, and the form that they ask for.

Arguments of a program: URL, MODEL, and "tools" if the chat template knows tools. It prints a JSON object: by case the
repr of what came, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1], sys.argv[2]
HAS_TOOLS = "tools" in sys.argv[3:]
QUESTION = "Tom has 12 apples and buys 30 more. How many apples does he have?"


class Amount(BaseModel):
    """An amount of fruit."""

    number: int = Field(ge=0, le=999, description="How many.")
    unit: Literal["apples", "boxes"]
    tags: list[Literal["fresh", "ripe"]] = Field(max_length=2)


def run(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Runs all cases and prints what they found: each returns an ``Amount``, or raises an error."""
    found = {}
    for name, case in cases.items():
        try:
            value = case()
            assert isinstance(value, Amount), value
            found[name] = {"found": repr(value), "error": None}
        except Exception:  # noqa: BLE001  # the other cases go on, and the judge sees the error
            found[name] = {"found": None, "error": traceback.format_exc()[-2000:]}
    print(json.dumps(found))
