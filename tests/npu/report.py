"""The kernels of a Dream-7B's decode step, counted: ci/npu.sh --lowering-report, which is
python -m tests.npu.lab tests.npu.report. Those of what torchair makes for Ascend's graph engine, and the tasks of the
graphs that ``npugraph_ex`` captures.

Nothing is computed, and no weight is touched. Ranks of tensor parallelism are one process here, rank 0, whose
collectives reach nobody. KV lengths are inputs, as in the graphs that the engine compiles.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lopa_ascend.backend.interface import Experts
from lopa_ascend.backend.npu.ops import FRACTAL_NZ, NpuOps
from lopa_ascend.config import ExpertsConfig
from lopa_ascend.families import FAMILIES
from lopa_ascend.graph import policy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.graph.forwards import ForwardTensors, PassLauncher, PassShape
from lopa_ascend.graph.spec import num_elements
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.tensors import (
    Caches,
    Storage,
    flatten,
    input_size,
    make_constants,
    unflatten,
    view_inputs,
    view_packing,
)
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import Model
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.score.greedy import GreedyScore
from tests.made_weights import made_weights
from tests.npu.cases import paged_entries
from tests.npu.lab import capture, collectives, device, engine  # noqa: F401
from tests.npu.lab.lowering import Lowered, lower
from tests.npu.plain_ops import PlainOps
from tests.npu.samples import dream_7b, forward_inputs, moved, plain_dream

VOCABULARY, MASK, NUM_TOKENS, NUM_LAYERS = 152064, 151666, 151667, 28
BUCKET = Bucket(sequences=1, blocks=2, pages=8, branches=4, slots=4, block_length=32, max_blocks=4)
NUM_PAGES = 256
SEATS = 8
REPORTED = ("bf16", "bf16_tp4", "w8a8", "w8a8_tp4", "sdar")
"""The variants whose captured tasks are counted."""


class UnfilledOps(NpuOps):
    """Weights as NpuOps stores them, with whatever is in memory."""

    def stored(self, weight: Tensor) -> Tensor:
        if weight.dtype != torch.int8:
            return weight.new_empty(weight.mT.shape)
        tiled: Tensor = torch.ops.npu.empty_with_format(
            list(weight.mT.shape), dtype=weight.dtype, device="npu", acl_format=FRACTAL_NZ
        )
        return tiled

    def stored_experts(self, experts: Experts) -> Experts:
        down_scale = experts.down_scale
        return replace(
            experts,
            router=experts.router.bfloat16(),
            gate_up=self.stored(experts.gate_up),
            down=self.stored(experts.down),
            down_scale=None if down_scale is None else down_scale.bfloat16(),
        )


UNFILLED = UnfilledOps()
"""The ops of most variants: what was lowered is kept, and equal variants have the same ops."""


@dataclass(frozen=True)
class Variant:
    """A way to run the model."""

    ops: NpuOps
    tp_size: int = 1
    is_plain: bool = False
    """Written in plain torch, and fused."""
    is_int8: bool = False
    """In W8A8."""
    family: str = "Dream"
    """Whose tensors it has, in the sizes of Dream-7B: SDAR's norms of queries and keys, openPangu's second bias, or
    LLaDA2's experts, but fewer."""


def variants() -> dict[str, Variant]:
    return {
        "bf16": Variant(UNFILLED),
        "bf16_tp4": Variant(UNFILLED, tp_size=4),
        "w8a8": Variant(UNFILLED, is_int8=True),
        "w8a8_tp4": Variant(UNFILLED, tp_size=4, is_int8=True),
        "sdar": Variant(UNFILLED, family="sdar"),
        "pangu": Variant(UNFILLED, family="PanguEmbedded"),
        "llada2": Variant(UNFILLED, family="llada2_moe"),
        "llada2_w8a8": Variant(UNFILLED, is_int8=True, family="llada2_moe"),
        "plain_fused": Variant(UNFILLED, is_plain=True),
        "unfused": Variant(PlainOps()),
    }


