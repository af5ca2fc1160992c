"""Where the positions of a sequence lie in the cache. Not in ``pages``, because the HTTP process imports no numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lopa_ascend.kv.pages import PAGE_SIZE


def slot_mapping(page_table: Sequence[int], begin: int, end: int) -> NDArray[np.int64]:
    """Flat cache positions (page * 128 + offset) int64 [end - begin] of the sequence positions [begin, end)."""
    positions = np.arange(begin, end)
    pages = np.asarray(page_table, dtype=np.int64)[positions // PAGE_SIZE]
    return pages * PAGE_SIZE + positions % PAGE_SIZE
