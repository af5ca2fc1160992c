"""Linear layers of int8 activations by the kernels, with weights in the order in which those read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.cpu.int8 import SIGN_BIT
from lopa_ascend.backend.cpu.native.kernels import Kernels
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.cpu.processor import int8_instructions
from lopa_ascend.backend.cpu.products import Multiply
from lopa_ascend.backend.interface import Int4Weight

STRIP, TILE, PANEL = 32, 64, 16
"""Outputs of a strip, inputs of a tile, and outputs of a panel (``int8.cpp``)."""
INSTRUCTIONS = ("avx2", "vnni", "amx")
"""In the order in which ``int8.cpp`` numbers them."""


def pack_int8(weight: Tensor) -> Tensor:
    """An int8 weight [out, in] as a stream, int8 [strips, tiles, TILE * STRIP]."""
    words = _padded(weight, STRIP, TILE).bitwise_xor(SIGN_BIT).view(torch.int32)
    return _stream(words, TILE // 4).view(torch.int8)


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """An int4 weight, whose outputs are whole strips, as a stream, uint8 [strips, tiles, TILE / 2 * STRIP]; scales and
    zeros [strips, groups, STRIP]."""
    group = 2 * weight.codes.shape[1] // weight.scale.shape[1]
    codes = _padded(weight.codes, STRIP, TILE // 2)
    low, high = torch.stack([codes & 15, codes >> 4], -1).view(len(codes), -1, 2, 4).unbind(2)  # each of four inputs
    words = (low | high << 4).view(torch.int32).flatten(1)
    num_groups = 2 * codes.shape[1] // group

    def by_strip(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, num_groups - x.shape[1]))
        tiles: Tensor = padded.unflatten(0, (-1, STRIP))
        return tiles.transpose(1, 2).contiguous()

    zero = None if weight.zero is None else by_strip(weight.zero)
    return Int4Weight(_stream(words, TILE // 8), by_strip(weight.scale.float()), zero)


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    rows, columns = weight.shape
    return F.pad(weight, (0, -columns % inputs, 0, -rows % outputs))


def _stream(words: Tensor, words_of_tile: int) -> Tensor:
    """Words int32 [out, in], so many of them in a tile, in the order of ``int8.cpp``."""
    parts = words.view(-1, STRIP // PANEL, PANEL, words.shape[1] // words_of_tile, words_of_tile)
    return parts.permute(0, 3, 1, 4, 2).contiguous().view(torch.uint8).flatten(2)


class IntegerOps(CpuOps):
    """``CpuOps`` whose linear layers of int8 activations with packed weights the kernels compute, by ``instructions``,
    one of ``INSTRUCTIONS``, or the fastest of this processor."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        packs_weights: bool = False,
        multiply_blocks: Multiply | None = None,
        instructions: str | None = None,
    ):
        super().__init__(packs_weights=packs_weights, multiply_blocks=multiply_blocks)
        self._kernels = kernels
        self._instructions = instructions or int8_instructions()

    def packed(self, weight: Tensor) -> Tensor:
        if weight.dtype == torch.int8 and self._packs_weights and self._instructions:
            return pack_int8(weight)
        return super().packed(weight)

    def stored_int4(self, weight: Int4Weight) -> Int4Weight:
        if self._packs_weights and self._instructions and len(weight.codes) % STRIP == 0:
            return pack_int4(weight)
        return super().stored_int4(weight)

    def _exact_way(self, weight: Tensor) -> str:
        return f"{self._instructions} int8" if weight.dim() == 3 else super()._exact_way(weight)

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if weight.dim() != 3:
            return super().quant_linear(codes, scale, weight, weight_scale, bias, dtype)
        stream = weight, weight_scale.contiguous(), None
        return self._by_kernel(codes, scale, stream, bias, dtype, len(weight_scale), 0)

    def int4_linear(
        self, codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if weight.scale.dim() == 2:
            return super().int4_linear(codes, scale, weight, bias, dtype)
        strips, num_groups, _ = weight.scale.shape
        group = weight.codes.shape[1] * TILE // num_groups
        return self._by_kernel(codes, scale, weight, bias, dtype, strips * STRIP, group)

    def _by_kernel(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: tuple[Tensor, Tensor, Tensor | None],
        bias: Tensor | None,
        dtype: torch.dtype,
        outputs: int,
        group: int,
    ) -> Tensor:
        """A linear layer of a stream with its scales and zeros, in groups of so many inputs; 0: it is int8."""
        assert self._instructions is not None
        rows, inputs = codes.shape
        is_narrow = dtype == torch.bfloat16
        kernel_dtype = dtype if is_narrow else torch.float32
        offset = None if bias is None else bias.to(kernel_dtype).contiguous()
        out = codes.new_empty(rows, outputs, dtype=kernel_dtype)
        self._kernels.call(
            "lopa_int8_linear",
            *(codes.contiguous(), scale.contiguous(), *weight, offset, out),
            *(rows, inputs, outputs, group, is_narrow, INSTRUCTIONS.index(self._instructions)),
            work=rows * inputs * outputs // PANEL,
        )
        return out if is_narrow else out.to(dtype)
