"""Which unit of a die computes an op in a captured graph: its cube and vector cores (AICORE), or the device's CPU
(AICPU), some ten times slower.

The lists are those of CANN's op libraries for 910B and 910C (ops-math and ops-nn, ``IsAiCoreSupport`` of each op). That
an op has an aclnn function does not say it. An op that neither list has cannot be captured here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

AICORE, AICPU, AIV = "AICore", "AICPU", "AIV"
"""AIV: a collective on the vector cores. They are fast, but take small messages alone."""
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
SMALL = FLOATS | {torch.int32, torch.int8, torch.uint8}
ALL = SMALL | {torch.int64, torch.bool}
_MAKES = "arange full ones zeros"
_MOVES = "cat clone copy fill index index_select masked_fill scatter split_with_sizes_copy stack where zero"
_ARITHMETIC = "abs add all any clamp maximum minimum mul ne neg eq ge gt le lt max min amax sub sum"
_BITS = "bitwise_and bitwise_not bitwise_or logical_and logical_not logical_or"
_FUNCTIONS = "_log_softmax _softmax argmax div exp log logsumexp mean pow reciprocal round rsqrt sigmoid silu topk"
AICORE_DTYPES = {
    **dict.fromkeys(f"{_MAKES} {_MOVES} {_ARITHMETIC} {_BITS} gather".split(), ALL),
    **dict.fromkeys(f"{_FUNCTIONS} addmm bmm mm sort".split(), FLOATS),
    "cumsum": SMALL,
}
"""By the name of an op in aten, the dtypes that the cores take."""
AICPU_DTYPES = {"cumsum": ALL - SMALL, "sort": ALL - FLOATS, "topk": ALL - FLOATS}
"""Those that run on the device's CPU; measured by others for cumsum and sort."""
VECTOR_MEMORY = 192 << 10
"""Bytes of a vector core's memory."""
GATHER_ROWS = 8
"""Rows of the gathered tensor that a vector core holds at a time, along the last dimension."""
GATHER_BYTES, GATHER_ELEMENTS = 3000 << 10, 2000
"""Beyond both, of the tensor and of the index, a gather whose rows are longer runs on the device's CPU."""
MAX_BYTES = 2**31 - 1
AIV_BYTES_OF_A_RANK = 1 << 20
"""An all-reduce of more than this for each rank leaves the vector cores (HCCL, ``all_reduce_operator.cc``: the
constant AIV_ALL_REDUCE_A3_ENTRY_SIZE)."""
AIV_GATHER_BYTES = 512 << 10
"""What an all-gather may have in total."""


def unit_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The unit that computes an op.

    Raises:
        RuntimeError: the lists do not have this op with these dtypes.
    """
    if op.namespace != "aten":
        return AICORE  # torch_npu's own are kernels of the cores
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name == "gather":
        return _unit_of_gather(args[0], args[1], args[2])
    cast_to = kwargs.get("dtype") or None
    dtypes = {cast_to} if cast_to is not None else {x.dtype for x in tensors}
    # The results of reductions are indices beside values, so ``out`` may have int64 where the kernel's input has not.
    if "out" in kwargs and name == "argmax":
        dtypes = {args[0].dtype}
    for unit, table in ((AICORE, AICORE_DTYPES), (AICPU, AICPU_DTYPES)):
        if dtypes and dtypes <= table.get(name, frozenset()):
            return unit
    if name in AICPU_DTYPES and dtypes <= ALL:
        return AICPU
    if name in AICORE_DTYPES and not dtypes:
        return AICORE
    found = ", ".join(sorted(map(str, dtypes)))
    raise RuntimeError(
        f"{op.name()} of {found}: it is not known whether a die computes it on its cores or on its CPU, so no graph "
        "should hold it (tests/npu/lab/units.py)"
    )


def _unit_of_gather(x: Tensor, dim: int, index: Tensor) -> str:
    num_bytes = x.numel() * x.dtype.itemsize
    if num_bytes > MAX_BYTES:
        return AICPU
    is_last = dim % max(x.dim(), 1) == x.dim() - 1
    if is_last and GATHER_ROWS * x.shape[-1] * x.dtype.itemsize <= VECTOR_MEMORY:
        return AICORE
    return AICPU if num_bytes > GATHER_BYTES and index.numel() > GATHER_ELEMENTS else AICORE


def unit_of_collective(name: str, x: Tensor, ranks: int) -> str:
    """The unit that runs a collective whose communicator may use the vector cores.

    Args:
        name: "all_reduce_" or "all_gather_into_tensor".
        x: what each rank gives.
    """
    num_bytes = x.numel() * x.dtype.itemsize
    if name.startswith("all_reduce"):
        return AIV if num_bytes <= ranks * AIV_BYTES_OF_A_RANK else AICPU
    return AIV if num_bytes * ranks <= AIV_GATHER_BYTES else AICPU
