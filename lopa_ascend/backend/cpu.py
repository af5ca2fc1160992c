"""The fused ops on a CPU: the living definition of every op."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, groupby
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.base import Entries

MIN_ROWS = 16  # below this MKL takes kernels that sum in another order, and a row would depend on how many there are
WIDENED_ROWS = 1024
QUERY_BLOCK = 32  # the fewest queries that torch's attention kernel makes one task of


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next one, instead of giving it back to the system and taking page
    faults for it again: the tensors of a step are just above the size from which it does that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1
        mallopt(mmap_threshold, 32 << 20)  # the largest that it accepts
        mallopt(trim_threshold, 2**31 - 1)


def emulated_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that this processor has no multiplication for; torch's own GEMM in them runs at a fifth of float32's."""
    bfloat16 = platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()
    return frozenset({torch.float16} if bfloat16 else {torch.float16, torch.bfloat16})


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer in float32, rounded once at the end. The weight is widened in pieces that stay in the cache."""
    wide, out = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, weight.shape[0], WIDENED_ROWS):
        rows = slice(begin, begin + WIDENED_ROWS)
        out[:, rows] = F.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return out


@dataclass(frozen=True)
class Reading:
    """Flat cache positions that are gathered at once, int64 [entries, keys], or [1, keys] for entries that all read the
    same; ``batches`` are the (entries, length) that attend to them, of one length each."""

    positions: Tensor
    batches: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionPlan:
    """Entries attend in two parts, to the prefix of their sequence and to their ``own`` positions behind it.

    ``rows`` are those of q [T * K, H / K, D] in the order (batch, entry, KV head, token) of ``own``, and ``restored``
    puts results back; the first ``num_shared`` have a prefix. ``regrouped`` brings these into the order of ``prefix``,
    ``aligned`` its results back; both are None where the orders are the same. All are int64.
    """

    own: tuple[Reading, ...]
    prefix: tuple[Reading, ...]
    rows: Tensor
    restored: Tensor
    num_shared: int
    regrouped: Tensor | None
    aligned: Tensor | None


@lru_cache(maxsize=1)
def plan_attention(entries: Entries, kv_heads: int, page_size: int) -> AttentionPlan:
    """All indices of a step's attention; they are the same in every layer, and computed in the first."""
    prefixes = [entries.prefixes[sequence] for sequence in entries.sequences]
    indices = range(len(prefixes))
    own_shapes = [(not prefixes[i], entries.lengths[i], entries.kv_lengths[i] - prefixes[i]) for i in indices]
    own, prefix = [], []
    batches: list[list[int]] = []
    for (_, length, keys), group in groupby(sorted(indices, key=own_shapes.__getitem__), own_shapes.__getitem__):
        members = list(group)
        positions = flat_positions(entries.page_tables[members], [prefixes[i] for i in members], keys, page_size)
        own.append(Reading(positions, ((len(members), length),)))
        batches.append(members)
    rows = query_rows(entries.lengths, batches, kv_heads)

    batches = []
    shared = sorted((i for i in indices if prefixes[i]), key=lambda i: (entries.sequences[i], entries.lengths[i]))
    for sequence, group in groupby(shared, entries.sequences.__getitem__):
        members = list(group)
        positions = flat_positions(entries.page_tables[members[:1]], [0], entries.prefixes[sequence], page_size)
        by_length = [list(batch) for _, batch in groupby(members, entries.lengths.__getitem__)]
        prefix.append(Reading(positions, tuple((len(batch), entries.lengths[batch[0]]) for batch in by_length)))
        batches += by_length
    restored = rows.argsort()
    regrouped = restored[query_rows(entries.lengths, batches, kv_heads)]
    same = torch.equal(regrouped, torch.arange(len(regrouped)))
    return AttentionPlan(
        own=tuple(own),
        prefix=tuple(prefix),
        rows=rows,
        restored=restored,
        num_shared=len(regrouped),
        regrouped=None if same else regrouped,
        aligned=None if same else regrouped.argsort(),
    )


