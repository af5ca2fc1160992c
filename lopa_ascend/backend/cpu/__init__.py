"""The CPU backend. ``definition`` says in plain torch what every fused op computes, ``ops`` computes it fast by torch,
and ``native`` faster in C++, where it can."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lopa_ascend.backend import memory
from lopa_ascend.backend.device import Device
from lopa_ascend.config import EngineConfig, ParameterError

if TYPE_CHECKING:
    from lopa_ascend.backend.compiler import Compiler
    from lopa_ascend.backend.interface import Ops, Profiler


class Cpu(Device):
    name, resource, collectives, on_host = "cpu", "CPU", "gloo", True
    free_tokens, codes = 32, ("int8", "int4", "fp8")

    def rank_needs(self, config: EngineConfig) -> int:
        return config.threads or 1

    def free_memory(self, ranks: int) -> int:
        return memory.free_memory(ranks)

    def _load_ops(self, config: EngineConfig) -> Ops:
        from lopa_ascend.backend.cpu.native import load_cpu_ops

        if config.graph_mode == "inductor":
            _check_inductor()
        return load_cpu_ops(packs_weights=config.graph_mode == "eager")

    def load_compiler(self, mode: str, key: str, directory: Path | None) -> Compiler:
        from lopa_ascend.backend.cpu.inductor import Inductor

        return Inductor(directory)

    @property
    def profiler(self) -> Profiler:
        from lopa_ascend.backend.cpu.profiler import TorchProfiler

        return TorchProfiler()


def _check_inductor() -> None:
    import torch

    if not hasattr(getattr(torch.compiler, "config", None), "dynamic_sources"):
        message = (
            f'"inductor" needs the option dynamic_sources of torch.compile, which torch {torch.__version__} does not '
            'have; use "eager", or torch 2.13'
        )
        raise ParameterError("graph_mode", message)


DEVICE = Cpu()
