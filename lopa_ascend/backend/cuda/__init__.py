"""The CUDA backend: the only package that imports Triton.

With ``TRITON_INTERPRET=1`` in the environment Triton interprets the kernels on tensors of the CPU. Then this backend
needs no GPU, and is slow: that is how its tests run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from lopa_ascend.config import ParameterError

if TYPE_CHECKING:
    from lopa_ascend.backend.cuda.graphs import CudaGraphs
    from lopa_ascend.backend.cuda.ops import CudaOps

CAPABILITY = (8, 0)
"""The oldest compute capability: the first one that multiplies bfloat16."""
INTERPRETED = "TRITON_INTERPRET"


def is_interpreted() -> bool:
    """Whether Triton interprets the kernels on the CPU."""
    return os.environ.get(INTERPRETED) == "1"


def load_cuda_ops() -> CudaOps:
    """Opens this process's GPU as ``open_cuda`` does, and loads its ops.

    Raises:
        ParameterError: see ``open_cuda``.
    """
    open_cuda()
    from lopa_ascend.backend.cuda.ops import CudaOps

    return CudaOps(torch.device("cpu") if is_interpreted() else torch.device("cuda", torch.cuda.current_device()))


def load_cuda_compiler() -> CudaGraphs:
    """The compiler of the graph mode "cuda_graphs".

    Raises:
        ParameterError: there is no GPU that could capture.
    """
    from lopa_ascend.backend.cuda.graphs import CudaGraphs, StreamCapture

    if is_interpreted():
        raise ParameterError("graph_mode", f"cuda_graphs needs a GPU; with {INTERPRETED}=1 choose eager")
    return CudaGraphs(StreamCapture())


def open_cuda() -> None:
    """Makes GPU number LOCAL_RANK of the environment, or 0, the current one of this process.

    Raises:
        ParameterError: Triton, a torch for CUDA, the driver or the GPU is missing, or the GPU is too old; says what is
            there and what is needed.
    """
    # Sums and products are rounded one by one, as the definitions of the ops have it.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise _refusal("Triton is missing", "pip install -e '.[cuda]'") from error
    if is_interpreted():
        return
    if torch.version.cuda is None:
        raise _refusal(f"torch {torch.__version__} is built without CUDA", "install a build of torch for CUDA")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        message = f"torch {torch.__version__} finds no usable GPU ({error})"
        raise _refusal(message, f"it needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda}") from error
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        message = f"this rank needs GPU {index} (LOCAL_RANK), but this machine has {count} GPUs, numbered from 0"
        raise ParameterError("device", message)
    check_capability(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    torch.cuda.set_device(index)


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuses a GPU that is too old.

    Raises:
        ParameterError: says which one it is.
    """
    if capability < CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        raise _refusal(f"{name} has compute capability {found}", f"it needs {needed} (A100) or newer")


def free_cuda_memory() -> int:
    """Bytes that are free on the current GPU. Memory that torch caches for itself is given back first."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free


def _refusal(found: str, remedy: str) -> ParameterError:
    return ParameterError("device", f"cuda cannot be used: {found}; {remedy}")