def flat_positions(page_tables: Tensor, begins: Sequence[int], count: int, page_size: int) -> Tensor:
    """Flat cache positions of ``count`` positions from ``begins[i]`` on in page table i, int64 [tables, count]."""
    positions = torch.tensor(begins)[:, None] + torch.arange(count)
    return page_tables.long().gather(1, positions // page_size) * page_size + positions % page_size


def query_rows(lengths: Sequence[int], batches: Sequence[Sequence[int]], kv_heads: int) -> Tensor:
    """Rows token * K + KV head in the order (batch, entry, KV head, token), int64. A batch is the indices of entries of
    one length; ``lengths`` are those of all entries."""
    starts = list(accumulate(lengths, initial=0))
    rows = [torch.empty(0, dtype=torch.int64)]
    for batch in batches:
        tokens = torch.tensor([starts[i] for i in batch])[:, None, None] + torch.arange(lengths[batch[0]])
        rows.append((tokens * kv_heads + torch.arange(kv_heads)[:, None]).flatten())
    return torch.cat(rows)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(output [N, K, L, D], float32 log-sum-exps [N, K, L]): query [N, K, L, D] attends to all of key and value
    [N, K, keys, D]."""
    single = query.shape[0] * query.shape[1] == 1 and query.shape[2] <= QUERY_BLOCK
    if single:  # MKL would split the sums of a task that is alone among the threads, and round them otherwise
        query, key, value = (x.expand(2, -1, -1, -1) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return (out[:1], lse[:1]) if single else (out, lse)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Makes attention to two sets of keys of that to each: ``out`` and ``other`` [R, H / K, D] with their log-sum-exps
    [R, H / K]. The result is in ``out``.

    Every operation but exp rounds once, which is why a value does not depend on its place in the tensor. sigmoid gives
    other bits where the end of the tensor, or of a thread's share of it, does not fill a vector; exp does not.
    """
    share = 1 / (1 + (lse - other_lse).exp())
    wide = out.float()
    torch.add(other.float().sub_(wide).mul_(share[..., None]), wide, out=out)


class CpuOps:
    def __init__(self) -> None:
        keep_freed_memory()
        self._number = next(_numbers)
        _instances[self._number] = self
        self._emulated = emulated_dtypes()
        self.gathered_bytes = 0
        self.device = torch.device("cpu")

    def stored(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
        if weight.dtype in self._emulated:
            return widened_linear(x, weight, bias)[:rows]
        return F.linear(x, weight, bias)[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = self.rms_norm(x.float(), weight.float(), eps)
        scale = wide.abs().amax(-1) / 127
        steps = wide.div_(scale.masked_fill(scale == 0, 1)[..., None])
        # With a scale too small for full precision, a quotient may lie beyond 127.
        return steps.round_().clamp_(-127, 127).to(torch.int8), scale

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = residual.add_(x)
        return *self.rms_norm_quant(total, weight, eps), total

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[positions, 1, D / 2] each."""
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        if torch.compiler.is_compiling():  # which takes no parts of a tensor to write to
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        out = torch.empty_like(x)
        # One rounding an operation: what is fused rounds differently where a thread's share does not fill a vector.
        torch.mul(left, cos, out=out[..., :half]).sub_(right * sin)
        torch.mul(right, cos, out=out[..., half:]).add_(left * sin)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        # silu itself rounds differently where a thread's share does not fill a vector.
        return wide.div(wide.neg().exp_().add_(1)).to(gate.dtype).mul_(up)

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            cache.view(-1, *cache.shape[-2:]).index_copy_(
                0, slot_mapping.long(), new if source is None else new[source]
            )

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        x.index_copy_(0, rows.long(), values)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    def read_later(self, x: Tensor) -> Callable[[], Tensor]:
        copy = x.clone()
        return lambda: copy

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        if torch.compiler.is_compiling():
            e = entries
            tables = e.page_tables.contiguous()
            attended: Tensor = compiled_attention(
                q, k_cache, v_cache, tables, e.lengths, e.kv_lengths, e.sequences, e.prefixes, self._number
            )
            return attended
        tokens, heads, dim = q.shape
        page_size, kv_heads = k_cache.shape[1:3]
        plan = plan_attention(entries, kv_heads, page_size)
        # Without a mask, the query heads that share a KV head are one long query.
        queries = q.reshape(tokens * kv_heads, heads // kv_heads, dim).index_select(0, plan.rows)
        out, lse = self._attend(queries, k_cache, v_cache, plan.own)
        if plan.prefix:
            shared = queries[: plan.num_shared]
            if plan.regrouped is not None:
                shared = shared.index_select(0, plan.regrouped)
            other, other_lse = self._attend(shared, k_cache, v_cache, plan.prefix)
            if plan.aligned is not None:
                other, other_lse = other.index_select(0, plan.aligned), other_lse.index_select(0, plan.aligned)
            merge_(out[: plan.num_shared], lse[: plan.num_shared], other, other_lse)
        return out.index_select(0, plan.restored).view(tokens, heads * dim)

    def _attend(
        self, queries: Tensor, k_cache: Tensor, v_cache: Tensor, readings: Sequence[Reading]
    ) -> tuple[Tensor, Tensor]:
        """(outputs [R, H / K, D], log-sum-exps [R, H / K]) of queries [R, H / K, D] in the order of ``readings``."""
        kv_heads, (group, dim) = k_cache.shape[2], queries.shape[1:]
        first, outs, lses = 0, [], []
        for reading in readings:
            key, value = (self._gather(cache, reading.positions) for cache in (k_cache, v_cache))
            for entries, length in reading.batches:
                last = first + entries * kv_heads * length
                query = queries[first:last].view(entries, kv_heads, length * group, dim)
                shape = (entries, -1, -1, -1)
                out, lse = flash_attention(query, key.expand(shape), value.expand(shape))
                outs.append(out.reshape(-1, group, dim))
                lses.append(lse.reshape(-1, group))
                first = last
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def _gather(self, cache: Tensor, positions: Tensor) -> Tensor:
        """[entries, K, keys, D] of the flat ``positions`` [entries, keys]."""
        kv_heads, dim = cache.shape[2:]
        out = cache.view(-1, kv_heads, dim).index_select(0, positions.flatten())
        self.gathered_bytes += out.nbytes
        return out.view(*positions.shape, kv_heads, dim).transpose(1, 2)


# ---- in a compiled step --------------------------------------------------------------------------------------------

_numbers = count()
_instances: WeakValueDictionary[int, CpuOps] = WeakValueDictionary()


@torch.library.custom_op("lopa_ascend::paged_attention", mutates_args=())
def compiled_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    sequences: Sequence[int],
    prefixes: Sequence[int],
    ops: int,
) -> Tensor:
    """``attention`` of the CpuOps number ``ops``, which no compiler looks into: it depends on values all over."""
    tables = page_tables.numpy().tobytes(), page_tables.shape
    entries = equal_entries(tuple(lengths), tuple(kv_lengths), tables, tuple(sequences), tuple(prefixes))
    return _instances[ops].attention(q, k_cache, v_cache, entries)


@compiled_attention.register_fake
def _(q: Tensor, *_args: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@lru_cache(maxsize=1)
def equal_entries(
    lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    tables: tuple[bytes, tuple[int, ...]],
    sequences: tuple[int, ...],
    prefixes: tuple[int, ...],
) -> Entries:
    """Of equal arguments the same, so that all layers share a plan."""
    content, shape = tables
    page_tables = torch.frombuffer(bytearray(content), dtype=torch.int32).view(shape)
    return Entries(lengths, kv_lengths, page_tables, sequences, prefixes)
