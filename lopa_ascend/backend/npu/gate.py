"""What an NPU must do before it serves: compute attention as float32 does, in the configured layout, also in a captured
graph whose KV lengths change; and end all that is launched meanwhile. ``trials.py`` has the other kernels."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_npu import npu

from lopa_ascend.backend.compiler import MIN_KV_LENGTH, GraphError
from lopa_ascend.backend.interface import Entries
from lopa_ascend.backend.npu.captured import CapturedRun, capturing
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

KERNEL = "npu_fused_infer_attention_score"
TOLERANCE = 0.02
"""Largest error that is right, as a share of the largest value: a few roundings of bfloat16."""
ENTRIES = 2
PROMPT_QUERIES, FEW_QUERIES = 300, 7
"""Of two entries beside one of a block."""
MAX_ENTRIES = 64
"""Of a full step: a die has fewer cores."""
QUERY_SCALE = 4.0
LAST, BEHIND = 32.0, 64.0
"""Scores of planted queries for their last key, and for the key behind it; other keys have less than 20."""
FALLBACK = "BSH"
HANG_SECONDS = 120.0
"""What takes longer than this hangs. A first launch also loads what it needs."""
POLL_SECONDS = 1e-4
MAX_SHOWN = 8
logger = logging.getLogger(__name__)


class WrongKernelError(ValueError):
    """A kernel on this NPU does not compute what it should."""


@dataclass(frozen=True)
class AttentionShape:
    queries: int
    """Of an entry, before it is divided."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_keys: int
    """Of the longest sequence."""
    entries: int = ENTRIES
    """Most entries of a step."""
    is_causal: bool = False


def right_ops(ops: NpuOps, shape: AttentionShape, captures: bool) -> NpuOps:
    """These ops, or the ops of the layout BSH if only they compute attention rightly. ``captures``: whether steps will
    run as captured graphs. WrongKernelError names the kernel, its shape and its error."""
    begin = time.perf_counter()
    found = first_fault(ops, shape, captures)
    milliseconds = 1000 * (time.perf_counter() - begin)
    if found is None:
        logger.info("attention %s computes what float32 does (checked in %.0f ms)", ops.attention_layout, milliseconds)
        return ops
    if ops.attention_layout != FALLBACK:
        other = NpuOps(attention_layout=FALLBACK)
        found_there = first_fault(other, shape, captures)
        if found_there is None:
            logger.warning("%s: %s; attention_layout %s is right, and is taken instead", this_die(), found, FALLBACK)
            return other
        found = f"{found}; {found_there}"
    remedy = ", or of a captured graph alone: try graph_mode eager" if captures else ""
    raise WrongKernelError(f"{this_die()}: {found}. This is a fault of the device or of its software{remedy}")


def first_fault(ops: NpuOps, shape: AttentionShape, captures: bool) -> str | None:
    """What attention does wrongly: the kernel, its shape and its error; None if nothing. Calls see few keys and then as
    many as a sequence can have, in a graph the latter twice."""
    shapes = [replace(shape, is_causal=False)]
    if shape.is_causal:  # the pages of a prompt; the first one has as many queries as keys
        shapes.append(replace(shape, queries=min(PAGE_SIZE, shape.max_keys)))
    checks = [partial(_fault_in, ops, each, captures) for each in shapes]
    checks += [partial(_fault_of_many, ops, each) for each in shapes]
    return next(filter(None, (check() for check in checks)), None)


