"""Products of activations with weights, in which no row depends on how many rows are multiplied at once.

A matrix library picks its kernel, and with it the order of its sums, by the number of rows. So the same row can get
other bits alone than among others. With float32 and at least ``MIN_ROWS`` rows that was not seen; oneDNN's bfloat16
kernels for AMX do it. Therefore each weight is tried at start. If rows differ, the library always gets the same number
of rows: kernels are then always the same, at the price of rows of padding.

A weight may be packed: oneDNN then keeps it in the order in which its kernels read it, instead of reordering it in
every call. In bfloat16 that gave the same bits on an AMD EPYC (Zen 4), and a product of few rows took 10 to 30 % less
time. In float32 MKL multiplies plain weights and sums in another order; on an AMD EPYC (Zen 5) products with packed
ones took 0.3 to 0.7 of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_ROWS = 16
"""With fewer rows MKL takes kernels that sum in another order, and a row would depend on how many there are."""
ROW_COUNTS = (16, 17, 23, 32, 33, 47, 64, 100, 128, 200, 256, 300, 512, 700, 1000)
"""Tried numbers of rows: each row must have the bits that it has among ``MOST_ROWS``."""
MOST_ROWS = 1024
MOST_OUTPUTS = 16384
"""Tried outputs of a weight. With all outputs of a large vocabulary a start would take a minute longer."""
PIECES = (64, 128, 256, 512)
"""Numbers of rows to compute at a time, the preferred ones first. A small one pads small steps less."""
BLOCK = 32
"""Outputs and inputs of a block of a weight, as the kernel has them (``native/bf16.cpp``)."""
WIDENED_ROWS = 1024
"""Rows of a weight that are converted to float32 at a time, so that they stay in the cache."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The library's ``linear(x, weight, bias)``."""
Kind = tuple[torch.Size, torch.dtype, bool]
"""(shape of a weight, dtype, whether it is packed): by these and the number of rows the library picks a kernel."""


def divides_into_blocks(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and not any(size % BLOCK for size in weight.shape[-2:])


def in_blocks(weight: Tensor) -> Tensor:
    """Weights [..., out, in] in bfloat16 in the order in which the kernel in C++ reads them. The result is
    [..., out / BLOCK, in / BLOCK, BLOCK, BLOCK]. A block has two halves of its outputs, with a row for each pair of
    inputs, and in it that pair of each output."""
    *rest, outputs, inputs = weight.shape
    lanes, pairs = BLOCK // 2, weight.contiguous().view(torch.int32)
    blocks = pairs.view(-1, 2, lanes, inputs // BLOCK, lanes).permute(0, 3, 1, 4, 2).contiguous()
    return blocks.view(torch.bfloat16).view(*rest, outputs // BLOCK, inputs // BLOCK, BLOCK, BLOCK)


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's order. The result has the shape and dtype of the weight, and no address."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def takes_packed(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of a dtype: it may see fewer instructions than torch (ONEDNN_MAX_CPU_ISA)."""
    try:
        pack(torch.ones(MIN_ROWS, MIN_ROWS, dtype=dtype))
    except RuntimeError:
        return False
    return True


class Products:
    """The linear layers of one process. ``emulated`` dtypes are multiplied in float32; ``multiply`` is the library's
    linear layer, for weights that are not packed."""

    def __init__(self, emulated: Iterable[torch.dtype], multiply: Multiply):
        self._emulated = frozenset(emulated)
        self._multiply = multiply
        self._rows_at_a_time: dict[Kind, int | None] = {}
        """By kind of weight, the number of rows of every call. 0: any number from ``MIN_ROWS``; None: any, because no
        number makes rows independent."""

    def settle(self, weights: Iterable[Tensor]) -> str:
        """Tries how rows depend on one another for weights [out, in], and decides how each kind is computed; returns
        the finding in words."""
        for weight in weights:
            is_emulated = weight.dtype in self._emulated
            dtype = torch.float32 if is_emulated else weight.dtype
            parts = weight.split(WIDENED_ROWS) if is_emulated else (weight,)
            for part in parts:
                kind = part.shape, dtype, part.is_mkldnn
                if kind not in self._rows_at_a_time:
                    self._rows_at_a_time[kind] = self._find_rows(self._trial_weight(part, dtype))
        dependent = [kind for kind, rows in self._rows_at_a_time.items() if rows is None]
        if dependent:
            shapes = ", ".join(f"{list(shape)} in {dtype}" for shape, dtype, _ in sorted(dependent, key=str))
            found = f"rows depend on one another in their last bits, with weights {shapes}"
            logger.warning("%s: a request's tokens may depend on the requests beside it", found)
            return found
        pieces = sorted({rows for rows in self._rows_at_a_time.values() if rows})
        if pieces:
            return f"rows are independent, because {' or '.join(map(str, pieces))} are computed at a time"
        return "rows are independent"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype not in self._emulated:
            return self._product(x, weight, bias)
        wide, out = x.float(), x.new_empty(x.shape[0], weight.shape[0])
        first = 0
        for part in weight.split(WIDENED_ROWS):
            end = first + len(part)
            part_bias = None if bias is None else bias[first:end].float()
            out[:, first:end] = self._product(wide, part.float(), part_bias)
            first = end
        return out

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        at_a_time = self._rows_at_a_time.get((weight.shape, weight.dtype, weight.is_mkldnn))
        if at_a_time:
            return self.in_pieces(x, weight, bias, at_a_time)
        rows = x.shape[0]  # not len(x), which in a traced step would be a constant
        padded = F.pad(x, (0, 0, 0, MIN_ROWS - rows)) if rows < MIN_ROWS else x
        return self._call(padded, weight, bias)[:rows]

    def in_pieces(self, x: Tensor, weight: Tensor, bias: Tensor | None, at_a_time: int) -> Tensor:
        """The product with ``at_a_time`` rows in every call of the library, the last one padded."""
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % at_a_time))
        pieces = [self._call(piece, weight, bias) for piece in padded.split(at_a_time)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:rows]

    def _call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return multiply_packed(x, weight, bias) if weight.is_mkldnn else self._multiply(x, weight, bias)

    # ---- trying ----------------------------------------------------------------------------------------------------

    def _trial_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The first outputs of a weight, as it will be multiplied."""
        if weight.is_mkldnn:
            return pack(weight.to_dense()[:MOST_OUTPUTS])
        return weight[:MOST_OUTPUTS].to(dtype)

    def _find_rows(self, weight: Tensor) -> int | None:
        """How many rows to compute at a time so that rows are independent; 0 for any number, None if none was found."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(MOST_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
        whole = self._call(x, weight, None)
        if all(self._same_rows(x, whole, weight, count) for count in ROW_COUNTS):
            return 0
        for at_a_time in PIECES:
            whole = self.in_pieces(x, weight, None, at_a_time)
            # The first rows are computed at the same places anyway: what is tried is rows at other places.
            shifted = (x[shift:] for shift in (1, MIN_ROWS, at_a_time // 2 + 1))
            if all(torch.equal(self.in_pieces(rows, weight, None, at_a_time), whole[-len(rows) :]) for rows in shifted):
                return at_a_time
        return None

    def _same_rows(self, x: Tensor, whole: Tensor, weight: Tensor, count: int) -> bool:
        """Whether some rows have the same bits alone as among all, where they lie at other places."""
        first = (len(x) - count) // 2 + 1
        rows = slice(first, first + count)
        return torch.equal(self._call(x[rows], weight, None), whole[rows])
