"""The compilers of decode steps on an NPU.

``npugraph_ex`` captures ACL graphs, ``ge`` builds graphs of Ascend's graph engine (GE). Both use the persistent cache
of their package, ``cache_compile``. A step that is loaded from its file runs without dynamo's guards, which would look
at every weight in every step. A bucket needs none: its tensors keep their memory, and its KV lengths are inputs of the
graph.
"""

from __future__ import annotations

import gc
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count, product
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor
from torch._functorch import config as functorch_config
from torch_npu import npu
from torch_npu.npu.utils import get_cann_version

# isort: split
# Importing torch_npu makes these two packages importable.
import npugraph_ex
import torchair
from npugraph_ex.inference._cache_compiler import CompiledModel as NpuGraphExModel
from torchair.inference._cache_compiler import CompiledModel as GeModel

from lopa_ascend.backend.compiler import MIN_KV_LENGTH, GraphError, Run, Step, dynamic_kv_lengths
from lopa_ascend.backend.graph_cache import CachingCompiler, GraphCache
from lopa_ascend.backend.memory import causes
from lopa_ascend.backend.npu.captured import CapturedRun, Graph, capturing
from lopa_ascend.backend.npu.gate import replay_seconds, wait_for_replay
from lopa_ascend.backend.npu.rewrites import join_in_place, multiply_in_float32, split_in_one_op, sum_in_place

MAX_GRAPHS = 64
"""npugraph_ex's own limit: a graph takes streams and events of the device, which has some two thousand."""
NUM_LENGTHS = 61
"""Different KV lengths that a capture has in turn. All of them fit into a page."""
ROUNDS = 3
FASTER = 0.9
"""Share of the host's time that updates in a thread may take to be chosen."""
OUT_OF_STREAMS = "207008"
"""The runtime's error code if the device has no stream for another graph."""
_numbers = count()
logger = logging.getLogger(__name__)


class BucketModule(torch.nn.Module):
    """A bucket as ``cache_compile`` takes it: a module with a method to compile. The cache tells modules apart by their
    text, which is ``identity``."""

    def __init__(self, step: Step, tensors: Sequence[Tensor], identity: str):
        super().__init__()
        self.step, self.tensors, self.identity = step, list(tensors), identity

    def extra_repr(self) -> str:
        return self.identity

    def run(self, kv_lengths: list[int]) -> Tensor:
        return self.step(self.tensors, kv_lengths)


