"""The graph of Ascend's graph engine (GE) that torchair makes of a function, after torchair's passes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torchair
from torchair._ge_concrete_graph import compat_ir, fx2ge_converter

BOOKKEEPING = frozenset({"Data", "RefData", "Const", "ConstPlaceHolder", "NetOutput", "NoOp"})
"""GE ops that launch no kernel because they only describe the graph."""
VIEWS = frozenset(
    {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Bitcast", "Shape", "Size", "FlattenV2", "ExpandDims"}
)
"""GE ops that launch no kernel because they leave the content of their tensor as it is."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of a GE graph."""

    type: str
    """GE's name of the op."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the outputs. The graph has them for its inputs, the ops of type Data."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A GE graph."""

    ops: tuple[Op, ...]
    """The ops after torchair's passes, in order."""

    @property
    def by_type(self) -> Counter[str]:
        """All ops, counted by type."""
        return Counter(op.type for op in self.ops)

    @property
    def kernels(self) -> Counter[str]:
        """The ops that are launched on a device, counted by type."""
        return Counter({name: n for name, n in self.by_type.items() if name not in BOOKKEEPING | VIEWS})

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()


class _NoDeviceError(Exception):
    """The graph is made, and there is no device to run it on."""


@contextmanager
def _collected_graphs() -> Iterator[list[Any]]:
    """Collects the GE graphs that torchair makes inside this context, as protocol buffers.

    GE is not started, and every GE op counts as known to CANN, since both would need libraries that are missing.
    """
    graphs: list[Any] = []
    optimize = fx2ge_converter.GeConcreteGraph.optimize_graph_without_runtime

    def optimize_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = optimize(self, *args, **kwargs)
        graphs.append(self.graph)
        return result

    with (
        mock.patch.object(fx2ge_converter.GeConcreteGraph, "optimize_graph_without_runtime", optimize_and_keep),
        mock.patch.object(fx2ge_converter, "initialize_graph_engine"),
        mock.patch.object(compat_ir, "is_cann_compat", return_value=""),
    ):
        yield graphs


def _parsed(graph: Any) -> Lowered:
    return Lowered(tuple(Op(op.type, tuple(tuple(desc.shape.dim) for desc in op.output_desc)) for op in graph.op))


def _compiled(
    function: Callable[..., Any], dynamic: bool, config: torchair.CompilerConfig | None, run: bool
) -> Callable[..., Any]:
    config = config or torchair.CompilerConfig()
    config.debug.run_eagerly = True  # convert everything, then run torchair's FX graph op by op
    backend = torchair.get_npu_backend(compiler_config=config)

    def without_device(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        backend(module, inputs, **options)

        def stop(*_args: Any) -> None:
            raise _NoDeviceError

        return stop

    torch._dynamo.reset()
    return torch.compile(function, backend=backend if run else without_device, dynamic=dynamic, fullgraph=True)


def lower(
    function: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    config: torchair.CompilerConfig | None = None,
) -> Lowered:
    """The GE graph of ``function(*args)``. Nothing is computed.

    Args:
        function: the function to lower.
        args: its arguments.
        dynamic: whether sizes and integers are inputs of the graph instead of constants.
        config: torchair's configuration; None for its defaults.
    """
    with _collected_graphs() as graphs, torch.no_grad():
        try:
            _compiled(function, dynamic, config, run=False)(*args)
        except _NoDeviceError:
            pass
    (graph,) = graphs
    return _parsed(graph)


def optimised(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    """``function`` as torchair's FX graph after its passes, which runs op by op on the laboratory's kernels."""
    run = _compiled(function, dynamic, None, run=True)

    def call(*args: Any) -> Any:
        with _collected_graphs(), torch.no_grad():
            return run(*args)

    return call
