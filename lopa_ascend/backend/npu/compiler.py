"""Compilers of a step on an NPU: ``npugraph_ex`` captures ACL graphs, ``ge`` builds graphs of Ascend's graph engine.

Both go through the persistent cache of their package (``cache_compile``). What it reads from a file runs without
dynamo's guards, which look at every weight in every step. A bucket needs none: its tensors stay, and its lengths are
inputs of the graph.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
import torch_npu
from torch import Tensor
from torch._functorch import config as functorch_config
from torch_npu import npu
from torch_npu.npu.utils import get_cann_version

# isort: split
# These two exist once torch_npu is loaded.
import npugraph_ex
import torchair
from npugraph_ex.inference._cache_compiler import CompiledModel as NpuGraphExModel
from torchair.inference._cache_compiler import CompiledModel as GeModel

from lopa_ascend.backend.compiler import Compiler, GraphError, Run, Step

MAX_GRAPHS = 64
"""npugraph_ex's own limit: a graph takes streams and events of the device, which has some two thousand."""
NO_RESOURCES = "207008"
LENGTHS = "actual_seq_lengths_kv"
_numbers = count()


def load_npu_compiler(mode: str, key: str, cache_dir: Path | None) -> Compiler:
    """The compiler of mode "npugraph_ex" or "ge"."""
    compilers: dict[str, type[CachedCompiler]] = {"npugraph_ex": NpuGraphEx, "ge": Ge}
    return compilers[mode](key, cache_dir)


class BucketStep(torch.nn.Module):
    """A bucket as ``cache_compile`` wants it: a method of a module whose text says what is compiled."""

    def __init__(self, step: Step, tensors: Sequence[Tensor], identity: str):
        super().__init__()
        self.step, self.tensors, self.identity = step, list(tensors), identity

    def extra_repr(self) -> str:
        return self.identity

    def run(self, kv_lengths: list[int]) -> Tensor:
        return self.step(self.tensors, kv_lengths)


class CachedCompiler(Compiler):
    """Compiles through a package's persistent cache in ``cache_dir``, a file for each bucket and rank; None: in a
    directory that is gone with the compiler. ``key`` says all that a step is made of and that neither its tensors'
    shapes nor the versions of the stack show: model, configuration, this project's code."""

    cache_compile: ClassVar[Callable[..., Run]]
    """Of the package."""
    cached_model: ClassVar[Any]
    """The package's class that names the files."""
    options: ClassVar[dict[str, Any]] = {"dynamic": False}
    """Of ``cache_compile``."""

    def __init__(self, key: str, cache_dir: Path | None):
        super().__init__()
        self._temporary = TemporaryDirectory() if cache_dir is None else None
        self._cache_dir = str(cache_dir) if self._temporary is None else self._temporary.name
        self._key = f"{key}; torch {torch.__version__}, torch_npu {torch_npu.__version__}, CANN {get_cann_version()}"

    @abstractmethod
    def _config(self) -> Any:
        """The package's configuration."""

    def _rewrite(self, module: torch.fx.GraphModule) -> None:
        """Changes a graph behind the package's fusions."""

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        found: list[int] = []

        def look(module: torch.fx.GraphModule, *_: Any) -> None:
            found.append(count_lengths(module))
            self._rewrite(module)

        bucket, config = self._bucket(step, name, tensors), self._config()
        config.post_grad_custom_post_pass = look
        options = {"config": config, "cache_dir": self._cache_dir, **self.options}
        file = Path(self.cached_model.get_cache_bin(bucket, **options))
        # npugraph_ex makes `.out` variants of torch_npu's ops, and their schemas do not say that they return what they
        # are given: torch's check would warn of it, and fails where the environment has CI set.
        with torch.no_grad(), functorch_config.patch(check_custom_op_aliasing=False):
            if file.exists():
                self.num_loaded += 1
            else:
                sources = ",".join(f"L['kv_lengths'][{index}]" for index in range(len(kv_lengths)))
                with torch.compiler.config.patch(dynamic_sources=sources):  # type: ignore[attr-defined]
                    type(self).cache_compile(bucket, **options)(kv_lengths)
                self.num_compilations += 1
                if found != [len(kv_lengths)]:
                    file.unlink(missing_ok=True)
                    raise GraphError(f"bucket {name}: of {len(kv_lengths)} KV lengths, {found} are inputs of its graph")
                if not file.exists():
                    raise GraphError(f"bucket {name}: graph mode {self.mode} could not write it to {self._cache_dir}")
            run = type(self).cache_compile(bucket, **options)
            run(kv_lengths)
        return run

    def _bucket(self, step: Step, name: str, tensors: Sequence[Tensor]) -> MethodType:
        """``BucketStep.run`` with code of its own, unlike any other in this process: by code dynamo keeps what it has
        compiled, and torch_npu finds there what it saves."""
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in tensors)
        code = BucketStep.run.__code__.replace(co_name=f"{name}_{next(_numbers)}")
        return MethodType(FunctionType(code, globals(), name), BucketStep(step, tensors, f"{self._key}; {shapes}"))


