"""Decoding steps of random models of a real one's shape on a GPU: graph against eager, and their times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.cuda.graphs import Capture, CudaGraphs
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import ModelConfig
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.families import FAMILIES
from lopa_ascend.families.table import SCALE
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import NO_LIMIT, NO_TOKEN, empty_states
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.tensors import Storage, flatten, input_size, make_constants, view_inputs
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import SplitModel
from lopa_ascend.model.registry import find_decoder
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.score.greedy import GreedyScore
from scripts.selftest.gpu_kernels import Measured

REPLAYS = 5
NORM = "norm.weight"


@dataclass(frozen=True)
class Shape:
    """A model's shape."""

    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    has_bias: bool

    def config(self) -> ModelConfig:
        """The configuration of such a model."""
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            max_position_embeddings=8192,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            attention_bias=self.has_bias,
            mask_token_id=self.vocabulary - 1,
            eos_token_ids=(0,),
            dtype="bfloat16",
            model_type=self.model_type,
        )


SHAPES = {
    "Dream-7B": Shape("Dream", 3584, 18944, 28, 28, 4, 128, 152064, True),
    "SDAR-8B": Shape("sdar", 4096, 12288, 36, 32, 8, 128, 151936, False),
}


@dataclass(frozen=True)
class StepCase:
    """The size of one step."""

    requests: int
    lookaheads: int
    prompt: int
    """Tokens; a multiple of the size of a page."""
    block: int = 32
    blocks: int = 2

    def bucket(self, logit_shift: int) -> Bucket:
        """The bucket that runs it."""
        branches = 1 + self.lookaheads
        return Bucket(
            sequences=self.requests,
            blocks=self.blocks,
            pages=self.prompt // PAGE_SIZE + pages_for(self.blocks * self.block),
            branches=branches,
            slots=branches,
            block_length=self.block,
            max_blocks=self.blocks,
            logit_shift=logit_shift,
        )


