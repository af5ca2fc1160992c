"""Attention over pages on a CPU: a fast algorithm for what ``definition.attention`` defines.

A step's attention is planned once, for all layers, and then takes few calls of torch's flash attention:

1. The keys of an entry are split in two: the prefix that all entries of its sequence see, and the entry's own positions
   after it. A prefix is gathered from the cache once for all entries.
2. In each of the two parts, entries of equal shapes make a batch, and a batch is one call.
3. The two partial results of an entry are merged by their log-sum-exps.

Causal entries see the keys after their prefix through a mask over whole pages.

In a batch the H / K query heads of one KV head are one long query. So q [T, H, D] is seen as T * K query rows
[H / K, D], one for each token and KV head. They come in three orders: token order (token, KV head), as they lie in q;
own order (batch, entry, KV head, token), by the batches of the own part; and prefix order, by those of the prefix part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.interface import Entries

QUERY_BLOCK = 32
"""The fewest queries that torch's flash attention makes one task of."""


class AttentionBatch(NamedTuple):
    """Entries of one length that attend to equally many keys: one call of flash attention."""

    num_entries: int
    length: int
    is_causal: bool


@dataclass(frozen=True)
class Reading:
    """Keys and values that are gathered together, and the batches that attend to them."""

    positions: Tensor
    """Flat cache positions, int64 [entries, keys], or [1, keys] if all entries of the batches see the same keys."""
    batches: tuple[AttentionBatch, ...]
    hidden: Tensor | None = None
    """In causal entries: which keys each query does not see, bool [entries, queries, keys]."""


@dataclass(frozen=True)
class AttentionPlan:
    """All indices of a step's attention, the same in every layer."""

    own: tuple[Reading, ...]
    """Keys after the prefixes; each reading has one batch. Batches with a prefix come first."""
    prefix: tuple[Reading, ...]
    """The prefix of each sequence that has one, with a batch for each length of the sequence's entries."""
    own_from_token: Tensor
    """For each row in own order its row in token order, int64 [T * K]."""
    token_from_own: Tensor
    """The inverse."""
    num_with_prefix: int
    """The first rows in own order, which belong to entries with a prefix."""
    prefix_from_own: Tensor | None
    """For each row in prefix order its row in own order, int64 [num_with_prefix]; None if the orders are equal."""
    own_from_prefix: Tensor | None
    """The inverse; None if the orders are equal."""
    num_gathered: int
    """Positions gathered from each of the two caches."""


@lru_cache(maxsize=1)
def plan_attention(entries: Entries, kv_heads: int, page_size: int) -> AttentionPlan:
    """The plan for a step's entries. The first layer computes it, and the others find it in the cache."""
    own, own_batches = plan_own_part(entries, page_size)
    prefix, prefix_batches = plan_prefix_part(entries, page_size)
    own_from_token = query_rows(entries.lengths, own_batches, kv_heads)
    token_from_own = own_from_token.argsort()
    prefix_from_own = token_from_own[query_rows(entries.lengths, prefix_batches, kv_heads)]
    num_with_prefix = len(prefix_from_own)
    has_equal_orders = torch.equal(prefix_from_own, torch.arange(num_with_prefix))
    return AttentionPlan(
        own=tuple(own),
        prefix=tuple(prefix),
        own_from_token=own_from_token,
        token_from_own=token_from_own,
        num_with_prefix=num_with_prefix,
        prefix_from_own=None if has_equal_orders else prefix_from_own,
        own_from_prefix=None if has_equal_orders else prefix_from_own.argsort(),
        num_gathered=sum(reading.positions.numel() for reading in (*own, *prefix)),
    )


