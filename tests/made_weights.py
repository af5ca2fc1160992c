"""Weights that no checkpoint has, for a model of any family and size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lopa_ascend.config import ModelConfig
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.families import Family
from lopa_ascend.families.table import SCALE


def made_weights(
    family: Family,
    config: ModelConfig,
    make: Callable[[str, tuple[int, ...], torch.dtype], Tensor],
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_int8: bool = False,
    ranks: int = 1,
) -> dict[str, Tensor]:
    """All weights as a model takes them, by our names; ``make`` is given name, shape and dtype of each. In W8A8 with
    ``is_int8``. Of one of so many tensor parallel ``ranks``."""
    tensors = family.tensors(config)
    layers = tensors.quantized(INT8_LAYERS if is_int8 else ())
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, spec in tensors.with_scales(layers).specs.items():
        rows, *columns = (-(-size // (ranks if axis == spec.split_axis else 1)) for axis, size in enumerate(spec.shape))
        shapes[spec.ours] = (shapes.get(spec.ours, (0,))[0] + rows, *columns)
        is_code = spec.row.linear is not None and spec.module in layers.modules
        is_float32 = spec.row.is_float32 or name.endswith(SCALE)
        dtypes[spec.ours] = torch.int8 if is_code else torch.float32 if is_float32 else dtype
    return {name: make(name, shape, dtypes[name]) for name, shape in shapes.items()}