class PackageCompiler(CachingCompiler):
    """Compiles through the persistent cache of a package, which has one file for each bucket and rank.

    ``key`` says what a step is made of: the model, the configuration, the code of this project. The shapes of its
    tensors, and the versions of torch, torch_npu and CANN, are added here. ``cache_dir``: see ``GraphCache``.
    """

    cache_compile: ClassVar[Callable[..., Run]]
    """The package's function that compiles a method, or loads it from its file."""
    cached_model: ClassVar[Any]
    """The package's class that knows the name of the file."""
    options: ClassVar[dict[str, Any]] = {"dynamic": False}

    def __init__(self, key: str, cache_dir: Path | None):
        super().__init__(GraphCache(cache_dir))
        self._key = f"{key}; torch {torch.__version__}, torch_npu {torch_npu.__version__}, CANN {get_cann_version()}"

    def launch(self, run: Run, name: str, kv_lengths: Sequence[int]) -> Tensor:
        output = run(kv_lengths)
        wait_for_replay(f"bucket {name}")
        return output

    def freeze(self) -> None:
        """Also waits until all ranks have all graphs."""
        super().freeze()
        self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        """Waits until all ranks are here, so that none begins a collective long before another one does."""
        self.on_every_rank(True)

    @abstractmethod
    def _config(self) -> Any:
        """The package's configuration."""

    def _rewrite(self, module: torch.fx.GraphModule) -> None:
        """Changes a graph after the package has fused its ops."""

    def _abandon_cache(self, error: Exception) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Another launch here would be one more than on the other ranks: their collectives would wait.
            raise GraphError(
                f"a graph in {self._cache.path} cannot be made or run ({error}); if this is no error of the device, "
                "delete that graph_cache"
            ) from error
        super()._abandon_cache(error)

    def _compile_cached(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        method = self._as_method(step, name, tensors)
        length_inputs: list[int] = []  # for each graph that is compiled, how many KV lengths are its inputs

        def count_and_rewrite(module: torch.fx.GraphModule, *_: Any) -> None:
            length_inputs.append(count_integer_inputs(module))
            self._rewrite(module)
            self._wait_for_ranks()

        config = self._config()
        config.post_grad_custom_post_pass = count_and_rewrite
        options = {"config": config, "cache_dir": str(self._cache.path), **self.options}
        file = Path(self.cached_model.get_cache_bin(method, **options))
        # npugraph_ex makes `.out` variants of torch_npu's ops whose schemas do not say that they return an argument.
        # The check that newer versions of torch have would warn of it, and fails where the environment has CI set.
        check = "check_custom_op_aliasing"
        unchecked = {check: False} if hasattr(functorch_config, check) else {}
        with torch.no_grad(), functorch_config.patch(unchecked):
            # A rank that has loaded a bucket would wait in its collectives while others compile it, perhaps for longer
            # than HCCL does. So all ranks load it, or all compile it.
            is_whole = self.on_every_rank(self._is_whole(file))
            if is_whole:
                self.num_loaded += 1
            else:
                file.unlink(missing_ok=True)
                sources = dynamic_kv_lengths(len(kv_lengths))
                with torch.compiler.config.patch(dynamic_sources=sources):  # type: ignore[attr-defined]
                    type(self).cache_compile(method, **options)(kv_lengths)
                self.num_compilations += 1
                self._check_compiled(name, file, length_inputs, len(kv_lengths))
            run = type(self).cache_compile(method, **options)
            self._wait_for_ranks()
            run(kv_lengths)
        return run

    def _check_compiled(self, name: str, file: Path, length_inputs: list[int], num_lengths: int) -> None:
        """Raises GraphError unless a bucket became one graph, with an input for each KV length, in its file."""
        if length_inputs != [num_lengths]:
            file.unlink(missing_ok=True)
            found = f"its graphs have {length_inputs} inputs for KV lengths, and the step has {num_lengths}"
            raise GraphError(f"bucket {name}: {found}")
        if not file.exists():
            raise GraphError(f"bucket {name}: graph mode {self.mode} could not write it to {self._cache.path}")

    def _is_whole(self, file: Path) -> bool:
        """Whether a bucket is in its file. A file that cannot be loaded, left by a start that broke off, is removed."""
        if not file.exists():
            return False
        try:
            self.cached_model.load(str(file))
        except Exception as error:  # noqa: BLE001  # a damaged pickle may raise anything
            logger.warning("graph_cache: %s is damaged (%s), and is compiled anew", file, type(error).__name__)
            file.unlink(missing_ok=True)
            return False
        return True

    def _as_method(self, step: Step, name: str, tensors: Sequence[Tensor]) -> MethodType:
        """``BucketModule.run`` with a code object that no other bucket of this process has. Dynamo keeps compiled code
        by code object, and torch_npu finds there what it writes to the file."""
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in tensors)
        code = BucketModule.run.__code__.replace(co_name=f"{name}_{next(_numbers)}")
        module = BucketModule(step, tensors, f"{self._key}; {shapes}")
        return MethodType(FunctionType(code, globals(), name), module)


def count_integer_inputs(module: torch.fx.GraphModule) -> int:
    """How many inputs of a graph are integers. A step has no other integers than KV lengths."""
    inputs = module.graph.find_nodes(op="placeholder")
    return sum(isinstance(node.meta["val"], torch.SymInt) for node in inputs)


def restore_in_place_writes(module: torch.fx.GraphModule) -> None:
    """Makes the writes of keys and values write into the caches again. torch.compile replaces each of them by an op
    that returns written copies of the two caches, and copies these to the caches at the end of the graph. Writing in
    place is right because nothing reads the old content after the write."""
    graph = module.graph
    for write in graph.find_nodes(op="call_function", target=torch.ops.npu.npu_scatter_pa_kv_cache_functional.default):
        with graph.inserting_before(write):
            graph.call_function(torch.ops.npu.npu_scatter_pa_kv_cache.default, write.args, write.kwargs)
        caches = write.args[2:4]
        for written in list(write.users):  # operator.getitem(write, 0 or 1)
            written.replace_all_uses_with(caches[written.args[1]])
            graph.erase_node(written)
        graph.erase_node(write)
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, source = copy.args[:2]
        if target is source:
            copy.replace_all_uses_with(target)
            graph.erase_node(copy)


