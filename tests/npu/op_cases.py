"""The kernels that a start of the engine tries (``backend/npu/trials.py``), with the full shapes of Dream-7B, and
the experts of LLaDA2.0-mini."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.backend.npu.trials import NORM_ROPE, LayerShape, Random, experts_trial, int8_trials, trials
from scripts.bench.plan.models import load_model
from tests.kernel_cases import EPS, Case
from tests.npu.captures import Step, replayed_case
from tests.npu.cases import CPU, EXPERTS, INT8, QWEN3, S, randn

MAX_OUTPUTS = 2 * S.inner
"""Of an int8 product: none is cut."""
RANKS = (4, 1)
"""Tensor parallel ranks that share the layer whose int8 kernels are tried."""
EXPERT_TOKENS = (1, 32, 1024)
"""Of one token, of a block, and of a full step."""
MINI = load_model("LLaDA2.0-mini")
EXPERT_HIDDEN = MINI.hidden_size


def shape_of(ranks: int) -> LayerShape:
    """A rank's part of a layer."""
    return LayerShape(
        hidden=S.hidden,
        inner=S.inner // ranks,
        heads=S.heads // ranks,
        kv_heads=S.kv_heads // ranks,
        head_dim=S.dim,
        rotary_dim=S.dim,
        eps=EPS,
        dtype=torch.bfloat16,
        experts=None,
        has_int8=False,
        rows=S.tokens,
        max_outputs=MAX_OUTPUTS,
    )


def float_cases(ops: Ops) -> Iterator[Case]:
    """Those that a layer in bfloat16 needs, beside attention."""
    assert isinstance(ops, NpuOps)
    for trial in trials(ops, shape_of(1)):
        name = f"{QWEN3}: {trial.name}" if trial.name == NORM_ROPE else trial.name
        yield Case(name, trial.run, trial.expected)


def expert_cases(ops: Ops) -> Iterator[Case]:
    """Mixtures of experts. No token's experts are near-ties, so rounding chooses none."""
    assert isinstance(ops, NpuOps)
    assert MINI.experts is not None
    random = Random(torch.bfloat16)
    for tokens in EXPERT_TOKENS:
        trial = experts_trial(ops, random, MINI.experts, EXPERT_HIDDEN, tokens, is_int8=False)
        yield Case(f"{EXPERTS}: {tokens} tokens", trial.run, trial.expected)


def int8_cases(ops: Ops) -> Iterator[Case]:
    """Those that only W8A8 needs; and a product in a graph."""
    assert isinstance(ops, NpuOps)
    for ranks in RANKS:
        for trial in int8_trials(ops, shape_of(ranks), Random(torch.bfloat16)):
            yield Case(f"{INT8}: {trial.name}{' of a rank of 4' * (ranks == 4)}", trial.run, trial.expected)
    yield captured_product_case(ops)


def captured_product_case(ops: Ops) -> Case:
    """A quantisation and a product that are captured with some activations, and replayed with others."""
    weight, by_output = CPU.quantize(randn(S.hidden, S.hidden, scale=S.hidden**-0.5))

    def product(there: Ops) -> Step:
        stored, scale = there.stored(weight.to(there.device)), by_output.to(there.device)
        return lambda _, x: [there.quant_linear(*there.quantize(x), stored, scale, None, torch.bfloat16)]

    inputs = [[randn(S.tokens, S.hidden)] for _ in range(2)]
    return replayed_case(ops, f"{INT8}: product in a graph, replayed with other inputs", product, inputs)
