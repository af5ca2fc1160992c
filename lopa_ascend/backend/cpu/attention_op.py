"""Attention of the CPU in a compiled step: one custom op, which torch.compile does not look into.

The plan of the attention depends on the entries' lengths, which differ in every step; so it cannot be part of a
compiled graph. Custom ops take tensors and numbers only: they name the ``CpuOps`` by a number, and the entries by their
fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops

_numbers = count()
_ops_by_number: WeakValueDictionary[int, Ops] = WeakValueDictionary()


def register(ops: Ops) -> int:
    """The number by which compiled steps name ``ops``, for as long as it exists."""
    number = next(_numbers)
    _ops_by_number[number] = ops
    return number


def registered(number: int) -> Ops:
    return _ops_by_number[number]


def call_attention(ops_number: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
    """``attention`` of the registered ops, as one op of the graph that is being traced."""
    attended: Tensor = paged_attention(
        q,
        k_cache,
        v_cache,
        entries.page_tables.contiguous(),
        entries.lengths,
        entries.kv_lengths,
        entries.prefix_groups,
        entries.prefixes,
        entries.causal,
        ops_number,
    )
    return attended


@torch.library.custom_op("lopa_ascend::paged_attention", mutates_args=())
def paged_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    prefix_groups: Sequence[int],
    prefixes: Sequence[int],
    causal: Sequence[bool],
    ops_number: int,
) -> Tensor:
    table_bytes = page_tables.numpy().tobytes()
    entries = entries_of(
        *(tuple(lengths), tuple(kv_lengths), table_bytes, tuple(page_tables.shape)),
        *(tuple(prefix_groups), tuple(prefixes), tuple(causal)),
    )
    return registered(ops_number).attention(q, k_cache, v_cache, entries)


@paged_attention.register_fake
def _(q: Tensor, *_args: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@lru_cache(maxsize=1)
def entries_of(
    lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    table_bytes: bytes,
    table_shape: tuple[int, ...],
    prefix_groups: tuple[int, ...],
    prefixes: tuple[int, ...],
    causal: tuple[bool, ...],
) -> Entries:
    """The entries with these fields; ``table_bytes`` are the page tables, int32. All layers of a step get the same
    object, and so share one plan."""
    page_tables = torch.frombuffer(bytearray(table_bytes), dtype=torch.int32).view(table_shape)
    return Entries(lengths, kv_lengths, page_tables, prefix_groups, prefixes, causal=causal)
