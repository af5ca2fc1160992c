"""The decodings of examples/research_decodings, registered in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import tomllib

from examples.research_decodings import research_decodings
from lopa_ascend import register_decoding
from lopa_ascend.config import decodings

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "research_decodings"


def entry_points() -> dict[str, str]:
    """By decoding: what the package's pyproject.toml says of it, such as "research_decodings:Pivot"."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    points: dict[str, str] = project["entry-points"][decodings.GROUP]
    return points


@contextmanager
def registered() -> Iterator[None]:
    """All of the decodings exist meanwhile."""
    with mock.patch.dict(decodings._registered):
        for name, point in entry_points().items():
            register_decoding(name, getattr(research_decodings, point.partition(":")[2]))
        yield
