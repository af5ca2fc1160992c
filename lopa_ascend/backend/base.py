"""The fused ops that every device implements, and the attention entries they share.

Shapes: T tokens of a step (all rows of all sequences, flat), H query heads, K key/value heads, D head dimension,
N pages of 128 positions. Caches are [N, 128, K, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Entries:
    """Attention units: entry i is ``lengths[i]`` queries that see the first ``kv_lengths[i]`` positions of the pages
    ``page_tables[i]`` and nothing else; so there is no mask.

    Query spans tile the step's tokens in order. ``page_tables`` is int32 [entries, pages]; columns behind an entry's
    own pages repeat a valid page. ``sequences[i]`` is the index of entry i's sequence in the step. ``prefixes`` has for
    every sequence the number of its first positions that are the same in all its entries, the committed ones: keys and
    values there are equal whichever entry's pages they are read through, and every entry sees at least one position
    more. Entries are compared by identity.
    """

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: Tensor
    sequences: tuple[int, ...]
    prefixes: tuple[int, ...]


class Ops(Protocol):
    """One signature per fused op; ``backend/cpu.py`` is the definition.

    ``gathered_bytes``: the keys and values that attention has copied out of the pages since the start, in all layers;
    a kernel that reads pages in place copies none.
    """

    gathered_bytes: int
    device: torch.device

    def stored(self, weight: Tensor) -> Tensor:
        """A linear layer's weight [out, in] as this device wants it in ``linear``."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in], weight as ``stored`` gave it -> [T, out]. A row's result does not depend on the other rows."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] normed in float32 and scaled."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may write into ``residual``."""
        ...

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x [T, hidden] in int8, and a scale float32 [T] for each row: the largest magnitude / 127. Values
        are rounded half to even; a row of zeros has the scale 0. A device may round the norm to x's dtype before."""
        ...

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(int8, scale) as above of norm(x + residual), and x + residual; may write into ``residual``."""
        ...

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines float32 [positions, D / 2] of all positions as ``rope`` wants those of some."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the halves of every head of x [T, heads, D] by the tables' rows [T, ...] of its positions."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [T, 2 I] -> [T, I]."""
        ...

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        """Writes k, v [T, K, D] to the flat positions ``slot_mapping`` (page * 128 + offset); position i takes token
        ``source[i]``, or token i. Positions are distinct."""
        ...

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """Writes values [n, C] to the distinct ``rows`` int32 [n] of x [N, C]."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """int32 [size] of the host, from which a copy to the device need not be waited for."""
        ...

    def read_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begins to copy x to the host; what it returns waits for the copy and gives it."""
        ...

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        """q [T, H, D] attends to the pages by ``entries`` -> [T, H * D]. The prefix of a sequence is read once for all
        its entries. An entry's result depends on how long that prefix is, and on no other entry."""
        ...
