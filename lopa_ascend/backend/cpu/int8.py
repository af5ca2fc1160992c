"""Products of int8 activations with int8 weights, in exact integers.

Integer sums do not depend on their order, so every way to compute them gives the same bits, and no row depends on the
rows around it. Which way is fast depends on the processor:

- With int8 instructions (VNNI, AMX on x86) the weight is packed, in the order in which oneDNN's kernels read it.
  ``torch._int_mm`` uses these instructions too, without packing.
- Without them both are slow, and float32 is fast: up to ``EXACT_TERMS`` products of int8 numbers add up to less than
  2^24, so float32 holds every partial sum exactly.

What is not packed is multiplied in the faster of the last two ways, which are tried at start for each shape.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.cpu.processor import has_int8_instructions

EXACT_TERMS = 1024
"""Products whose sum float32 holds exactly in any order: 1024 * 127 * 128 < 2^24, and no activation is -128."""
PIECE_ROWS = 1024
"""Rows of a weight that are converted to float32 at a time, so that they stay in the cache."""
SIGN_BIT = -128
"""The bit that int8 and uint8 read differently: flipping it adds 128 to a number of int8, as uint8."""
TRIAL_ROWS = 64
"""Rows of activations in a trial."""
TRIAL_REPEATS = 2
"""Timed calls in a trial, the fastest of which counts."""

Multiply = Callable[[Tensor, Tensor], Tensor]
"""int8 activations [T, in] and an int8 weight [out, in] to their product, float32 [T, out]: the integers, each rounded
once to float32."""


def multiply_int8(codes: Tensor, weight: Tensor) -> Tensor:
    """The product by ``torch._int_mm``."""
    return torch._int_mm(codes, weight.t()).float()


def multiply_float32(codes: Tensor, weight: Tensor) -> Tensor:
    """The product by float32 products of at most ``EXACT_TERMS`` terms, which are added as integers."""
    wide = codes.float()
    if weight.shape[1] <= EXACT_TERMS:
        out = wide.new_empty(codes.shape[0], weight.shape[0])
        for first in range(0, weight.shape[0], PIECE_ROWS):
            rows = slice(first, first + PIECE_ROWS)
            out[:, rows] = F.linear(wide, weight[rows].float())
        return out
    total = wide.new_zeros(codes.shape[0], weight.shape[0], dtype=torch.int32)
    for first in range(0, weight.shape[0], PIECE_ROWS):
        rows = slice(first, first + PIECE_ROWS)
        for begin in range(0, weight.shape[1], EXACT_TERMS):
            terms = slice(begin, begin + EXACT_TERMS)
            total[:, rows] += F.linear(wide[:, terms], weight[rows, terms].float()).int()
    return total.float()


def pack_int8(weight: Tensor) -> Tensor:
    """An int8 weight [out, in] in oneDNN's order. The result has the shape [in, out], and no address."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def multiply_packed(codes: Tensor, weight: Tensor) -> Tensor:
    """The product with a weight that ``pack_int8`` has made.

    The instructions want activations without a sign: 128 is added to them, and oneDNN takes 128 times the sum of the
    weights off again, in integers.
    """
    outputs = weight.shape[1]
    no_scale, no_zero = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    unsigned = codes.bitwise_xor(SIGN_BIT).view(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, weight, no_scale, no_zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


WAYS: Mapping[str, Multiply] = {"int8": multiply_int8, "float32": multiply_float32}
"""The ways to multiply weights that are not packed, by what the report calls them."""


class Int8Products:
    """The int8 linear layers of one process.

    Args:
        ways: the ways to multiply weights that are not packed, by name.
    """

    def __init__(self, ways: Mapping[str, Multiply] = WAYS):
        self._ways = ways
        self._chosen: dict[torch.Size, str] = {}
        """By shape of the weight, the name of the way to multiply."""
        self._packs: dict[torch.Size, bool] = {}
        """By shape of the weight, whether it is packed."""

    def packed(self, weight: Tensor) -> Tensor:
        """An int8 weight [out, in], packed where this processor multiplies packed weights fast and exactly."""
        shape = weight.shape
        if shape not in self._packs:
            self._packs[shape] = has_int8_instructions() and packs_exactly(shape)
        return pack_int8(weight) if self._packs[shape] else weight

    def settle(self, weights: Iterable[Tensor]) -> str:
        """Tries all ways for int8 weights [out, in] that are not packed, and chooses the fastest exact one for each
        shape.

        Args:
            weights: as a checkpoint or ``packed`` gives them.

        Returns:
            How the weights are multiplied, in words; empty if there are none.

        Raises:
            RuntimeError: no way gives the exact product.
        """
        packed_shapes: set[torch.Size] = set()
        for weight in weights:
            if weight.is_mkldnn:
                packed_shapes.add(weight.shape)
            elif weight.shape not in self._chosen:
                self._chosen[weight.shape] = self._fastest(weight.shape)
        counts = Counter(self._chosen.values())
        if packed_shapes:
            counts["packed int8"] = len(packed_shapes)
        if not counts:
            return ""
        shares = " and ".join(f"{counts[name]} by {name} products" for name in sorted(counts))
        return f"int8 weights are multiplied exactly, {shares} (by shape)"

    def __call__(self, codes: Tensor, weight: Tensor) -> Tensor:
        """int8 codes [T, in] times the transpose of an int8 weight [out, in] -> float32 [T, out].

        A weight of a shape that ``settle`` has not tried is multiplied in float32, which gives the same numbers.
        """
        if weight.is_mkldnn:
            return multiply_packed(codes, weight)
        return self._ways[self._chosen.get(weight.shape, "float32")](codes, weight)

    def _fastest(self, shape: torch.Size) -> str:
        """The name of the fastest exact way to multiply a weight of this shape."""
        codes, weight = trial_numbers(shape)
        exact = multiply_float64(codes, weight)
        seconds: dict[str, float] = {}
        for name, multiply in self._ways.items():
            try:
                is_exact = torch.equal(multiply(codes, weight), exact)
            except RuntimeError:  # torch has no such kernel for this processor
                continue
            if is_exact:
                seconds[name] = min(duration(multiply, codes, weight) for _ in range(TRIAL_REPEATS))
        if not seconds:
            raise RuntimeError(f"no way to multiply int8 weights {list(shape)} gives the exact product")
        return min(seconds, key=lambda name: seconds[name])


def packs_exactly(shape: torch.Size) -> bool:
    """Whether packed weights of a shape [out, in] give exact products."""
    codes, weight = trial_numbers(shape)
    return torch.equal(multiply_packed(codes, pack_int8(weight)), multiply_float64(codes, weight))


def trial_numbers(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Activations and a weight for a trial: random ones of the whole range, and rows of activations with the signs of
    rows of the weight, so that sums become as large as they can.

    Args:
        shape: [out, in] of the weights that the trial is for.

    Returns:
        int8 [TRIAL_ROWS, in], and int8 [out or PIECE_ROWS, in].
    """
    generator = torch.Generator().manual_seed(0)
    num_outputs, num_inputs = min(shape[0], PIECE_ROWS), shape[1]
    weight = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    codes = torch.randint(-127, 128, (TRIAL_ROWS, num_inputs), generator=generator, dtype=torch.int8)
    signs = torch.where(weight[: TRIAL_ROWS // 2] < 0, -127, 127).to(torch.int8)
    codes[: len(signs)] = signs
    codes[TRIAL_ROWS // 2] = 127
    return codes, weight


def multiply_float64(codes: Tensor, weight: Tensor) -> Tensor:
    """The exact product, float32 [T, out]: float64 holds every sum of int8 products that fits into memory."""
    return (codes.double() @ weight.double().T).float()


def duration(multiply: Multiply, codes: Tensor, weight: Tensor) -> float:
    """Seconds of one product."""
    start = time.perf_counter()
    multiply(codes, weight)
    return time.perf_counter() - start
