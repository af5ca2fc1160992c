"""The laboratory's kernels refuse what the documents of the real kernels exclude: a mirror of these documents, which
says nothing of the kernels themselves. Numeric mode lifts the constraints on dtypes and head sizes, and no others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend.kv.pages import PAGE_SIZE
from tests.npu.lab import attention, kernels  # noqa: F401
from tests.npu.lab.constraints import NpuConstraint, numeric

pytestmark = pytest.mark.npu
npu = torch.ops.npu
BF16 = torch.bfloat16
Calls = dict[str, tuple[str, dict[str, Any]]]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def transposed(*shape: int) -> Tensor:
    """A tensor of this shape that is not contiguous."""
    return zeros(shape[1], shape[0], *shape[2:]).transpose(0, 1)


# Of each case: its name, a part of the message, and the arguments that spoil a call that is right without them.

TWO_ENTRIES: dict[str, Any] = {
    "query": zeros(40, 14, 128),
    "key": zeros(5, PAGE_SIZE, 256),
    "value": zeros(5, PAGE_SIZE, 256),
    "actual_seq_lengths": [32, 40],
    "actual_seq_lengths_kv": [300, 130],
    "block_table": torch.tensor([[4, 0, 2], [1, 0, 0]], dtype=torch.int32),
    "num_heads": 14,
    "num_key_value_heads": 2,
    "scale": 1.0,
    "input_layout": "TND",
    "block_size": PAGE_SIZE,
}
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
BSH: dict[str, Any] = {"input_layout": "BSH", "query": zeros(2, 20, 14 * 128), "actual_seq_lengths": [20, 20]}
SMALL_HEADS = {"query": zeros(40, 14, 8), "key": zeros(5, PAGE_SIZE, 16), "value": zeros(5, PAGE_SIZE, 16)}
FLOATS = {name: TWO_ENTRIES[name].float() for name in ("query", "key", "value")}
ATTENTION: Calls = {
    "a mask": ("no mask with sparse_mode 0", {"atten_mask": torch.zeros(1, 40, 384, dtype=torch.bool)}),
    "another sparse mode": ("sparse_mode 0, and 3", {"sparse_mode": 2, "atten_mask": CAUSAL}),
    "a causal call without a mask": ("3 with a mask", {"sparse_mode": 3}),
    "a causal mask of another size": (r"\[2048, 2048\]", {"sparse_mode": 3, "atten_mask": CAUSAL[:40, :384]}),
    "a causal mask in float": ("bool, int8", {"sparse_mode": 3, "atten_mask": CAUSAL.float()}),
    "a mask of what is before": ("hides what is behind", {"sparse_mode": 3, "atten_mask": ~CAUSAL}),
    "a causal entry of more queries than keys": (
        "no more queries than keys",
        {"sparse_mode": 3, "atten_mask": CAUSAL, "actual_seq_lengths_kv": [300, 7]},
    ),
    "unpaged keys": ("paged keys alone", {"block_table": None}),
    "no kv lengths": ("need actual_seq_lengths_kv", {"actual_seq_lengths_kv": None}),
    "no query lengths": ("both length lists", {"actual_seq_lengths": None}),
    "lengths that are not cumulative": ("cumulative", {"actual_seq_lengths": [32, 8]}),
    "lengths that leave tokens over": ("number of tokens", {"actual_seq_lengths": [32, 39]}),
    "too many entries": ("4096", {"actual_seq_lengths": [0] * 4096 + [40]}),
    "heads that do not divide": ("multiple of the KV heads", {"num_key_value_heads": 3}),
    "too many query heads a KV head": ("at most 64", {"num_heads": 130, "query": zeros(40, 130, 128)}),
    "too many heads": ("at most 256", {"num_heads": 512}),
    "a query that is not contiguous": ("contiguous", {"query": transposed(40, 14, 128)}),
    "a query of another dtype": ("one dtype", {"query": zeros(40, 14, 128, dtype=torch.float16)}),
    "caches of two shapes": ("equal caches", {"value": zeros(6, PAGE_SIZE, 256)}),
    "a table in int64": ("int32", {"block_table": TWO_ENTRIES["block_table"].long()}),
    "a row of the table too few": ("one row", {"block_table": TWO_ENTRIES["block_table"][:1]}),
    "a table with too few columns": (
        "too few columns",
        {"block_table": TWO_ENTRIES["block_table"][:, :2].contiguous()},
    ),
    "a page that is not there": ("page id", {"block_table": TWO_ENTRIES["block_table"] + 1}),
    "fewer pages than the entries have": (
        "shared or not",
        {name: zeros(4, PAGE_SIZE, 256) for name in ("key", "value")}
        | {"block_table": torch.tensor([[3, 0, 2], [1, 0, 0]], dtype=torch.int32)},
    ),
    "small pages": ("block_size", {"block_size": 64}),
    "a page size that is not the cache's": (r"caches \[N, page", {"block_size": 256}),
    "other heads in the cache": ("K \\* D elements", {"num_key_value_heads": 1}),
    "BSH over a cache of four dimensions": (
        "alone",
        BSH | {name: zeros(5, PAGE_SIZE, 2, 128) for name in ("key", "value")},
    ),
    "BSH with padded queries": ("padded", BSH | {"actual_seq_lengths": [20, 7]}),
    "another layout": ("TND and BSH", {"input_layout": "BNSD"}),
}
LIFTED_ATTENTION: Calls = {
    "float32": ("bfloat16 alone", FLOATS),
    "float32 in BSH": ("float16 or bfloat16", BSH | FLOATS | {"query": BSH["query"].float()}),
    "small heads": ("16 to 256 in steps", SMALL_HEADS),
    "heads that are no multiple of 16": ("multiple of 16", BSH | SMALL_HEADS | {"query": zeros(2, 20, 14 * 8)}),
}

WRITE: dict[str, Any] = {
    "key": zeros(3, 2, 16),
    "value": zeros(3, 2, 16),
    "key_cache": zeros(2, PAGE_SIZE, 2, 16),
    "value_cache": zeros(2, PAGE_SIZE, 2, 16),
    "slot_mapping": torch.tensor([7, 200, 3], dtype=torch.int32),
    "cache_mode": "Norm",
}
WRITES: Calls = {
    "the default mode, for NZ caches": ("default is PA_NZ", {"cache_mode": "PA_NZ"}),
    "values that are not contiguous": ("contiguous", {"value": transposed(3, 2, 16)}),
    "a cache that is not contiguous": ("contiguous", {"key_cache": transposed(2, PAGE_SIZE, 2, 16)}),
    "keys of another dtype": ("one dtype", {"key": zeros(3, 2, 16, dtype=torch.float32)}),
    "positions in float": ("int32 or int64", {"slot_mapping": torch.zeros(3)}),
    "fewer positions than tokens": ("as many positions", {"slot_mapping": WRITE["slot_mapping"][:2]}),
    "a position that comes twice": ("twice", {"slot_mapping": torch.tensor([7, 200, 7])}),
    "-1 for padding": ("outside", {"slot_mapping": torch.tensor([7, -1, 3])}),
    "a position after the cache": ("outside", {"slot_mapping": torch.tensor([7, 256, 3])}),
    "a cache of three dimensions": ("page, heads, size", {"key_cache": zeros(2, PAGE_SIZE, 32)}),
}

ROTATE: dict[str, Any] = {"input": zeros(1, 5, 3, 8), "r1": zeros(1, 5, 1, 8), "r2": zeros(1, 5, 1, 8)}
ROTATIONS: Calls = {
    "three dimensions": ("4-D", {"input": zeros(5, 3, 8)}),
    "tables of half a head": ("1S1D", {name: zeros(1, 5, 1, 4) for name in ("r1", "r2")}),
    "tables of another dtype": (
        "one float dtype",
        {name: zeros(1, 5, 1, 8, dtype=torch.float32) for name in ("r1", "r2")},
    ),
    "a cosine above 1": (r"\[-1, 1\]", {"r1": zeros(1, 5, 1, 8) + 2}),
    "an odd head": ("even head size", {"input": zeros(1, 5, 3, 7)}),
    "too large a head": ("below 896", {"input": zeros(1, 5, 3, 896)}),
    "too many heads": ("fewer than 1000", {"input": zeros(1, 5, 1000, 8)}),
    "interleaved halves": ("half alone", {"rotary_mode": "interleave"}),
}

GATE_UP: dict[str, Any] = {"x": zeros(3, 9472), "activate_left": True, "quant_mode": 1}
INT_GATE_UP: dict[str, Any] = {
    "x": zeros(3, 9472, dtype=torch.int32),
    "weight_scale": torch.zeros(2, 9472),
    "activation_scale": torch.zeros(3),
}
SWIGLU_QUANTS: Calls = {
    "float32 to quantise": ("bfloat16", {"x": zeros(3, 9472, dtype=torch.float32)}),
    "rows of no multiple of 64": ("multiple of 64", {"x": zeros(3, 96)}),
    "rows of a whole Dream-7B": ("memory of a vector core", {"x": zeros(3, 37888)}),
    "a static scale": ("one mode alone", {"quant_mode": 0}),
    "integers without scales": ("float32 scales", {"x": zeros(3, 9472, dtype=torch.int32)}),
    "scales of bfloat16": ("nothing to dequantise", {"weight_scale": torch.zeros(9472)}),
    "long rows in groups": ("at most 7232", INT_GATE_UP | {"group_index": torch.tensor([1, 2])}),
    "a scale of outputs without groups": ("weight_scale is", INT_GATE_UP | {"weight_scale": torch.zeros(1, 9472)}),
}

NORM = {"x1": zeros(3, 8), "x2": zeros(3, 8), "gamma": zeros(8)}
NORMS: Calls = {
    "a weight of another dtype": ("one float dtype", {"gamma": torch.zeros(8)}),
    "sums of two shapes": ("one shape", {"x2": zeros(1, 8)}),
    "a weight of another size": ("last dimension", {"gamma": zeros(4)}),
}


def call_attention(**wrong: Any) -> None:
    npu.npu_fused_infer_attention_score(**TWO_ENTRIES | wrong)


def call_write(**wrong: Any) -> None:
    npu.npu_scatter_pa_kv_cache(**{n: x.clone() if isinstance(x, Tensor) else x for n, x in (WRITE | wrong).items()})


def call_rotate(**wrong: Any) -> None:
    npu.npu_rotary_mul(**ROTATE | wrong)


def call_swiglu_quant(**wrong: Any) -> None:
    npu.npu_dequant_swiglu_quant(**GATE_UP | wrong)


def call_norm(**wrong: Any) -> None:
    npu.npu_add_rms_norm(**NORM | wrong)


GROUPS = [
    (call_attention, ATTENTION),
    (call_write, WRITES),
    (call_rotate, ROTATIONS),
    (call_norm, NORMS),
    (call_swiglu_quant, SWIGLU_QUANTS),
]
CASES = [pytest.param(call, *case, id=name) for call, cases in GROUPS for name, case in cases.items()]


@pytest.mark.parametrize("call", [call for call, _ in GROUPS])
def test_the_calls_that_the_cases_spoil_are_right(call: Any) -> None:
    call()


@pytest.mark.parametrize("mode", [nullcontext, numeric], ids=["strict", "numeric"])
@pytest.mark.parametrize(("call", "message", "wrong"), CASES)
def test_a_constraint_holds_in_both_modes(call: Any, message: str, wrong: dict[str, Any], mode: Any) -> None:
    with mode(), pytest.raises(NpuConstraint, match=message):
        call(**wrong)


@pytest.mark.parametrize(("message", "wrong"), LIFTED_ATTENTION.values(), ids=LIFTED_ATTENTION)
def test_numeric_mode_lifts_dtypes_and_head_sizes(message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(NpuConstraint, match=message):
        call_attention(**wrong)
    with numeric():
        call_attention(**wrong)
    with pytest.raises(NpuConstraint, match=message):
        call_attention(**wrong)


def test_the_other_norms_refuse_too() -> None:
    with pytest.raises(NpuConstraint, match="one float dtype"):
        npu.npu_rms_norm(zeros(3, 8), torch.zeros(8), 1e-6)
    with pytest.raises(NpuConstraint, match="even size"):
        npu.npu_swiglu(zeros(3, 7))
