"""Linear layers in bfloat16 by the kernel in C++, with each instruction set: of this processor, or emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu.native import load_cpu_ops
from lopa_ascend.backend.cpu.processor import IS_X86, Bfloat16Instructions, bfloat16_instructions
from lopa_ascend.backend.cpu.products import Multiply, divides_into_blocks, in_blocks
from tests.tiny import write_dream
from tests.torch.native import bfloat16_layers
from tests.torch.paging import randn

SIZES = [(32, 32), (64, 96), (1056, 64)]
"""(inputs, outputs). The last one has more inputs than are multiplied before the next rows are."""


@pytest.fixture(scope="module", params=Bfloat16Instructions, ids=lambda instructions: instructions.name)
def multiply(request: pytest.FixtureRequest) -> Multiply:
    return bfloat16_layers(request.param)


def operands(inputs: int, outputs: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(rows, inputs).bfloat16(), randn(outputs, inputs, seed=1).bfloat16(), randn(outputs, seed=2).bfloat16()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_do_not_depend_on_their_number_or_the_threads(multiply: Multiply, sizes: tuple[int, int]) -> None:
    x, weight, bias = operands(*sizes, rows=620)  # more than are summed at once
    blocks, threads = in_blocks(weight), torch.get_num_threads()
    whole = multiply(x, blocks, bias)
    try:
        for count in (*range(65), 100, 300):
            torch.set_num_threads(1 + count % 3)
            assert torch.equal(multiply(x[7 : 7 + count], blocks, bias), whole[7 : 7 + count]), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_rounded_once(multiply: Multiply, sizes: tuple[int, int]) -> None:
    """Within half a unit of bfloat16, but for the sums in float32 of positive and negative products."""
    x, weight, bias = operands(*sizes, rows=37)
    exact, blocks = x.double() @ weight.double().T, in_blocks(weight)
    sum_error = sizes[0] * 2**-24 * (x.double().abs() @ weight.double().abs().T)
    for offset in (None, bias):
        expected = exact if offset is None else exact + offset.double()
        found = multiply(x, blocks, offset)
        assert bool(((found - expected).abs() <= 2**-8 * expected.abs() + sum_error).all())


def test_a_row_with_nan_or_infinity_changes_no_other(multiply: Multiply) -> None:
    x, weight, bias = operands(64, 32, rows=33)
    clean = multiply(x, in_blocks(weight), bias)
    x[3, 63], x[20, 0] = torch.nan, torch.inf
    found = multiply(x, in_blocks(weight), bias)
    assert found[3].isnan().all()
    assert not found[20].isfinite().any()
    others = [row for row in range(33) if row not in (3, 20)]
    assert torch.equal(found[others], clean[others])


def test_rows_that_are_not_contiguous(multiply: Multiply) -> None:
    x, weight, _ = operands(96, 32, rows=5)
    assert torch.equal(multiply(x[:, 32:], in_blocks(weight[:, 32:]), None),
                       multiply(x[:, 32:].clone(), in_blocks(weight[:, 32:].clone()), None))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype", "is_taken"),
    [
        ((64, 32), torch.bfloat16, True),
        ((3, 64, 32), torch.bfloat16, True),
        ((48, 32), torch.bfloat16, False),
        ((64, 40), torch.bfloat16, False),
        ((64, 32), torch.float32, False),
    ],
)
def test_other_weights_are_left_to_the_library(shape: tuple[int, ...], dtype: torch.dtype, is_taken: bool) -> None:
    """And give the same product."""
    ops = load_cpu_ops(packs_weights=True)
    x, weight = randn(3, shape[-1]).to(dtype), randn(*shape, seed=1).to(dtype)
    assert divides_into_blocks(weight) is is_taken
    weight = weight if weight.dim() == 2 else weight[1]
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(ops.linear(x, ops.packed(weight)).double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.skipif(not IS_X86, reason="the caps are those of x86")
@pytest.mark.parametrize(
    ("capability", "cap", "most"),
    [
        ("AVX512", "", Bfloat16Instructions.AMX),
        ("AVX512", "AVX512_CORE_AMX", Bfloat16Instructions.AMX),
        ("AVX512", "avx512_core_bf16", Bfloat16Instructions.AVX512_BF16),
        ("AVX512", "AVX512_CORE_VNNI", Bfloat16Instructions.AVX512),
        ("AVX512", "AVX2", Bfloat16Instructions.AVX2),
        ("AVX2", "", Bfloat16Instructions.AVX2),
        ("DEFAULT", "", None),
    ],
)
def test_caps_of_the_libraries_hold_for_the_kernel(
    capability: str, cap: str, most: Bfloat16Instructions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    for name in ("_is_amx_tile_supported", "_init_amx", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    assert bfloat16_instructions() == most
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)  # the system does not give the tiles to processes
    assert bfloat16_instructions() == (None if most is None else min(most, Bfloat16Instructions.AVX512_BF16))


def test_a_request_is_the_same_alone_and_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, whatever this processor has."""
    write_dream(tmp_path, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    prompts = [[5 + i for i in range(count)] for count in (3, 40, 70)]
    params = DecodingParams(num_branches=3, max_new_tokens=64, tau_conf=0.3, ignore_eos=True)
    together = llm.generate(prompts, params, quiet=True)
    for prompt, among_others in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params, quiet=True)
        assert (alone.token_ids, alone.max_probs) == (among_others.token_ids, among_others.max_probs)
