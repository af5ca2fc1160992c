"""The functions of ``lopa_ascend.checkpoint`` for directories of a Dream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lopa_ascend import checkpoint
from lopa_ascend.checkpoint import Checkpoint, write
from lopa_ascend.config import ModelConfig
from lopa_ascend.families import dream


def open_checkpoint(path: str | Path) -> Checkpoint:
    return checkpoint.open_checkpoint(path, dream.FAMILY)


def load(path: str | Path, **options: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    found = open_checkpoint(path)
    is_fp8 = options.pop("is_fp8", False)
    layers = found.expected.quantized(options.pop("int8", ()), options.pop("group_size", 0), is_fp8=is_fp8)
    return checkpoint.load(found, layers=layers, **options)


def write_int8(path: Path, out: Path, **options: Any) -> Path:
    return write.write_quantized(path, out, dream.FAMILY, linears=options.pop("int8"), **options)