class Ge(PackageCompiler):
    """torchair's mode max-autotune: GE fuses and schedules the whole step, and takes KV lengths from the host."""

    mode = "ge"
    cache_compile = torchair.inference.cache_compile
    cached_model = GeModel
    options: ClassVar[dict[str, Any]] = {"dynamic": False, "ge_cache": True}

    def _config(self) -> Any:
        return torchair.CompilerConfig()

    def _rewrite(self, module: torch.fx.GraphModule) -> None:
        multiply_in_float32(module)


class NpuGraphEx(PackageCompiler):
    """npugraph_ex's passes over a step, and an ACL graph captured of the result. The capture is this class's own:
    npugraph_ex would capture every graph on another stream, and graphs on different streams cannot share memory, even
    out of one pool."""

    mode = "npugraph_ex"
    seconds_to_compile = (7.0, 0.8)  # one core of an AMD EPYC; from graphs of one and of two layers
    max_buckets = MAX_GRAPHS
    cache_compile = npugraph_ex.inference.cache_compile
    cached_model = NpuGraphExModel

    def __init__(self, key: str, cache_dir: Path | None):
        super().__init__(key, cache_dir)
        self._pool, self._stream = npu.graph_pool_handle(), npu.Stream()
        self._in_thread: bool | None = None

    def _config(self) -> Any:
        config = npugraph_ex.CompilerConfig()
        config.force_eager = True
        return config

    def _rewrite(self, module: torch.fx.GraphModule) -> None:
        restore_in_place_writes(module)
        split_in_one_op(module)
        sum_in_place(module)
        join_in_place(module)

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        run = super()._compile(step, name, tensors, kv_lengths)
        # They differ, so that CapturedRun can tell which of them each attention task takes. Real padding rows have
        # equal ones.
        lengths = [MIN_KV_LENGTH + index % NUM_LENGTHS for index in range(len(kv_lengths))]
        gc.collect()  # an unused graph that is collected during the capture would give memory back, and be counted
        npu.empty_cache()
        memory_before = npu.memory_reserved()
        try:
            with torch.no_grad(), self._capturing() as graph:
                output = run(lengths)
        except RuntimeError as error:
            if not any(OUT_OF_STREAMS in str(cause) for cause in causes(error)):
                raise
            raise GraphError(
                f"bucket {name}: after {len(self.captured)} graphs the device has no streams for another (error "
                f"{OUT_OF_STREAMS}); for fewer graphs, lower max_num_seqs or graph_window_blocks"
            ) from error
        self.captured.append(name)
        self.memory += npu.memory_reserved() - memory_before
        return CapturedRun(graph, run, output, name, lengths)

    def _capturing(self) -> AbstractContextManager[Graph]:
        return capturing(pool=self._pool, stream=self._stream, auto_dispatch_capture=True)

    def replayed(self, launch: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad(), self._capturing() as graph:
            output = launch()
        graph.replay()
        wait_for_replay("a captured exchange of ranks")
        return output.clone()

    def try_out(self, run: Run, name: str, kv_lengths: Sequence[Sequence[int]]) -> None:
        """The first bucket also decides for all whether a thread updates KV lengths."""
        assert isinstance(run, CapturedRun)
        replays = [partial(run, lengths) for lengths in kv_lengths]
        run.in_thread = bool(self._in_thread)
        host, seconds = [replay_seconds(replay, f"bucket {name}") for replay in replays][-1]
        self.replay_milliseconds[name] = 1000 * seconds
        logger.info("bucket %s: a replay takes %.1f ms, %.1f of them the host", name, 1000 * seconds, 1000 * host)
        if self._in_thread is None:
            self._in_thread = run.in_thread = thread_is_faster(run, replays, name)


def thread_is_faster(run: CapturedRun, replays: Sequence[Callable[[], object]], name: str) -> bool:
    """Whether the host clearly launches replays faster if a thread updates their KV lengths. ``replays`` of the run
    follow one another with other KV lengths."""
    host = {False: math.inf, True: math.inf}
    for in_thread, replay in product((False, True) * ROUNDS, replays):
        run.in_thread = in_thread
        host[in_thread] = min(host[in_thread], replay_seconds(replay, f"bucket {name}")[0])
    is_faster = host[True] < FASTER * host[False]
    verdict = "a thread updates KV lengths" if is_faster else "KV lengths are updated without a thread"
    logger.info("%s: %.1f ms of the host with it, %.1f without", verdict, 1000 * host[True], 1000 * host[False])
    return is_faster
