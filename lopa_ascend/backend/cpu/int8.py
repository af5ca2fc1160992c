"""Products of quantised activations with int8, int4 and fp8 weights, in exact sums.

Exact sums do not depend on their order, so every way to compute them gives the same bits, and no row depends on the
rows around it. Sums of fp8 are exact in float64, which takes long. For int8 the processor decides what is fast:

- With int8 instructions (VNNI, AMX on x86) the weight is packed, in the order in which oneDNN's kernels read it.
- Without them float32 is fast: up to ``EXACT_TERMS`` products of int8 numbers add up to less than 2^24, so float32
  holds every partial sum exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.cpu.processor import has_int8_instructions
from lopa_ascend.backend.interface import FP8, Int4Weight

EXACT_TERMS = 1024
"""Products whose sum float32 holds exactly in any order: 1024 * 127 * 128 < 2^24, and no activation is -128."""
FP8_TERMS = 1 << 17
"""Products of fp8 numbers whose sum float64 holds exactly in any order."""
PIECE_ROWS = 1024
"""Rows of a weight that are converted to floats at a time, so that they stay in the cache."""
INT4_PIECE_ROWS = 128
"""The same for an int4 weight, whose products have a group more."""
SIGN_BIT = -128
"""The bit that int8 and uint8 read differently: flipping it adds 128 to an int8 number, as uint8."""
TRIAL_ROWS = 64


def multiply_codes(codes: Tensor, weight: Tensor) -> Tensor:
    return multiply_fp8(codes, weight) if weight.dtype == FP8 else multiply_int8(codes, weight)


def multiply_fp8(codes: Tensor, weight: Tensor) -> Tensor:
    """fp8 codes [T, in] times the transpose of an fp8 weight [out, in] -> float32 [T, out]: the exact sums, each
    rounded once (``definition.quant_linear``)."""
    assert weight.shape[1] <= FP8_TERMS
    wide, out = codes.double(), codes.new_empty(len(codes), len(weight), dtype=torch.float32)
    for first in range(0, len(weight), PIECE_ROWS):
        rows = slice(first, first + PIECE_ROWS)
        out[:, rows] = F.linear(wide, weight[rows].double())
    return out


def multiply_int8(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 codes [T, in] times the transpose of an int8 weight [out, in], packed or not -> float32 [T, out]: the
    integers, each rounded once to float32."""
    return multiply_packed(codes, weight) if weight.is_mkldnn else multiply_float32(codes, weight)


def multiply_float32(codes: Tensor, weight: Tensor) -> Tensor:
    """``multiply_int8`` by float32 products of at most ``EXACT_TERMS`` terms, which are added as integers."""
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


def multiply_int4(codes: Tensor, weight: Int4Weight) -> Tensor:
    """int8 codes [T, in] times the transpose of an int4 weight that is not packed -> float32 [T, out]: the exact sums
    of each group, times its scale, added up in the order of the groups."""
    groups: Tensor = codes.float().unflatten(1, (weight.scale.shape[1], -1)).transpose(0, 1)  # [groups, T, G]
    total = torch.zeros(len(codes), len(weight.scale))
    for first in range(0, len(weight.scale), INT4_PIECE_ROWS):
        piece = slice(first, first + INT4_PIECE_ROWS)
        nibbles = torch.stack([weight.codes[piece] & 15, weight.codes[piece] >> 4], -1).float()
        centered = nibbles.view(*weight.scale[piece].shape, -1)
        centered -= 8 if weight.zero is None else weight.zero[piece].float()[:, :, None]
        sums = torch.bmm(groups, centered.permute(1, 2, 0)).mul_(weight.scale[piece].t()[:, None])
        for part in sums:
            total[:, piece] += part
    return total


def pack_int8(weight: Tensor) -> Tensor:
    """An int8 weight [out, in] in oneDNN's order. The result has the shape [in, out], and no address."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def multiply_packed(codes: Tensor, weight: Tensor) -> Tensor:
    """The product with a weight from ``pack_int8``. The instructions want activations without a sign: 128 is added to
    them, and oneDNN takes 128 times the sum of the weights off again, in integers."""
    outputs = weight.shape[1]
    no_scale, no_zero = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    unsigned = codes.bitwise_xor(SIGN_BIT).view(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, weight, no_scale, no_zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def packs_exactly(shape: torch.Size) -> bool:
    """Whether packed weights of a shape [out, in] are multiplied fast and give exact products on this processor."""
    if not has_int8_instructions():
        return False
    codes, weight = trial_numbers(shape)
    exact = (codes.double() @ weight.double().T).float()  # float64 holds every sum of int8 products
    return torch.equal(multiply_packed(codes, pack_int8(weight)), exact)


def trial_numbers(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Activations int8 [TRIAL_ROWS, in] and a weight int8 [out or PIECE_ROWS, in], to try weights of a shape [out, in]:
    random ones of the whole range, and rows of activations with the signs of rows of the weight, so that sums become as
    large as they can."""
    generator = torch.Generator().manual_seed(0)
    num_outputs, num_inputs = min(shape[0], PIECE_ROWS), shape[1]
    weight = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    codes = torch.randint(-127, 128, (TRIAL_ROWS, num_inputs), generator=generator, dtype=torch.int8)
    signs = torch.where(weight[: TRIAL_ROWS // 2] < 0, -127, 127).to(torch.int8)
    codes[: len(signs)] = signs
    codes[TRIAL_ROWS // 2] = 127
    return codes, weight
