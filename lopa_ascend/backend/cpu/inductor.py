"""The compiler of decode steps on a CPU: torch's inductor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor import utils
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from lopa_ascend.backend.compiler import GraphError, Run, Step, dynamic_kv_lengths
from lopa_ascend.backend.cpu.profiler import mark
from lopa_ascend.backend.graph_cache import CachingCompiler, GraphCache, check_private
from lopa_ascend.config import ParameterError

logger = logging.getLogger(__name__)

_numbers = count()
_clear_caches = getattr(utils, "clear_caches", None) or utils.clear_inductor_caches
"""Makes inductor forget what it has loaded from its directory; torch 2.6 has the other name."""


class Inductor(CachingCompiler):
    """Fuses the operations between matrix products and attention, which stay as they are.

    ``directory`` is inductor's own cache, for the whole process; None: inductor's default, or a temporary one if others
    may write there. It keeps compiled code; steps are traced again in every process. ParameterError if others may write
    to it.
    """

    mode = "inductor"
    warning = (
        "graph_mode inductor is meant for tests of compiled steps: on a CPU it has not been faster than graph_mode "
        "eager. Before the first request %d graphs are compiled, which can take minutes."
    )

    def __init__(self, directory: Path | None):
        super().__init__(_default_cache() if directory is None else GraphCache(directory))
        self._point_to_cache()

    def _point_to_cache(self) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._cache.path)

    def _abandon_cache(self, error: Exception) -> None:
        super()._abandon_cache(error)
        self._point_to_cache()
        _clear_caches()

    def _compile_cached(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        graph = UnguardedGraph()
        run = _as_new_function(step, name, tensors)
        sources = dynamic_kv_lengths(len(kv_lengths))
        with torch.no_grad(), torch.compiler.config.patch(dynamic_sources=sources):  # type: ignore[attr-defined]
            torch.compile(run, backend=graph.compile, dynamic=False, fullgraph=True)(kv_lengths)
        self.num_compilations += 1
        if sorted(graph.length_inputs.values()) != list(range(len(kv_lengths))):
            num_inputs = len(graph.length_inputs)
            raise GraphError(
                f"bucket {name}: its graph has {num_inputs} inputs for KV lengths, and the step has {len(kv_lengths)}"
            )
        return graph.run


def _default_cache() -> GraphCache:
    """Inductor's default directory, whose name in /tmp anybody can foresee."""
    directory = Path(cache_dir()).resolve()
    try:
        check_private(directory)
    except (ParameterError, OSError) as error:
        logger.warning("inductor's cache is not used: %s", error)
        return GraphCache(None)
    return GraphCache(directory)


class UnguardedGraph:
    """A compiled graph that is called without dynamo's guards, which look at every weight before every call. A bucket
    needs none: its arguments are always the same, except for the KV lengths."""

    length_inputs: dict[int, int]
    """The graph's arguments that are KV lengths: by index of the argument, the index of the KV length."""

    def __init__(self) -> None:
        self.length_inputs = {}
        self._args: list[Any] = []
        self._graph: Callable[..., Sequence[Tensor]]

    def compile(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Sequence[Tensor]]:
        """A backend for one call of torch.compile. It keeps the compiled graph, and the arguments of its first call."""
        for argument, node in enumerate(module.graph.find_nodes(op="placeholder")):
            if isinstance(node.meta["example_value"], torch.SymInt):
                self.length_inputs[argument] = node.meta["grapharg"].source.index
        self._graph = cast("Callable[..., Sequence[Tensor]]", compile_fx(module, inputs))

        def first_call(*args: Any) -> Sequence[Tensor]:
            self._args = list(args)
            return self._graph(*args)

        return first_call

    def run(self, kv_lengths: Sequence[int]) -> Tensor:
        args = list(self._args)
        for argument, index in self.length_inputs.items():
            args[argument] = kv_lengths[index]
        with torch.no_grad(), mark("launch"):
            return self._graph(*args)[0]


def _as_new_function(step: Step, name: str, tensors: Sequence[Tensor]) -> Run:
    """The step with a code object of its own, by which dynamo keeps compiled code."""

    def run(kv_lengths: Sequence[int]) -> Tensor:
        return step(tensors, kv_lengths)

    code = run.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(code, globals(), name, None, run.__closure__)
