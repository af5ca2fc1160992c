"""Which attention layout is faster? Replays of a captured graph that holds attention alone are timed in each.

An eager call would be timed with its launch, which takes the host longer than attention takes the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import pages_for
from tests.kernel_cases import BLOCK, Case
from tests.npu.captures import Replayed
from tests.npu.cases import CPU, HEADS, AttentionSample, attention_sample

SPEED = "replayed attention"
"""Beginning of the names of ``speed_cases``."""
TIMED_LAYOUTS = ("TND", "TND16")
"""The layouts of which the faster one is chosen."""
CALLS = 4
"""Calls of attention in a graph, one after the other."""
TP = 4
"""Ranks that share the heads."""
RANK_HEADS = HEADS[0] // TP, HEADS[1] // TP
KV_LENGTHS = (544, 4096)
"""Keys that the entries of one or two sequences see, by case."""
FEW = tuple((4, num_keys) for num_keys in KV_LENGTHS)
"""Attention entries of BLOCK queries, before they are divided, and the keys that they see."""
MANY = ((8, 1024), (32, 1024))
"""The same of more sequences: the kernel has a faster path for few short entries alone (ops-transformer, the tiling of
flash_attention_infer)."""


def replayed_attention(ops: Ops, there: AttentionSample, name: str, calls: int = CALLS) -> Replayed:
    """Calls of attention in a graph, one after the other; the sample is on the device of ``ops``."""
    return Replayed(lambda *_: [there.attend(ops) for _ in range(calls)], name, there.entries.kv_lengths)


def speed_cases(by_layout: Mapping[str, Ops]) -> Iterator[tuple[str, Case]]:
    """Attention of the same blocks in every timed layout, with the heads of a rank of TP 4: layouts and cases."""
    for blocks, num_keys in (*FEW, *MANY):
        # Twice the pages, since the layout with shorter entries counts each of them twice.
        sample = attention_sample([BLOCK] * blocks, [num_keys] * blocks, 2 * blocks * pages_for(num_keys), RANK_HEADS)
        for layout in TIMED_LAYOUTS:
            yield layout, speed_case(by_layout[layout], speed_name(layout, blocks, num_keys), sample)


def speed_case(ops: Ops, name: str, sample: AttentionSample) -> Case:
    return Case(name, replayed_attention(ops, sample.on(ops), name), lambda: [sample.attend(CPU)] * CALLS)


def speed_name(layout: str, blocks: int, num_keys: int) -> str:
    """The name of a speed case."""
    return f"{SPEED} {layout}, {CALLS} calls of {blocks} blocks, {num_keys} keys"
