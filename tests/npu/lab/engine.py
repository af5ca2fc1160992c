"""A stand-in for Ascend's graph engine (GE), for functions that torchair compiles.

torchair makes the GE graph, so a function that cannot be lowered fails. What runs on the simulated device is
torchair's FX graph after its passes. Importing this module puts the stand-in in place for the rest of the process.

Code that torchair writes to its persistent cache works in this process only, which has the FX graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torchair import _utils as patches
from torchair._ge_concrete_graph import compat_ir, fx2ge_converter

from tests.npu.lab import device, traffic  # noqa: F401

_graphs: dict[str, torch.fx.GraphModule] = {}


def run(name: str, args: tuple[Any, ...]) -> Any:
    """Runs a graph by its name, as one launch."""
    with traffic.one_launch("ge graph"):
        return _graphs[name](*args)


def _codegen(self: Any, *_args: Any, **_options: Any) -> str:
    name = self.graph.name
    _graphs[name] = self.fx_graph
    return f"from tests.npu.lab import engine\ndef kernel(*args):\n    return engine.run({name!r}, args)\n"


fx2ge_converter.GeConcreteGraph.codegen = _codegen
fx2ge_converter.initialize_graph_engine = lambda *_: None
compat_ir.is_cann_compat = lambda *_args, **_options: ""  # every GE op counts as known to CANN

# npugraph_ex and torchair register the same decomposition; torchair fails if it comes second.
if torch._C.DispatchKey.AutogradPrivateUse1 not in torch.ops.aten.to.other.py_kernels:
    patches.register_matmul_backward_decomp()
patches.register_matmul_backward_decomp = lambda: None