def plan_own_part(entries: Entries, page_size: int) -> tuple[list[Reading], list[list[int]]]:
    """The readings of the keys after the prefixes, and the indices of the entries of all batches in order."""
    prefixes = [entries.prefixes[group] for group in entries.prefix_groups]
    causal = entries.causal or (False,) * len(prefixes)

    def shape(i: int) -> tuple[bool, bool, int, int]:
        num_keys = entries.kv_lengths[i] - prefixes[i]
        if causal[i]:
            num_keys = -(-num_keys // page_size) * page_size
        return not prefixes[i], causal[i], entries.lengths[i], num_keys

    readings, batches = [], []
    for (_, is_causal, length, num_keys), group in groupby(sorted(range(len(prefixes)), key=shape), shape):
        members = list(group)
        begins = [prefixes[i] for i in members]
        positions = flat_positions(entries.page_tables[members], begins, num_keys, page_size)
        hidden = None
        if is_causal:
            own_lengths = torch.tensor([entries.kv_lengths[i] - prefixes[i] for i in members])
            seen = own_lengths[:, None] - length + 1 + torch.arange(length)  # keys that each query sees
            hidden = torch.arange(num_keys) >= seen[..., None]
        readings.append(Reading(positions, (AttentionBatch(len(members), length, is_causal),), hidden))
        batches.append(members)
    return readings, batches


def plan_prefix_part(entries: Entries, page_size: int) -> tuple[list[Reading], list[list[int]]]:
    """The readings of the prefixes, and the indices of the entries of all batches in order."""
    with_prefix = [i for i, group in enumerate(entries.prefix_groups) if entries.prefixes[group]]
    causal = entries.causal or (False,) * len(entries.lengths)

    def shape(i: int) -> tuple[int, bool]:
        return entries.lengths[i], causal[i]

    with_prefix.sort(key=lambda i: (entries.prefix_groups[i], *shape(i)))
    readings, batches = [], []
    for prefix_group, group in groupby(with_prefix, entries.prefix_groups.__getitem__):
        members = list(group)
        by_shape = [list(batch) for _, batch in groupby(members, shape)]
        first_table = entries.page_tables[members[:1]]
        positions = flat_positions(first_table, [0], entries.prefixes[prefix_group], page_size)
        readings.append(Reading(positions, tuple(AttentionBatch(len(batch), *shape(batch[0])) for batch in by_shape)))
        batches += by_shape
    return readings, batches


def flat_positions(page_tables: Tensor, begins: Sequence[int], count: int, page_size: int) -> Tensor:
    """Flat cache positions of the ``count`` positions from ``begins[i]`` on in page table i, int64 [tables, count]."""
    positions = torch.tensor(begins)[:, None] + torch.arange(count)
    return page_tables.long().gather(1, positions // page_size) * page_size + positions % page_size


def query_rows(lengths: Sequence[int], batches: Sequence[Sequence[int]], kv_heads: int) -> Tensor:
    """The query rows of batches in the order (batch, entry, KV head, token), as indices in token order, int64.
    ``lengths``: queries of all entries of the step; ``batches``: the indices of each batch's entries, which have one
    length."""
    starts = list(accumulate(lengths, initial=0))
    rows = [torch.empty(0, dtype=torch.int64)]
    for batch in batches:
        first_tokens = torch.tensor([starts[i] for i in batch])
        tokens = first_tokens[:, None, None] + torch.arange(lengths[batch[0]])  # [entries, 1, length]
        rows.append((tokens * kv_heads + torch.arange(kv_heads)[:, None]).flatten())
    return torch.cat(rows)


def planned_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention of queries [T, H, D] over the pages of two caches [N, 128, K, D] -> [T, H * D]."""
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    queries = q.reshape(tokens * kv_heads, heads // kv_heads, dim).index_select(0, plan.own_from_token)
    out, lse = attend(queries, k_cache, v_cache, plan.own)
    if plan.prefix:
        with_prefix = slice(plan.num_with_prefix)
        prefix_queries = queries[with_prefix]
        if plan.prefix_from_own is not None:
            prefix_queries = prefix_queries.index_select(0, plan.prefix_from_own)
        prefix_out, prefix_lse = attend(prefix_queries, k_cache, v_cache, plan.prefix)
        if plan.own_from_prefix is not None:
            prefix_out = prefix_out.index_select(0, plan.own_from_prefix)
            prefix_lse = prefix_lse.index_select(0, plan.own_from_prefix)
        merge_partial_attention_(out[with_prefix], lse[with_prefix], prefix_out, prefix_lse)
    return out.index_select(0, plan.token_from_own).view(tokens, heads * dim)


def attend(queries: Tensor, k_cache: Tensor, v_cache: Tensor, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """Attention of query rows [R, H / K, D], in the order of the batches of ``readings``, to one part of their keys.
    Returns the outputs [R, H / K, D], and the log-sum-exps of their scores, float32 [R, H / K]."""
    kv_heads, (group, dim) = k_cache.shape[2], queries.shape[1:]
    first, outs, lses = 0, [], []
    for reading in readings:
        key, value = (gather(cache, reading.positions) for cache in (k_cache, v_cache))
        mask = None
        if reading.hidden is not None:
            # What the page holds behind the last query may be anything, NaN too.
            for tensor in (key, value):
                tensor.masked_fill_(reading.hidden[:, -1, None, :, None], 0)
            mask = queries.new_zeros(()).masked_fill(reading.hidden, -math.inf)
            mask = mask.repeat_interleave(group, 1)[:, None]
        for num_entries, length, is_causal in reading.batches:
            last = first + num_entries * kv_heads * length
            query = queries[first:last].view(num_entries, kv_heads, length * group, dim)
            shape = (num_entries, -1, -1, -1)
            # A causal entry may have any number of queries. For few MKL sums in another order on AMD's processors.
            rows = -(-length * group // QUERY_BLOCK) * QUERY_BLOCK if is_causal else length * group
            out, lse = flash_attention(query, key.expand(shape), value.expand(shape), mask, rows)
            outs.append(out.reshape(-1, group, dim))
            lses.append(lse.reshape(-1, group))
            first = last
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def gather(cache: Tensor, positions: Tensor) -> Tensor:
    """Copies the flat ``positions`` [entries, keys] of a cache [N, 128, K, D] -> [entries, K, keys, D]."""
    kv_heads, dim = cache.shape[2:]
    out = cache.view(-1, kv_heads, dim).index_select(0, positions.flatten())
    return out.view(*positions.shape, kv_heads, dim).transpose(1, 2)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, K, L, D] to all of key and value [B, K, keys, D]; ``mask`` [B, 1, L, keys] is added to
    the scores. ``rows``: queries that are computed, L and zeros that fill them up. Returns the outputs [B, K, L, D],
    and the log-sum-exps of their scores, float32 [B, K, L]."""
    length = query.shape[2]
    if rows > length:
        query = F.pad(query, (0, 0, 0, rows - length))
        mask = None if mask is None else F.pad(mask, (0, 0, 0, rows - length))
    is_single_task = query.shape[0] * query.shape[1] == 1 and query.shape[2] <= QUERY_BLOCK
    if is_single_task:
        # MKL would split the sums of a task that is alone among the threads, and round them otherwise: make it two.
        query, key, value = (x.expand(2, -1, -1, -1) for x in (query, key, value))
        mask = None if mask is None else mask.expand(2, -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)
    out, lse = out[:, :, :length], lse[:, :, :length]
    return (out[:1], lse[:1]) if is_single_task else (out, lse)


def merge_partial_attention_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merges the attention ``other`` of queries to a second set of keys into ``out``, [R, H / K, D] each, by the
    log-sum-exps, float32 [R, H / K]. Every operation but exp rounds once, so a value does not depend on its place in
    the tensor. sigmoid would give other bits if the end of the tensor, or of a thread's share of it, does not fill a
    vector; exp does not."""
    share = 1 / (1 + (lse - other_lse).exp())
    wide = out.float()
    torch.add(other.float().sub_(wide).mul_(share[..., None]), wide, out=out)
