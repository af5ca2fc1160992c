"""Compiles the kernels of a step of Dream-7B, SDAR-8B and LLaDA2.0-mini for GPUs, without one, and says what they take:
`python -m tests.cuda.resources` prints JSON, a list with an object for each kernel and kind of GPU.

The calls are those that ``CudaOps`` makes: it runs here on tensors of the CPU whose content does not matter, while
launches are noted instead of made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, native_specialize_impl

from lopa_ascend.backend.cuda.ops import CudaOps
from lopa_ascend.backend.interface import Entries, Experts
from lopa_ascend.config import ExpertsConfig
from lopa_ascend.kv.pages import PAGE_SIZE

ARCHITECTURES = (80, 90, 100)
"""A100; H100 and H200; B200."""
SMALL = (86, 89, 120)
"""RTX 30, 40 and 50, whose blocks have less shared memory: for these only kernels that use much of it are compiled."""
DTYPE = torch.bfloat16
MODELS = {"Dream-7B": (3584, 18944, 28, 4, 128, 152064), "SDAR-8B": (4096, 12288, 32, 8, 128, 151936)}
"""Hidden size, intermediate size, query heads, KV heads, head dimension, vocabulary."""
EXPERTS = ExpertsConfig(
    num_experts=256, per_token=8, num_groups=8, kept_groups=4, scale=2.5, inner=512, shared_inner=512, first_layer=1
)
"""Of LLaDA2.0-mini, whose hidden size is 2048."""
TOKENS = 64
PRODUCTS = ("attend_tile", "multiply_int8")
"""The kernels that multiply matrices."""
Call = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def calls_of(run: Callable[[CudaOps], None]) -> list[Call]:
    """The kernel launches that ``run`` would make."""
    calls: list[Call] = []
    launch = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, args, options))

    JITFunction.run = note
    try:
        run(CudaOps(torch.device("cpu")))
    finally:
        JITFunction.run = launch
    return calls


def step(ops: CudaOps, sizes: tuple[int, int, int, int, int, int]) -> None:
    """Every op of a decoding step, and those of one with int8 layers."""
    hidden, intermediate, heads, kv_heads, dim, vocabulary = sizes

    def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x, weight = empty(TOKENS, hidden), empty(hidden)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, empty(TOKENS, hidden), weight, 1e-6)
    codes, scale, _ = ops.add_rms_norm_quant(x, empty(TOKENS, hidden), weight, 1e-6)
    gate_up = empty(TOKENS, 2 * intermediate)
    ops.swiglu(gate_up)
    ops.swiglu_quant(gate_up)
    ops.quantize(x)
    for rows in (TOKENS, 512):
        few, by_row = codes.expand(rows // TOKENS, -1, -1).flatten(0, 1), scale.repeat(rows // TOKENS)
        for outputs in (hidden, 2 * intermediate):
            ops.quant_linear(few, by_row, empty(outputs, hidden, dtype=torch.int8), empty(outputs).float(), None, DTYPE)
    qkv = empty(TOKENS, heads + 2 * kv_heads, dim)
    alike = empty(2, TOKENS, 1, dim // 2)
    by_head = empty(2, TOKENS, heads + 2 * kv_heads, dim // 2)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    ops.rope(qkv, by_head[0], by_head[1])
    ops.norm_rope(q, k, empty(dim), empty(dim), 1e-6, alike[0], alike[1])
    cache, slots = empty(2, 8, PAGE_SIZE, kv_heads, dim), torch.zeros(TOKENS, dtype=torch.int32)
    ops.kv_write(k, v, cache[0], cache[1], slots)
    ops.kv_write(k, v, cache[0], cache[1], slots.long(), slots.long())
    for norms, (cos, sin), source in (
        (None, alike, None), (None, by_head, None), ((empty(dim), empty(dim)), alike, slots),
    ):  # fmt: skip
        ops.rope_and_write(qkv, norms, 1e-6, (cos, sin), (cache[0], cache[1]), slots, source)
    kinds = ((32, 32), ()), ((32, 32), (True, True)), ((40, 24), (False, True))
    for pages, (lengths, causal) in ((8, kinds[0]), *((4, kind) for kind in kinds)):  # of 8 pages programs share parts
        tables = torch.zeros(2, pages, dtype=torch.int32)
        entries = Entries(lengths, (512, 512), tables, (0, 0), (0,), causal=causal)
        ops.attention(q, cache[0], cache[1], entries)
    if hidden == MODELS["Dream-7B"][0]:
        entries = Entries((32, 32), (512, 512), tables, (0, 0), (0,))
        ops.attention(q.float(), cache[0].float(), cache[1].float(), entries)
    for confidence in ("max_prob", "margin", "neg_entropy"):
        ops.row_stats(empty(TOKENS, vocabulary), empty(vocabulary).float(), confidence)


def experts(ops: CudaOps, dtype: torch.dtype) -> None:
    """A mixture of experts whose weights have a dtype."""
    sizes, hidden = EXPERTS, 2048
    number, inner, scale = sizes.num_experts, sizes.inner, dtype == torch.int8
    gate_up, down = torch.empty(number, 2 * inner, hidden, dtype=dtype), torch.empty(number, hidden, inner, dtype=dtype)
    scales = [torch.empty(weight.shape[:2]) if scale else None for weight in (gate_up, down)]
    x = torch.zeros(TOKENS, hidden, dtype=DTYPE)
    ops.moe(x, Experts(sizes, torch.zeros(number, hidden), torch.zeros(number), gate_up, down, *scales), x)


def source_of(call: Call) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles for a call, with its specialisations, and the options of the launch."""
    kernel, args, options = call
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options[name] for name in kernel.arg_names if name in options}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        specialises = not parameter.do_not_specialize
        kind, key = native_specialize_impl(CUDABackend, value, False, specialises, True)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[index,] = key
        elif isinstance(key, str):
            attributes[index,] = CUDABackend.parse_attr(key)
    launch = {name: value for name, value in options.items() if name in ("num_warps", "num_stages")}
    return ASTSource(kernel, signature, constants, attributes), launch


def compiled(call: Call, architecture: int) -> dict[str, Any]:
    """What one kernel takes on one generation."""
    source, options = source_of(call)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    registers, stack = (max(map(int, column)) for column in zip(*found, strict=True))
    blocks = {name: value for name, value in call[2].items() if name.isupper()}
    return {
        "kernel": source.name,
        "architecture": architecture,
        "dtype": source.signature.get("q", "*bf16").removeprefix("*"),
        "options": {**blocks, **options},
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "narrow": len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.[bus](?:8|16)\b", kernel.asm["ptx"])),
        "wgmma": "wgmma" in kernel.asm["ptx"],
        "tcgen05": "tcgen05.mma" in kernel.asm["ptx"],
    }


def main() -> None:
    calls: dict[str, Call] = {}
    runs = [partial(step, sizes=sizes) for sizes in MODELS.values()]
    for run in runs + [partial(experts, dtype=dtype) for dtype in (DTYPE, torch.int8)]:
        for call in calls_of(run):
            source, options = source_of(call)
            calls.setdefault(f"{source.hash()} {options}", call)
    jobs = [(call, architecture) for call in calls.values() for architecture in ARCHITECTURES]
    largest = {
        (call[0].__name__, str(call[1][0].dtype)): call for call in calls.values() if call[0].__name__ in PRODUCTS
    }
    jobs += [(call, small) for call in largest.values() for small in SMALL]
    json.dump([compiled(*job) for job in jobs], sys.stdout)


if __name__ == "__main__":
    main()
