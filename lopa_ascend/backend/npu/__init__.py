"""The NPU backend: the only package that imports torch_npu and torchair."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lopa_ascend.backend.npu.environment import check_environment
from lopa_ascend.backend.npu.versions import check_installed
from lopa_ascend.config import ParameterError

if TYPE_CHECKING:
    from lopa_ascend.backend.npu.ops import NpuOps


def load_npu_ops(graph_mode: str, *, attention_layout: str = "TND") -> NpuOps:
    """Opens this process's NPU as ``open_npu`` does, and loads its ops, for a graph mode.

    Raises:
        ParameterError: this process's NPU does not exist.
        UnsupportedStackError: the installed versions, or environment variables, keep the graph mode from running.
        ValueError: the attention layout is unknown.
    """
    check_installed(graph_mode)
    check_environment(os.environ, graph_mode)
    open_npu()
    from lopa_ascend.backend.npu.ops import NpuOps

    return NpuOps(attention_layout=attention_layout)


def open_npu() -> None:
    """Makes NPU number LOCAL_RANK of the environment, or 0, the current one of this thread.

    Kernels are then taken as they are installed, instead of being compiled for each new shape, and tensors keep the
    ND format, which is what the ops of this project take.

    Raises:
        ParameterError: this process's NPU does not exist.
        UnsupportedStackError: torch_npu or CANN is missing or too old.
    """
    check_installed("eager")
    from torch_npu import npu

    index, count = int(os.environ.get("LOCAL_RANK", 0)), npu.device_count()
    if index >= count:
        message = f"this rank needs NPU {index} (LOCAL_RANK), but this machine has {count} NPUs, numbered from 0"
        raise ParameterError("device", message)
    npu.set_device(index)
    npu.set_compile_mode(jit_compile=False)
    npu.config.allow_internal_format = False


def free_npu_memory() -> int:
    """Bytes that are free on the current NPU. Memory that torch caches for itself is given back first."""
    from torch_npu import npu

    npu.empty_cache()
    free: int = npu.mem_get_info()[0]
    return free
