"""The cases that only W8A8 needs, at the shapes of Dream-7B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from scripts.selftest.captures import Captures
from scripts.selftest.cases import CPU, EPS, HIDDEN, INTERMEDIATE, QKV_ROWS, TOKENS, Case, randn

INT8 = "W8A8"
"""Beginning of the names of ``int8_cases``."""
PRODUCTS = {
    "o": (HIDDEN, HIDDEN),
    "o of a rank of four": (HIDDEN // 4, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
    "down of a rank of four": (INTERMEDIATE // 4, HIDDEN),
}
"""Inputs and outputs of the products without bias."""


def int8_cases(ops: Ops) -> Iterator[Case]:
    """Quantisation, and then products. SwiGLU has the rows of a rank of four, and those of a single one."""
    x, residual, norm = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)
    npu_x, npu_residual, npu_norm = (t.to(ops.device) for t in (x, residual, norm))
    yield Case(f"{INT8}: quantize", partial(ops.quantize, npu_x), CPU.quantize(x))
    yield Case(
        f"{INT8}: add_rms_norm_quant",
        lambda: ops.add_rms_norm_quant(npu_x.clone(), npu_residual.clone(), npu_norm, EPS),
        CPU.add_rms_norm_quant(x, residual.clone(), norm, EPS),
    )
    codes, scale = CPU.quantize(x)
    given = codes.to(ops.device), scale.to(ops.device)
    for ranks in (4, 1):
        gate_up = Int8Product(ops, HIDDEN, 2 * INTERMEDIATE // ranks)
        name = f"{INT8}: swiglu_quant of {2 * INTERMEDIATE // ranks}"
        yield Case(name, partial(gate_up.gated, *given), gate_up.expected_gated(codes, scale))
    product = Int8Product(ops, HIDDEN, QKV_ROWS, has_bias=True)
    yield Case(f"{INT8}: linear, weights in FRACTAL_NZ", partial(product, *given), product.expected(codes, scale))
    for name, (num_inputs, num_outputs) in PRODUCTS.items():
        yield product_case(ops, name, num_inputs, num_outputs)
    yield captured_product_case(ops)


class Int8Product:
    """A linear layer with random int8 weights, on a device and on the CPU.

    Args:
        ops: the device's.
        num_inputs: columns of the activations.
        num_outputs: columns of the result.
    """

    def __init__(self, ops: Ops, num_inputs: int, num_outputs: int, *, has_bias: bool = False) -> None:
        self._ops = ops
        self._weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
        self._scale = torch.rand(num_outputs) / num_inputs
        self._bias = randn(num_outputs) if has_bias else None
        self._stored = ops.stored(self._weight.to(ops.device))
        self._npu_scale = self._scale.to(ops.device)
        self._npu_bias = None if self._bias is None else self._bias.to(ops.device)

    def __call__(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The product on the device.

        Args:
            codes: int8 activations [T, num_inputs], on the device.
            scale: of each row, float32 [T], on the device.
        """
        return self._ops.quant_linear(codes, scale, self._stored, self._npu_scale, self._npu_bias, torch.bfloat16)

    def gated(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """SwiGLU of the product on the device, as int8 and a scale for each row."""
        return self._ops.quant_swiglu(codes, scale, self._stored, self._npu_scale, torch.bfloat16)

    def expected_gated(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The same on the CPU."""
        return CPU.quant_swiglu(codes, scale, self._weight, self._scale, torch.bfloat16)

    def expected(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The product on the CPU, of tensors there."""
        return CPU.quant_linear(codes, scale, self._weight, self._scale, self._bias, torch.bfloat16)


def product_case(ops: Ops, name: str, num_inputs: int, num_outputs: int) -> Case:
    """One of ``PRODUCTS``."""
    product, (codes, scale) = Int8Product(ops, num_inputs, num_outputs), CPU.quantize(randn(TOKENS, num_inputs))
    run = partial(product, codes.to(ops.device), scale.to(ops.device))
    return Case(f"{INT8}: {name}, {num_inputs} x {num_outputs}", run, product.expected(codes, scale))


def captured_product_case(ops: Ops) -> Case:
    """A quantisation and a product that are captured with some activations, and replayed with others."""
    name = f"{INT8}: product in a graph, replayed with other inputs"
    x, later = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN)
    product, npu_x, npu_later = Int8Product(ops, HIDDEN, HIDDEN), x.to(ops.device), later.to(ops.device)

    def step(_: Sequence[int]) -> list[Tensor]:
        return [product(*ops.quantize(npu_x))]

    def run() -> list[Tensor]:
        replay = Captures().capture(step, name)
        npu_x.copy_(npu_later)
        return replay([])

    return Case(name, run, [product.expected(*CPU.quantize(later))], timed=False)