@contextmanager
def ranks(size: int) -> Iterator[Group]:
    """Rank 0 of so many."""
    if size == 1:
        yield ALONE
        return
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield Group(0, size, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


EXPERTS = ExpertsConfig(
    num_experts=16, per_token=4, num_groups=4, kept_groups=2, scale=2.5, inner=512, shared_inner=512, first_layer=0
)


def unfilled(_: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A weight with whatever is in memory."""
    return torch.empty(shape, dtype=dtype, device="npu")


class Sample:
    """A model of ``num_layers`` of Dream-7B with its whole vocabulary, caches and scores."""

    def __init__(self, variant: Variant, num_layers: int, group: Group, num_pages: int = NUM_PAGES) -> None:
        config = replace(dream_7b(num_layers), vocab_size=VOCABULARY, mask_token_id=MASK)
        self.model: Model
        if variant.is_plain:
            self.model = plain_dream(config, variant.ops)
        else:
            family = FAMILIES[variant.family]
            config = replace(config, attention_bias=variant.family in ("Dream", "PanguEmbedded"))
            if variant.family == "llada2_moe":
                config = replace(config, experts=EXPERTS)
            weights = made_weights(family, config, unfilled, is_int8=variant.is_int8, ranks=group.size)
            self.model = Decoder(family, config, weights, variant.ops, group)
        first = self.model.first_token_id
        ids = range(first, first + self.model.local_vocab_size)
        self.score = GreedyScore(ids, MASK, NUM_TOKENS, group, variant.ops)
        shape = (num_pages, PAGE_SIZE, config.local_kv_heads(group.size), config.head_dim)
        self.k_caches, self.v_caches = (
            [torch.empty(shape, dtype=torch.bfloat16, device="npu") for _ in range(num_layers)] for _ in range(2)
        )


def with_lengths(function: Any, *args: Any, kv_lengths: Sequence[int]) -> Lowered:
    """Of ``function(*args, kv_lengths)``, with the lengths as inputs."""
    sources = ",".join(f"L['kv_lengths'][{index}]" for index in range(len(kv_lengths)))
    with torch.compiler.config.patch(dynamic_sources=sources):  # type: ignore[attr-defined]
        return lower(function, *args, list(kv_lengths))


@functools.cache
def lowered_model(variant: Variant, num_layers: int) -> Lowered:
    """Embedding, layers, head and scores, with the gather of the shards' statistics."""
    with ranks(variant.tp_size) as group:
        sample = Sample(variant, num_layers, group)
        entries, _ = paged_entries((BUCKET.block_length,) * 4, (544,) * 4, num_pages=NUM_PAGES)
        inputs = moved(replace(forward_inputs(entries, NUM_PAGES), rows=None), "npu")

        def model(kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
            given = replace(inputs, entries=replace(inputs.entries, kv_lengths=tuple(kv_lengths)))
            return sample.score(sample.model.logits(sample.model.forward(given, sample.k_caches, sample.v_caches)))[:2]

        return with_lengths(model, kv_lengths=entries.kv_lengths)


def step_tensors(bucket: Bucket, hidden: int, caches: Caches = ((), ()), seats: int = SEATS) -> list[Tensor]:
    memory = torch.zeros(input_size(bucket), dtype=torch.int32, device="npu")
    constants = policy.Constants(*(x.to("npu") for x in make_constants(bucket, NUM_PAGES * PAGE_SIZE)))
    states = torch.zeros(seats, bucket.state_size, device="npu")
    num_rows = seats * (1 + bucket.max_blocks) + bucket.tokens
    kept = torch.zeros(num_rows, hidden, dtype=torch.bfloat16, device="npu")
    storage = Storage(states, kept)
    return flatten(view_inputs(memory, bucket), constants, storage, caches, view_packing(memory, bucket))


@functools.cache
def lowered_step(variant: Variant, num_layers: int, bucket: Bucket = BUCKET, bp_size: int = 1) -> Lowered:
    """The whole decode step, on one of the ranks that split each branch, or of ``bp_size`` that split the branches."""
    with ranks(max(variant.tp_size, bp_size)) as group:
        tp, bp = (group, ALONE) if bp_size == 1 else (ALONE, group)
        sample = Sample(variant, num_layers, tp)
        step = DecodeStep(bucket, sample.model, sample.score, bp)
        caches = sample.k_caches, sample.v_caches
        tensors = step_tensors(bucket, sample.model.config.hidden_size, caches)
        lengths = [544] * bucket.all_entries

        def run(kv_lengths: list[int]) -> Tensor:
            return step(tensors, kv_lengths)

        return with_lengths(run, kv_lengths=lengths)


@functools.cache
def lowered_policy(bucket: Bucket = BUCKET, branch_acceptance: str = "published") -> Lowered:
    """The decode policy: everything of a step but the model and its scores, and the writes to what outlives it."""
    tensors = step_tensors(bucket, 1)
    shape, max_cells = (bucket.sequences, bucket.branches, bucket.cells), bucket.max_cells
    ids, probs = (torch.zeros(shape, dtype=dtype, device="npu") for dtype in (torch.int32, torch.float32))

    def run(tensors: list[Tensor], ids: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        (launch, params, _), constants, storage, _ = unflatten(tensors)
        state = policy.unpack_state(storage.states, launch, max_cells)
        rows = policy.branch_rows(state, launch, params, constants)
        written = policy.rows_of_group(rows, launch, constants, 1, 0, full_attention=False)
        predicted = policy.Predicted(ids, probs, probs)
        after, winner = policy.advance(rows, predicted, launch, params, constants, branch_acceptance)
        return *written, policy.pack_state(after, max_cells), winner

    return lower(run, tensors, ids, probs)


def captured_step(variant: Variant, num_layers: int, bucket: Bucket = BUCKET) -> Counter[str]:
    """The tasks of the ACL graph that ``npugraph_ex`` captures of the whole decode step, by type."""
    with ranks(variant.tp_size) as group, device.nothing_computed():
        sample = Sample(variant, num_layers, group)
        step = DecodeStep(bucket, sample.model, sample.score, ALONE)
        tensors = step_tensors(bucket, sample.model.config.hidden_size, (sample.k_caches, sample.v_caches))
        lengths = [544] * bucket.all_entries
        compiler = load_compiler("npu", "npugraph_ex", key=f"report of {variant}")
        before = capture.tapes()
        compiler.compile(step, f"layers{num_layers}", tensors, lengths)
        (tape,) = capture.tapes(other_than=before)
        tasks = Counter(task.op.name() for task in tape.tasks)
    torch._dynamo.reset()  # else dynamo keeps the step, whose weights fill the device
    return tasks


def captured_forward(variant: Variant, num_layers: int, bucket: PassShape) -> Counter[str]:
    """The same of a forward pass of a causal model."""
    with ranks(variant.tp_size) as group, device.nothing_computed():
        sample = Sample(variant, num_layers, group)
        pool: Any = SimpleNamespace(k=sample.k_caches, v=sample.v_caches)
        memory = torch.zeros(num_elements(ForwardTensors, bucket), dtype=torch.int32, device="npu")
        launcher = PassLauncher(bucket, sample.model, pool, memory, (NUM_PAGES - 4) * PAGE_SIZE)
        compiler = load_compiler("npu", "npugraph_ex", key=f"report of {variant}")
        before = capture.tapes()
        launcher.compile(compiler)
        (tape,) = capture.tapes(other_than=before)
        tasks = Counter(task.op.name() for task in tape.tasks)
    torch._dynamo.reset()
    return tasks


def captured_report(variant: Variant) -> dict[str, Any]:
    """What the report says of a variant's captured tasks."""
    one, two, whole = (captured_step(variant, count) for count in (1, 2, NUM_LAYERS))
    per_layer = two - one
    assert whole == one + Counter({kind: count * (NUM_LAYERS - 1) for kind, count in per_layer.items()})
    return {
        "tasks_per_layer": per_layer.total(),
        "tasks_outside": whole.total() - NUM_LAYERS * per_layer.total(),
        "tasks_model": whole.total(),
        "by_type": dict(sorted(whole.items())),
    }


def main() -> None:
    report: dict[str, dict[str, Any]] = {"npugraph_ex": {}}
    for name in REPORTED:
        found = report["npugraph_ex"][name] = captured_report(variants()[name])
        print(f"{name}, captured by npugraph_ex: {found['tasks_per_layer']} tasks a layer")
        print(f"    {found['tasks_outside']} outside the layers, {found['tasks_model']} in {NUM_LAYERS} layers")
    policy_kernels = lowered_policy().num_kernels
    for name in (*REPORTED, "plain_fused", "unfused"):
        variant = variants()[name]
        one, two, whole = (lowered_model(variant, count) for count in (1, 2, NUM_LAYERS))
        report[name] = {
            "kernels_per_layer": two.num_kernels - one.num_kernels,
            "kernels_model": whole.num_kernels,
            "policy": policy_kernels,
            "by_type": dict(sorted(whole.by_type.items())),
        }
        layer = ", ".join(f"{kind} {count}" for kind, count in sorted((two.kernels - one.kernels).items()))
        print(f"{name}: {report[name]['kernels_per_layer']} kernels a layer: {layer}")
        print(f"    {whole.num_kernels} in {NUM_LAYERS} layers with embedding, head and scores")
        print(f"    {lowered_step(variant, 1).num_kernels - one.num_kernels} more in a whole decode step")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
