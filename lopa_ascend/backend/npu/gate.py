"""What an NPU must do before it serves: compute attention as float32 does, in the configured layout, also in a captured
graph whose KV lengths change; and end the replays of every graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
FALLBACK = "BSH"
"""The layout that is tried where the configured one is not right."""
HANG_SECONDS = 120.0
"""A replay that takes longer than this hangs. The first one also loads what the graph needs."""
POLL_SECONDS = 1e-4
logger = logging.getLogger(__name__)


class WrongKernelError(ValueError):
    """Attention on this NPU does not compute what it should."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a rank."""

    queries: int
    """Of an entry, before it is divided."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_keys: int
    """Of the longest sequence."""
    is_causal: bool = False
    """Whether entries may be causal."""


def right_ops(ops: NpuOps, shape: AttentionShape, captures: bool) -> NpuOps:
    """These ops, or those of the layout BSH if only these compute attention rightly.

    Args:
        captures: whether steps will run as captured graphs.

    Raises:
        WrongKernelError: names the kernel, its shape and its error.
    """
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
            logger.warning("%s; attention_layout %s is right, and is taken instead", found, FALLBACK)
            return other
        found = f"{found}; {found_there}"
    remedy = ", or of a captured graph alone: try graph_mode eager" if captures else ""
    raise WrongKernelError(f"{found}. This is a fault of the device or of its software{remedy}")


def first_fault(ops: NpuOps, shape: AttentionShape, captures: bool) -> str | None:
    """What attention does wrongly: the kernel, its shape and its error. None if it does nothing wrongly.

    Calls see few keys and then as many as a sequence can have, in a graph the latter twice.
    """
    shapes = [replace(shape, is_causal=False)]
    if shape.is_causal:  # the pages of a prompt; the first one has as many queries as keys
        shapes.append(replace(shape, queries=min(PAGE_SIZE, shape.max_keys)))
    return next(filter(None, (_fault_in(ops, each, captures) for each in shapes)), None)


def _fault_in(ops: NpuOps, shape: AttentionShape, captures: bool) -> str | None:
    """Of entries that are all causal, or of which none is."""
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
                output = run(sample.divided(lengths))
                wait_for_replay(f"{KERNEL} in {where}")
                if fault := sample.fault(output, lengths, where):
                    return fault
    except RuntimeError as error:
        return f"{KERNEL} in the layout {ops.attention_layout} ({shape}) is refused in {where}: {error}"
    return None


class Sample:
    """Random queries of some entries, with keys and values in pages that lie in no order."""

    def __init__(self, ops: NpuOps, shape: AttentionShape) -> None:
        self._ops, self._shape = ops, shape
        random = torch.Generator().manual_seed(0)
        pages = pages_for(max(shape.max_keys, PAGE_SIZE))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=random).to(shape.dtype)

        # Queries are large, so that few keys count: an average of all values is far off.
        self._q = 4 * normal(ENTRIES * shape.queries, shape.heads, shape.head_dim)
        cache = ENTRIES * pages, PAGE_SIZE, shape.kv_heads, shape.head_dim
        self._caches = normal(*cache), normal(*cache)
        self._tables = torch.randperm(ENTRIES * pages, generator=random).view(ENTRIES, pages).int()
        zeros = (0,) * ENTRIES
        lengths, causal = (shape.queries,) * ENTRIES, (shape.is_causal,) * ENTRIES
        self._whole = Entries(lengths, zeros, self._tables, tuple(range(ENTRIES)), zeros, causal=causal)
        entries = self._whole.divided(ops.max_queries)
        self._entries = replace(entries, page_tables=entries.page_tables.to(ops.device))
        self._on_device = [x.to(ops.device) for x in (self._q, *self._caches)]

    def divided(self, kv_lengths: Sequence[int]) -> list[int]:
        """The KV lengths of the parts of ENTRIES entries."""
        return list(replace(self._whole, kv_lengths=tuple(kv_lengths)).divided(self._ops.max_queries).kv_lengths)

    def attend(self, kv_lengths: Sequence[int]) -> Tensor:
        """Attention on the device [T, H * D]."""
        q, k_cache, v_cache = self._on_device
        entries = replace(self._entries, kv_lengths=tuple(self.divided(kv_lengths)))
        return self._ops.attention(q, k_cache, v_cache, entries)

    def captured(self) -> CapturedRun:
        """``attend`` as a graph that is captured with few keys, to be replayed with other KV lengths."""
        least = max(MIN_KV_LENGTH, self._shape.queries if self._shape.is_causal else 1)
        few = range(least, least + ENTRIES)
        with capturing(auto_dispatch_capture=True) as graph:
            output = self.attend(few)
        return CapturedRun(graph, self.attend, output, "gate", self.divided(few))

    def fault(self, output: Tensor, kv_lengths: Sequence[int], where: str) -> str | None:
        """What is wrong with the attention of these KV lengths; None if it is right."""
        expected = self._expected(kv_lengths)
        error = (output.cpu().float() - expected).abs().max() / expected.abs().max()
        share = float(error.nan_to_num(nan=float("inf")))
        if share <= TOLERANCE:
            return None
        return (
            f"{KERNEL} in the layout {self._ops.attention_layout} is wrong in {where}: the error is {share:.0%} of the "
            f"largest value for {self._shape} and KV lengths {list(kv_lengths)}"
        )

    def _expected(self, kv_lengths: Sequence[int]) -> Tensor:
        """Attention in float32 on the host [T, H * D]."""
        outputs = []
        for q, table, length in zip(self._q.chunk(ENTRIES), self._tables, kv_lengths, strict=True):
            k, v = (cache[table.long()[: pages_for(length)]].flatten(0, 1)[:length] for cache in self._caches)
            q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
            seen = torch.ones(q.shape[2], length, dtype=torch.bool)
            seen = seen.tril(length - q.shape[2]) if self._shape.is_causal else seen
            attended = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def wait_for_replay(name: str, seconds: float | None = None) -> None:
    """Waits until the device has done all that was launched.

    Args:
        name: of what was launched, for the message.
        seconds: the time limit; None for HANG_SECONDS.

    Raises:
        GraphError: the time is over. What runs on the device is then stopped, so that this process can end.
    """
    event, limit = npu.Event(), HANG_SECONDS if seconds is None else seconds
    event.record()
    end = time.monotonic() + limit
    while not event.query():
        if time.monotonic() > end:
            npu.stop_device(npu.current_device())
            raise GraphError(
                f"{name}: a replay did not end within {limit:g} s, so the device hangs; look for other processes on "
                "this device, or serve with graph_mode eager"
            )
        time.sleep(POLL_SECONDS)


def replay_seconds(run: Callable[[], object], name: str) -> tuple[float, float]:
    """(seconds in which the host launches a replay, seconds until it is over); see ``wait_for_replay``."""
    begin = time.perf_counter()
    run()
    launched = time.perf_counter()
    wait_for_replay(name)
    return launched - begin, time.perf_counter() - begin
