"""The CUDA backend: the only package that imports Triton. With ``TRITON_INTERPRET=1`` in the environment Triton
interprets the kernels on tensors of the CPU, as its tests do: then this backend needs no GPU, and is slow."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lopa_ascend.backend import memory
from lopa_ascend.backend.cuda.health import gauges
from lopa_ascend.backend.device import Device, Gauge, ask
from lopa_ascend.config import EngineConfig, ModelConfig, ParameterError
from lopa_ascend.config.kinds import format_size

if TYPE_CHECKING:
    from lopa_ascend.backend.compiler import Compiler
    from lopa_ascend.backend.interface import Ops, Profiler

CAPABILITY = (8, 0)
"""The oldest compute capability: the first one that multiplies bfloat16."""
FP8_CAPABILITIES = (8, 9), (9, 0), (10, 0)
"""Those for which torch multiplies float8 with a scale for each row and output (RTX 40 and L40S, H100, B200)."""
FP8_MULTIPLE = 16
"""Inputs and outputs of a float8 weight must be multiples of this."""
INTERPRETED = "TRITON_INTERPRET"
DRIVER = Path("/proc/driver/nvidia/version")


class Cuda(Device):
    """An NVIDIA GPU, or a CPU on which Triton interprets the kernels."""

    name, resource, codes = "cuda", "GPU", ("int8", "fp8")

    def read_health(self) -> Sequence[Gauge]:
        return () if self.on_host else gauges(ask)

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
            remedy = (
                f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]} from an index with CUDA"
            )
            raise _refusal(
                f"torch {torch.__version__} is built without CUDA", f"{remedy} builds (on Linux pip's usual one)"
            )
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            message = f"torch {torch.__version__} finds no usable GPU ({error})"
            needed = f"it needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda}"
            raise _refusal(message, f"{needed}, or a torch for an older CUDA (docs/troubleshooting.md)") from error
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= count:
            message = f"this rank needs GPU {index} (LOCAL_RANK), but this machine has {count} GPUs, numbered from 0"
            raise ParameterError("device", message)
        check_capability(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        torch.cuda.set_device(index)
        # Products sum in float32 and round once, also where the library divides a sum among multiprocessors.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        _load_launcher()

    def check_model(self, config: EngineConfig, model: ModelConfig, path: Path, *, codes: str | None) -> Sequence[str]:
        if codes == "fp8":
            _check_fp8(model, config.tensor_parallel_size, str(path), any_dtype=self.on_host)
        return super().check_model(config, model, path, codes=codes)

    def checked_ops(
        self, ops: Ops, config: EngineConfig, model: ModelConfig, max_keys: int, *, is_causal: bool, codes: str | None
    ) -> tuple[Ops, str]:
        if codes == "fp8" and not self.on_host:
            import torch

            check_fp8_capability(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        return super().checked_ops(ops, config, model, max_keys, is_causal=is_causal, codes=codes)

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

    def held_memory(self) -> tuple[int, int]:
        import torch

        return torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]

    def check_memory(self, needed: int, ranks: int, share: float | None = None) -> None:
        if needed > (free := self.usable_memory(ranks, share)):
            param, usable = "device", f"the GPU has {format_size(free)} free"
            if share is not None:
                param, usable = (
                    "gpu_memory_utilization",
                    f"a share of {share:g} leaves it {format_size(free)} of the GPU",
                )
            message = (
                f"the weights of a rank take {format_size(needed)}, and {usable}; choose a larger "
                "tensor_parallel_size, or quantization w8a8"
            )
            raise ParameterError(param, message)

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
        from torch.profiler import ProfilerActivity

        from lopa_ascend.backend.cpu.profiler import TorchProfiler

        return TorchProfiler(() if self.on_host else (ProfilerActivity.CUDA,))

    def versions(self) -> Mapping[str, str | None]:
        if self.on_host:
            return {}
        import torch

        return {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "triton": metadata.version("triton"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }


def driver_version(file: Path = DRIVER) -> str | None:
    """The version of NVIDIA's driver, e.g. "580.65.06"; None if its file does not tell it."""
    try:
        found = re.search(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def _load_launcher() -> None:
    """Lets Triton compile its launcher now instead of at the first launch. ParameterError if it cannot."""
    import triton

    try:
        triton.runtime.driver.active.get_current_device()
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.CalledProcessError) as error:
        found = str(error).strip()
        if isinstance(error, subprocess.CalledProcessError):
            found = f"{error.cmd[0]} has failed, as it says above"
        remedy = "it needs a C compiler and Python's headers: apt-get install gcc python3-dev, or set CC"
        raise _refusal(f"Triton cannot compile what launches its kernels ({found})", remedy) from error


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises ParameterError for a GPU that is too old."""
    if capability < CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        raise _refusal(f"{name} has compute capability {found}", f"it needs {needed} (A100) or newer")


def check_fp8_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises ParameterError for a GPU for which torch has no products of float8 with row-wise scales."""
    if capability not in FP8_CAPABILITIES:
        found, *needed = (".".join(map(str, version)) for version in (capability, *FP8_CAPABILITIES))
        message = f"fp8 weights need a GPU of compute capability {' or '.join(needed)}, and {name} has {found}"
        raise ParameterError("device", f"{message}; choose quantization w8a8 of the float checkpoint")


def _check_fp8(model: ModelConfig, ranks: int, path: str, *, any_dtype: bool) -> None:
    """Raises ParameterError for a model that the products of float8 do not take."""
    if model.dtype != "bfloat16" and not any_dtype:
        raise ParameterError("dtype", f"fp8 weights on device cuda need dtype bfloat16, got {model.dtype}")
    heads, kv_heads = model.local_heads(ranks), model.local_kv_heads(ranks)
    sizes = model.hidden_size, model.intermediate_size // ranks, *(n * model.head_dim for n in (heads, 2 * kv_heads))
    if any(size % FP8_MULTIPLE for size in sizes):
        found = f"on each of {ranks} ranks {path} has layers of {', '.join(map(str, sizes))} inputs or outputs"
        raise ParameterError("model", f"{found}; fp8 weights on device cuda need multiples of {FP8_MULTIPLE}")


def _refusal(found: str, remedy: str) -> ParameterError:
    return ParameterError("device", f"cuda cannot be used: {found}; {remedy}")


DEVICE = Cuda()
