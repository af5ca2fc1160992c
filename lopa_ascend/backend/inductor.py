"""The compiler of a step on a CPU: torch's inductor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from lopa_ascend.backend.compiler import Compiler, GraphError, Run, Step

_numbers = count()


class Inductor(Compiler):
    """Fuses what lies between matrix products and attention; those stay as they are.

    ``cache_dir`` is inductor's own cache, for the whole process; None: where it keeps it anyway. Dynamo traces anew.
    """

    mode = "inductor"

    def __init__(self, cache_dir: Path | None):
        super().__init__()
        if cache_dir is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        traced = Traced()
        bucket = _bucket(step, name, tensors)
        sources = ",".join(f"L['kv_lengths'][{index}]" for index in range(len(kv_lengths)))
        with torch.no_grad(), torch.compiler.config.patch(dynamic_sources=sources):  # type: ignore[attr-defined]
            torch.compile(bucket, backend=traced.compile, dynamic=False, fullgraph=True)(kv_lengths)
        self.num_compilations += 1
        if sorted(traced.lengths.values()) != list(range(len(kv_lengths))):
            count = len(traced.lengths)
            raise GraphError(f"bucket {name}: of {len(kv_lengths)} KV lengths, [{count}] are inputs of its graph")
        return traced.run


class Traced:
    """A compiled graph that is called without dynamo's guards: its arguments stay, but for the lengths.

    ``lengths`` are the indices of the KV lengths by that of the argument.
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self._args: list[Any] = []
        self._graph: Callable[..., Sequence[Tensor]]

    def compile(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Sequence[Tensor]]:
        """A backend of torch.compile, to be used once."""
        for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
            if isinstance(node.meta["example_value"], torch.SymInt):
                self.lengths[place] = node.meta["grapharg"].source.index
        self._graph = cast("Callable[..., Sequence[Tensor]]", compile_fx(module, inputs))

        def first(*args: Any) -> Sequence[Tensor]:
            self._args = list(args)
            return self._graph(*args)

        return first

    def run(self, kv_lengths: Sequence[int]) -> Tensor:
        args = list(self._args)
        for place, index in self.lengths.items():
            args[place] = kv_lengths[index]
        with torch.no_grad():
            return self._graph(*args)[0]


def _bucket(step: Step, name: str, tensors: Sequence[Tensor]) -> Run:
    """The step with code of its own: dynamo keeps by code what it has compiled."""

    def run(kv_lengths: Sequence[int]) -> Tensor:
        return step(tensors, kv_lengths)

    code = run.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(code, globals(), name, None, run.__closure__)