def count_lengths(module: torch.fx.GraphModule) -> int:
    """Of a graph, the inputs that are integers."""
    inputs = module.graph.find_nodes(op="placeholder")
    return sum(isinstance(node.meta["val"], torch.SymInt) for node in inputs)


def write_in_place(module: torch.fx.GraphModule) -> None:
    """Puts the write into the caches back in place, where torch.compile has made one of it that gives copies, which
    are copied to the caches in the end. Nothing reads a cache's old values after the write."""
    graph = module.graph
    for write in graph.find_nodes(op="call_function", target=torch.ops.npu.npu_scatter_pa_kv_cache_functional.default):
        with graph.inserting_before(write):
            graph.call_function(torch.ops.npu.npu_scatter_pa_kv_cache.default, write.args, write.kwargs)
        for copy in list(write.users):  # operator.getitem
            copy.replace_all_uses_with(write.args[2 + copy.args[1]])
            graph.erase_node(copy)
        graph.erase_node(write)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class Ge(CachedCompiler):
    """torchair's max-autotune: GE fuses and schedules the whole step; lengths are its inputs on the host."""

    mode = "ge"
    cache_compile = torchair.inference.cache_compile
    cached_model = GeModel
    options: ClassVar[dict[str, Any]] = {"dynamic": False, "ge_cache": True}

    def _config(self) -> Any:
        return torchair.CompilerConfig()


class NpuGraphEx(CachedCompiler):
    """npugraph_ex's passes, and an ACL graph of what they leave.

    The capture is our own: npugraph_ex captures every graph on another stream, where none can use the memory of
    another, not even from one pool.
    """

    mode = "npugraph_ex"
    max_buckets = MAX_GRAPHS
    cache_compile = npugraph_ex.inference.cache_compile
    cached_model = NpuGraphExModel

    def __init__(self, key: str, cache_dir: Path | None):
        super().__init__(key, cache_dir)
        self._pool, self._stream = npu.graph_pool_handle(), npu.Stream()

    def _config(self) -> Any:
        config = npugraph_ex.CompilerConfig()
        config.force_eager = True
        return config

    def _rewrite(self, module: torch.fx.GraphModule) -> None:
        write_in_place(module)

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        run = super()._compile(step, name, tensors, kv_lengths)
        gc.collect()  # graphs that nobody has any more would give memory back meanwhile
        npu.empty_cache()
        graph, before = npu.NPUGraph(), npu.memory_reserved()
        capture = npu.graph(graph, pool=self._pool, stream=self._stream, auto_dispatch_capture=True)
        try:
            with torch.no_grad(), capture:
                output = run(kv_lengths)
        except RuntimeError as error:
            if NO_RESOURCES not in str(error):
                raise
            raise GraphError(
                f"bucket {name}: after {self.num_captures} graphs the device has no streams for another (error "
                f"{NO_RESOURCES}); serve fewer buckets"
            ) from error
        self.num_captures += 1
        self.memory += npu.memory_reserved() - before
        return Captured(graph, run, output, parts(graph, name, kv_lengths))


class Captured:
    """A graph that is replayed with other lengths: they are written into its tasks while it runs, and each attention
    waits for its own."""

    def __init__(self, graph: npu.NPUGraph, captured: Run, output: Tensor, parts: list[slice]):
        self._graph, self._output, self._parts = graph, output, parts
        self._captured = captured  # has the tensors on whose memory the graph works
        self._updates = graph.graph_dispatch_mode.update_stream
        self._done = npu.Event()

    def __call__(self, kv_lengths: Sequence[int]) -> Tensor:
        self._graph.replay()
        # Not before the last replay is over: it may still wait for the tasks that change now.
        self._updates.wait_event(self._done)
        self._graph.update([{LENGTHS: kv_lengths[part]} for part in self._parts])
        self._done.record()
        return self._output


def parts(graph: npu.NPUGraph, name: str, kv_lengths: list[int]) -> list[slice]:
    """Which lengths each attention of a graph has taken: they come in order, and all of them in each layer."""
    found, first = [], 0
    for record in graph.graph_dispatch_mode.graph_dispatch_records:
        taken = record.kwargs[LENGTHS]
        part = slice(first, first + len(taken))
        if kv_lengths[part] != taken:
            raise GraphError(f"bucket {name}: attention takes other KV lengths than the step was given")
        found.append(part)
        first = part.stop % len(kv_lengths)
    return found
