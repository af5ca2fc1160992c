"""The CUDA backend: the only package that imports Triton.

With ``TRITON_INTERPRET=1`` in the environment Triton interprets the kernels on tensors of the CPU. Then this backend
needs no GPU, and is slow: that is how its tests run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lopa_ascend.backend import memory
from lopa_ascend.backend.device import Device
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.kinds import format_size

if TYPE_CHECKING:
    from lopa_ascend.backend.compiler import Compiler
    from lopa_ascend.backend.interface import Ops, Profiler

CAPABILITY = (8, 0)
"""The oldest compute capability: the first one that multiplies bfloat16."""
INTERPRETED = "TRITON_INTERPRET"


class Cuda(Device):
    """An NVIDIA GPU, or a CPU on which Triton interprets the kernels."""

    name, resource, has_experts = "cuda", "GPU", False

    def open(self) -> None:
        # Sums and products are rounded one by one, as the definitions of the ops have it.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise _refusal("Triton is missing", "pip install -e '.[cuda]'") from error
        if self.on_host:
            return
        import torch

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
        # Products sum in float32 and round once, also where the library divides a sum among multiprocessors.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    @property
    def collectives(self) -> str:
        return "gloo" if self.on_host else "nccl"

    @property
    def on_host(self) -> bool:
        """Whether Triton interprets the kernels on the CPU."""
        return os.environ.get(INTERPRETED) == "1"

    def free_memory(self, ranks: int) -> int:
        if self.on_host:
            return memory.free_memory(ranks)
        import torch

        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info()[0]
        return free

    def check_memory(self, needed: int, ranks: int) -> None:
        if needed > (free := self.free_memory(ranks)):
            message = (
                f"the weights of a rank take {format_size(needed)}, and the GPU has {format_size(free)} free; choose a "
                "larger tensor_parallel_size, or quantization w8a8"
            )
            raise ParameterError("device", message)

    def _load_ops(self, config: EngineConfig) -> Ops:
        import torch

        self.open()
        from lopa_ascend.backend.cuda.ops import CudaOps

        return CudaOps(torch.device("cpu") if self.on_host else torch.device("cuda", torch.cuda.current_device()))

    def load_compiler(self, mode: str, key: str, directory: Path | None) -> Compiler:
        from lopa_ascend.backend.cuda.graphs import CudaGraphs, StreamCapture

        if self.on_host:
            raise ParameterError("graph_mode", f"cuda_graphs needs a GPU; with {INTERPRETED}=1 choose eager")
        return CudaGraphs(StreamCapture())

    @property
    def profiler(self) -> Profiler:
        from lopa_ascend.backend.cpu import profiler

        return profiler


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuses a GPU that is too old.

    Raises:
        ParameterError: says which one it is.
    """
    if capability < CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        raise _refusal(f"{name} has compute capability {found}", f"it needs {needed} (A100) or newer")


def _refusal(found: str, remedy: str) -> ParameterError:
    return ParameterError("device", f"cuda cannot be used: {found}; {remedy}")


DEVICE = Cuda()
