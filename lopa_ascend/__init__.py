"""LoPA-Dist-Ascend: a serving engine for diffusion language models on Huawei Ascend 910C, which runs on a CPU as well.

What is named here is looked up on first use, so that ``lopa_ascend.types`` and the decode policy are
imported without torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lopa_ascend.config import DecodingParams, ParameterError
    from lopa_ascend.llm import LLM, GenerationError
    from lopa_ascend.parallel.collectives import RankError

# Both are read once, when torch is loaded. Waiting OpenMP threads sleep instead of spinning, which on a machine with
# other work cost up to thirty times the time; and MKL sums a GEMM's rows in an order that depends on neither the number
# of rows nor of threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
__all__ = ["LLM", "DecodingParams", "GenerationError", "ParameterError", "RankError", "__version__"]

_HOMES = {
    "LLM": "lopa_ascend.llm",
    "DecodingParams": "lopa_ascend.config",
    "GenerationError": "lopa_ascend.llm",
    "ParameterError": "lopa_ascend.config",
    "RankError": "lopa_ascend.parallel.collectives",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