def _fault_of_many(ops: NpuOps, shape: AttentionShape) -> str | None:
    """For the entries of a prompt, of a block and of few queries; then for as many entries as a full step has."""
    most, queries = shape.max_keys, shape.queries
    prompt = tuple(min(length, most) for length in (PROMPT_QUERIES, queries, FEW_QUERIES))
    full = (queries,) * min(shape.entries, MAX_ENTRIES)
    near = min(most, max(queries, PAGE_SIZE) + PAGE_SIZE // 2)
    for name, lengths, max_keys in (("a prompt", prompt, most), ("a full step", full, near)):
        where = f"a single call of {len(lengths)}{' causal' * shape.is_causal} entries, as in {name}"
        keys = [max(length, max_keys - 3 * index) for index, length in enumerate(lengths)]
        try:
            sample = Sample(ops, replace(shape, max_keys=max_keys), lengths)
            if fault := sample.fault(sample.attend(keys), keys, where):
                return fault
        except RuntimeError as error:
            return _refusal(ops, shape, where, error)
    return None


def _refusal(ops: NpuOps, shape: AttentionShape, where: str, error: RuntimeError) -> str:
    return f"{KERNEL} in the layout {ops.attention_layout} ({shape}) is refused in {where}: {error}"


def _fault_in(ops: NpuOps, shape: AttentionShape, captures: bool) -> str | None:
    """For entries that are all causal, or all not."""
    few, most = (PAGE_SIZE // 2, PAGE_SIZE + 3), (shape.max_keys, PAGE_SIZE - 1)
    least = shape.queries if shape.is_causal else 1
    kv_lengths = [[max(least, min(length, shape.max_keys)) for length in lengths] for lengths in (few, most)]
    if shape.is_causal:
        kv_lengths = [[least] * ENTRIES, *kv_lengths]
    kind = " of causal entries" * shape.is_causal
    where = f"a single call{kind}"
    try:
        sample = Sample(ops, shape)
        for lengths in kv_lengths:
            if fault := sample.fault(sample.attend(lengths), lengths, where):
                return fault
        if captures:
            run = sample.captured()
            for in_thread, lengths in product((False, True), (*kv_lengths, kv_lengths[-1])):
                run.in_thread = in_thread
                where = f"a captured graph{kind}{' whose KV lengths a thread changes' * in_thread}"
                sample.plant(lengths)
                output = run(sample.divided(lengths))
                if fault := sample.fault(output, lengths, where):
                    return fault
    except RuntimeError as error:
        return _refusal(ops, shape, where, error)
    return None


class Sample:
    """Random queries of some entries, with keys and values in pages that lie in no order. For some queries of each
    entry the last key that they see is the strongest, and the key behind it is stronger still, so a key too few or too
    many shows at any length. ``lengths``: queries of each entry; None for ENTRIES of ``shape.queries``."""

    def __init__(self, ops: NpuOps, shape: AttentionShape, lengths: Sequence[int] | None = None) -> None:
        self._ops, self._shape = ops, shape
        self._lengths = tuple(lengths or (shape.queries,) * ENTRIES)
        random, count = torch.Generator().manual_seed(0), len(self._lengths)
        pages = pages_for(max(shape.max_keys, PAGE_SIZE))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=random).to(shape.dtype)

        # Queries are large, so that few keys count: an average of all values is far off.
        self._q = QUERY_SCALE * normal(sum(self._lengths), shape.heads, shape.head_dim)
        self._level_queries()
        cache = count * pages, PAGE_SIZE, shape.kv_heads, shape.head_dim
        self._random_keys, self._values = normal(*cache), normal(*cache)
        self._keys = self._random_keys
        self._tables = torch.randperm(count * pages, generator=random).view(count, pages).int()
        zeros, causal = (0,) * count, (shape.is_causal,) * count
        self._whole = Entries(self._lengths, zeros, self._tables, tuple(range(count)), zeros, causal=causal)
        entries = self._whole.divided(ops.max_queries)
        self._entries = replace(entries, page_tables=entries.page_tables.to(ops.device))
        self._on_device = [x.to(ops.device) for x in (self._q, self._random_keys, self._values)]

    def _level_queries(self) -> None:
        """Makes the heads of a planted query that share a KV head equal, and such queries of an entry, unless they see
        other keys."""
        grouped = self._q.view(len(self._q), self._shape.kv_heads, -1, self._shape.head_dim)
        for q in grouped.split(self._lengths):
            for query in self._planted(len(q)):
                q[query] = q[query if self._shape.is_causal else 0, :, :1].clone()

    def _planted(self, length: int) -> list[int]:
        """The planted queries of an entry. In a causal one they lie apart: each has two keys of its own."""
        if self._shape.is_causal and length < 6:
            return [length - 1]
        return sorted({0, length // 2, length - 1})

    def plant(self, kv_lengths: Sequence[int]) -> None:
        """Gives the planted queries their keys, for these KV lengths."""
        self._keys = self._random_keys.clone()
        width = self._tables.shape[1] * PAGE_SIZE
        for q, table, kv_length in zip(self._q.split(self._lengths), self._tables.tolist(), kv_lengths, strict=True):
            for query in self._planted(len(q)):
                by_head = q[query].view(self._shape.kv_heads, -1, self._shape.head_dim)[:, 0].float()
                unit = by_head * self._shape.head_dim**0.5 / by_head.square().sum(-1, keepdim=True)
                last = kv_length - 1 - (len(q) - 1 - query if self._shape.is_causal else 0)
                for position, score in ((last, LAST), (last + 1, BEHIND)):
                    if position < width:
                        page, offset = divmod(position, PAGE_SIZE)
                        self._keys[table[page], offset] = (score * unit).to(self._keys.dtype)
        self._on_device[1].copy_(self._keys)

    def divided(self, kv_lengths: Sequence[int]) -> list[int]:
        return list(replace(self._whole, kv_lengths=tuple(kv_lengths)).divided(self._ops.max_queries).kv_lengths)

    def attend(self, kv_lengths: Sequence[int]) -> Tensor:
        """Attention on the device [T, H * D]."""
        self.plant(kv_lengths)
        return self._attend(kv_lengths)

    def _attend(self, kv_lengths: Sequence[int]) -> Tensor:
        q, k_cache, v_cache = self._on_device
        entries = replace(self._entries, kv_lengths=tuple(self.divided(kv_lengths)))
        return self._ops.attention(q, k_cache, v_cache, entries)

    def captured(self) -> CapturedRun:
        """``attend`` as a graph that is captured with few keys, to be replayed with other KV lengths."""
        least = max(MIN_KV_LENGTH, self._shape.queries if self._shape.is_causal else 1)
        few = range(least, least + len(self._lengths))
        with capturing(auto_dispatch_capture=True) as graph:
            output = self._attend(few)
        return CapturedRun(graph, self._attend, output, "gate", self.divided(few))

    def fault(self, output: Tensor, kv_lengths: Sequence[int], where: str) -> str | None:
        """What is wrong with the attention of these KV lengths; None if it is right. GraphError as in
        ``wait_for_replay``."""
        wait_for_replay(f"{KERNEL} in {where}")
        share = error_share(output, self._expected(kv_lengths))
        if share <= TOLERANCE:
            return None
        return (
            f"{KERNEL} in the layout {self._ops.attention_layout} is wrong in {where}: the error is {share:.0%} of the "
            f"largest value for {self._shape} and KV lengths {list(kv_lengths[:MAX_SHOWN])}"
        )

    def _expected(self, kv_lengths: Sequence[int]) -> Tensor:
        """Attention in float32 on the host [T, H * D]."""
        outputs = []
        for q, table, length in zip(self._q.split(self._lengths), self._tables, kv_lengths, strict=True):
            pages = table.long()[: pages_for(length)]
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (self._keys, self._values))
            q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
            seen = torch.ones(q.shape[2], length, dtype=torch.bool)
            seen = seen.tril(length - q.shape[2]) if self._shape.is_causal else seen
            attended = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def error_share(output: Tensor, expected: Tensor) -> float:
    """The device's largest error, as a share of the largest value; infinite if it is not finite."""
    error = (output.cpu().float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(error.nan_to_num(nan=float("inf")))


def this_die() -> str:
    return f"NPU {npu.current_device()} of {platform.node()}"


def wait_for_replay(name: str, seconds: float | None = None) -> None:
    """Waits until the device has done all that was launched, for ``seconds`` at most (None: HANG_SECONDS). Then
    GraphError; what runs on the device is stopped, so that this process can end. ``name``: of what was launched."""
    event, limit = npu.Event(), HANG_SECONDS if seconds is None else seconds
    event.record()
    end = time.monotonic() + limit
    while not event.query():
        if time.monotonic() > end:
            npu.stop_device(npu.current_device())
            raise GraphError(
                f"{name} did not end within {limit:g} s, so {this_die()} hangs; look for other processes there, or "
                "serve with graph_mode eager"
            )
        time.sleep(POLL_SECONDS)


def replay_seconds(run: Callable[[], object], name: str) -> tuple[float, float]:
    """(seconds in which the host launches a replay, seconds until it is over); see ``wait_for_replay``."""
    begin = time.perf_counter()
    run()
    launched = time.perf_counter()
    wait_for_replay(name)
    return launched - begin, time.perf_counter() - begin
