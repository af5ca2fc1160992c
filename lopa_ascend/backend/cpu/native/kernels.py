"""Loads the kernels in C++ and calls them with tensors."""

from __future__ import annotations

import ctypes
import logging
import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LIBRARY = "lopa_ascend.backend.cpu.native.compiled"
"""What ``setup.py`` compiles: a library of C functions, in the place of an extension module of this name."""
OPENMP = re.compile(r"^(?:\S+ +){5}(/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so.*)$", re.MULTILINE)
"""The file of an OpenMP library in the memory map of a process: the sixth field of a line, which may hold spaces."""
MEMORY_MAP = Path("/proc/self/maps")
ARGUMENTS = {
    "lopa_attention": "plpppppplplplllfii",
    "lopa_swiglu": "pllpii",
    "lopa_swiglu_quant": "pllppi",
    "lopa_norm": "pppllfpii",
    "lopa_norm_quant": "pppllfppi",
    "lopa_rope": "plppllllpii",
    "lopa_norm_rope": "plppplllfpii",
    "lopa_dequantize": "ppppllpi",
    "lopa_int8_linear": "ppppppplllllli",
    "lopa_bf16_linear": "ppplllpli",
    "lopa_row_stats": "plllllipii",
}
"""The functions and the types of their arguments: pointer, long, float, int. The last one is the number of threads."""
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
SMALL = 32768
"""Operations up to which one thread is faster than waking another."""


class Kernels:
    def __init__(self, library: ctypes.CDLL):
        self._functions = {name: getattr(library, name) for name in ARGUMENTS}
        for name, types in ARGUMENTS.items():
            self._functions[name].argtypes = [TYPES[letter] for letter in types]
            self._functions[name].restype = None

    def call(self, name: str, *arguments: Tensor | ctypes.Array[ctypes.c_int64] | float | None, work: int) -> None:
        """Calls a function, with torch's number of threads unless there is little to do. None is a null pointer;
        ``work`` is about how many vector elements are computed."""
        pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        self._functions[name](*pointers, torch.get_num_threads() if work > SMALL else 1)


def numbers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def find_kernels() -> Kernels | None:
    spec = find_spec(LIBRARY)
    if spec is None or spec.origin is None:
        return None
    try:
        return load_kernels(spec.origin)
    except (OSError, AttributeError) as error:  # the compiler expected another OpenMP library; an older source
        logger.warning("%s could not be loaded, so torch computes everything: %s", spec.origin, error)
        return None


def load_kernels(library: str) -> Kernels | None:
    """The kernels in a file; None if torch has loaded no OpenMP library. OSError if the file cannot be loaded,
    AttributeError if a function is missing."""
    # The library is linked without an OpenMP library: it is to use torch's, and its threads.
    openmp = OPENMP.search(MEMORY_MAP.read_text())
    if openmp is None:
        return None
    ctypes.CDLL(openmp[1], ctypes.RTLD_GLOBAL)
    return Kernels(ctypes.CDLL(library))
