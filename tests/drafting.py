"""S2D2 with other drafts: what is always checked must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from lopa_ascend import register_decoding
from lopa_ascend.config import decodings
from lopa_ascend.decode.s2d2 import S2D2, S2D2FastDllmV2
from lopa_ascend.types import Fill, RowPlan


class Undrafted(S2D2):
    """Each step checks a single position, without a draft."""

    def _route(self, row: RowPlan, predicted: list[Fill]) -> None:
        super()._route(row, predicted[:1])
        self._drafted = tuple(Fill(fill.position, self.mask, 0.0, 0.0) for fill in self._drafted)


class Misled(S2D2):
    """Of the drafts every third or so is another token."""

    def _route(self, row: RowPlan, predicted: list[Fill]) -> None:
        rng = random.Random(str(predicted))
        super()._route(row, [replace(fill, token=rng.choice([fill.token, fill.token, 9])) for fill in predicted])


@contextmanager
def registered() -> Iterator[None]:
    """The decodings "undrafted" and "misled" exist meanwhile, and with "_v2" those over Fast-dLLM v2."""
    with mock.patch.dict(decodings._registered):
        for drafts in (Undrafted, Misled):
            name = drafts.__name__.lower()
            register_decoding(name, drafts)
            register_decoding(f"{name}_v2", type(name, (drafts, S2D2FastDllmV2), {}))
        yield
