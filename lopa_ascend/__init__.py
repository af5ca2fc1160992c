"""LoPA-Dist-Ascend: a serving engine for diffusion language models on Huawei Ascend 910C, NVIDIA GPUs and CPUs.

Public names are imported on first use: parts of the package need no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lopa_ascend.config import DecodingParams, ParameterError
    from lopa_ascend.decode import register_decoding
    from lopa_ascend.families import register_family
    from lopa_ascend.llm import LLM, GenerationError
    from lopa_ascend.model.registry import register_model
    from lopa_ascend.parallel.collectives import RankError
    from lopa_ascend.text.gaps import Gap

# Libraries read these variables once, when torch is loaded or multiplies for the first time.
# OMP_WAIT_POLICY: waiting OpenMP threads sleep. Beside other processes, spinning ones took up to thirty times as long.
# MKL_CBWR: MKL sums each row of a GEMM in the same order, whatever the number of rows and threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# LRU_CACHE_CAPACITY (torch's caches) and ONEDNN_PRIMITIVE_CACHE_CAPACITY: oneDNN makes kernels for each number of rows.
# By default a thousand of them are kept, in up to 3 GiB. With 64 the bundled model decodes in as many CPU seconds, and
# with W8A8 in 4 to 5 % more (Zen 4, one thread, 160 problems).
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

__version__ = "1.0.0"
__all__ = [
    "LLM",
    "DecodingParams",
    "Gap",
    "GenerationError",
    "ParameterError",
    "RankError",
    "__version__",
    "register_decoding",
    "register_family",
    "register_model",
]

_MODULES = {
    "LLM": "lopa_ascend.llm",
    "DecodingParams": "lopa_ascend.config",
    "Gap": "lopa_ascend.text.gaps",
    "GenerationError": "lopa_ascend.llm",
    "ParameterError": "lopa_ascend.config",
    "RankError": "lopa_ascend.parallel.collectives",
    "register_decoding": "lopa_ascend.decode",
    "register_family": "lopa_ascend.families",
    "register_model": "lopa_ascend.model.registry",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