def random_model(shape: Shape, ops: Ops, dtype: torch.dtype, *, is_int8: bool) -> SplitModel:
    """A model of random weights that lie on the device."""
    config = shape.config()
    family = FAMILIES[shape.model_type]
    tensors = family.tensors(config)
    layers = tensors.quantized(INT8_LAYERS if is_int8 else ())
    random = torch.Generator(ops.device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, spec in tensors.with_scales(layers).specs.items():
        if name.endswith(SCALE):
            value = torch.full(spec.shape, 0.02 / 127, device=ops.device)
        elif spec.row.linear is not None and spec.module in layers.modules:
            value = torch.randint(-127, 128, spec.shape, generator=random, device=ops.device, dtype=torch.int8)
        elif name.endswith(NORM):
            value = torch.ones(spec.shape, dtype=dtype, device=ops.device)
        else:
            value = torch.randn(spec.shape, generator=random, device=ops.device, dtype=dtype) * 0.02
        weights[spec.ours] = torch.cat([weights[spec.ours], value]) if spec.ours in weights else value
    return find_decoder(family)(family, config, weights, ops, ALONE, 8192)


class RandomStep:
    """One step of a random model, whose cells are all masked.

    Args:
        model: of ``random_model``.
        case: the step.
    """

    def __init__(self, model: SplitModel, case: StepCase) -> None:
        self.case, self.model, device = case, model, model.ops.device
        self.bucket = bucket = case.bucket(model.properties.logit_shift)
        shared = case.requests * case.prompt // PAGE_SIZE
        own = pages_for(case.blocks * case.block)
        num_pages = shared + case.requests * bucket.slots * own
        padding = pages_for(bucket.tokens)
        dtype = model.head.dtype
        self._pool = KVPool(model.config.kv_shape(), num_pages, dtype, str(device), padding)
        memory = torch.zeros(input_size(bucket), dtype=torch.int32)
        self._write(memory, shared, own)
        seats = torch.zeros(case.requests * (1 + bucket.max_blocks) + bucket.tokens, model.config.hidden_size)
        self._storage = Storage(empty_states(case.requests, bucket).to(device), seats.to(dtype).to(device))
        constants = make_constants(bucket, num_pages * PAGE_SIZE)
        on_device = type(constants)(*(tensor.to(device) for tensor in constants))
        caches = self._pool.k, self._pool.v
        self.tensors = flatten(view_inputs(memory.to(device), bucket), on_device, self._storage, caches)
        vocabulary = model.config.vocab_size
        score = GreedyScore(range(vocabulary), vocabulary - 1, vocabulary, ALONE, model.ops)
        self.step = DecodeStep(bucket, model, score, ALONE)
        ends = [case.prompt + case.block * (1 + block) for block in range(case.blocks)]
        self.kv_lengths = ends * (case.requests * bucket.slots)

    def _write(self, memory: Tensor, shared: int, own: int) -> None:
        """The inputs of the step: every slot has pages of its own after those of the prompt."""
        case, bucket = self.case, self.bucket
        launch, params, inputs = view_inputs(memory, bucket)
        sequences, slots = bucket.shape("sequences slots")
        launch.seats.copy_(torch.arange(sequences))
        launch.new_tokens.fill_(self.model.config.mask_token_id)
        launch.cells.copy_(torch.arange(bucket.cells).expand_as(launch.cells))
        launch.blocks.copy_(torch.arange(bucket.blocks).expand_as(launch.blocks))
        launch.max_opened_blocks.fill_(bucket.blocks)
        private = shared + torch.arange(sequences * slots * own).view(sequences, slots, own)
        positions = torch.arange(bucket.cells)
        flat = private[..., positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        launch.slot_mapping.copy_(flat.view(launch.slot_mapping.shape))
        params.mask.fill_(self.model.config.mask_token_id)
        params.ends.fill_(NO_TOKEN)
        params.num_branches.fill_(case.lookaheads)
        params.max_active_blocks.fill_(NO_LIMIT)
        params.tau_conf.fill_(0.9)
        inputs.positions.copy_((case.prompt + positions).repeat(sequences * slots))
        first_own_row = sequences * (1 + bucket.max_blocks)
        for rows in (inputs.hidden_rows, inputs.predicted_by):
            rows.copy_(first_own_row + torch.arange(bucket.tokens))
        prompt = torch.arange(shared).view(sequences, 1, -1).expand(-1, slots, -1)
        tables = torch.cat([prompt, private], 2).repeat_interleave(bucket.entries, 1)
        inputs.page_tables.copy_(tables.reshape(inputs.page_tables.shape))

    def reset(self) -> None:
        """Puts the sequences back to where they were before the first step."""
        self._storage.states.copy_(empty_states(self.case.requests, self.bucket))

    def floor(self, measured: Measured) -> float:
        """Seconds that the step must take: each product its bytes or its operations, and keys and values once."""
        taken, dtype = 0.0, self.model.head.dtype
        for weight in (*self.model.weights.values(), self.model.head):
            if weight.dim() == 2 and weight is not self.model.weights["embed.weight"]:
                rate = measured.int8_flops if weight.dtype == torch.int8 else measured.bf16_flops
                operations = 2.0 * self.bucket.tokens * weight.numel()
                taken += max(weight.nbytes / measured.bandwidth, operations / rate)
        page = KVPool.page_bytes(self.model.config.kv_shape(), dtype)
        return taken + page * self._pool.num_pages / measured.bandwidth


def time_step(step: RandomStep, capture: Capture, measured: Measured) -> dict[str, Any]:
    """Milliseconds of a replayed step, and whether it computed what the step does op by op."""
    compiler = CudaGraphs(capture)
    name = step.bucket.name
    few = [length if index else 2 for index, length in enumerate(step.kv_lengths)]
    run = compiler.compile(step.step, name, step.tensors, few)
    step.reset()
    replayed = run(step.kv_lengths).clone()
    step.reset()
    lengths = torch.tensor(step.kv_lengths, dtype=torch.int32, device=replayed.device)
    is_equal = torch.equal(step.step(step.tensors, lengths), replayed)
    capture.wait()
    begin = time.perf_counter()
    run(step.kv_lengths)
    host = time.perf_counter() - begin
    capture.wait()
    begin = time.perf_counter()
    for _ in range(REPLAYS):
        run(step.kv_lengths)
    capture.wait()
    taken = (time.perf_counter() - begin) / REPLAYS
    found = {"ms": 1000 * taken, "host_ms": 1000 * host, "floor_ms": 1000 * step.floor(measured), "equal": is_equal}
    if replayed.is_cuda:
        found["kernels_ms"] = _kernel_milliseconds(lambda: run(step.kv_lengths), capture)
    return found


def _kernel_milliseconds(launch: Any, capture: Capture) -> float:
    """Milliseconds that the kernels of a launch take together; the rest of its time the GPU waits."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        capture.wait()
    return sum(event.device_time_total for event in profile.events()) / 1000
