"""Functions traced to graphs, and fused ones held to what they computed before."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.graph.fusion import Report, fuse

OPS = CpuOps()
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(module: GraphModule) -> list[str]:
    """What a graph calls, in order: methods of OPS as ``ops.NAME``, aten ops by their names; no parts of results."""
    names = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            known = isinstance(node.target, OpOverload)
            names.append(node.target._schema.name.removeprefix("aten::") if known else f"ops.{node.target.__name__}")
    return names


def copied(x: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, x)


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def assert_near(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """Equal but for rounding in ``dtype``; int8 codes may be the next ones."""
    tolerance = 2e-5 if dtype == torch.float32 else 2**-6
    for x, y in zip(tensors(got), tensors(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if x.dtype == torch.int8:
            torch.testing.assert_close(x, y, rtol=0, atol=1)
        else:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def traced(function: Callable[..., Any], *args: Any) -> GraphModule:
    """What the function reads besides its arguments are attributes of the module."""
    with torch.no_grad():
        return make_fx(lambda *given: function(*given))(*copied(args))


def fused(function: Callable[..., Any], *args: Any) -> tuple[GraphModule, Report]:
    """The fused graph of a function, which computes the same and leaves its arguments as they are."""
    module = traced(function, *args)
    return module, assert_fuses(module, function, *args)


def assert_fuses(module: GraphModule, function: Callable[..., Any], *args: Any) -> Report:
    with torch.no_grad():
        expected_args, given = copied(args), copied(args)
        expected = function(*expected_args)
        report = fuse(module, OPS)
        dtype = torch.bfloat16 if any(x.dtype == torch.bfloat16 for x in tensors(args)) else torch.float32
        assert_near(module(*given), expected, dtype)
        assert_near(given, expected_args, dtype)
    return report


def assert_left(function: Callable[..., Any], *args: Any, reason: dict[str, str]) -> None:
    """No pass that is named rewrites anything, for the reason given; an empty one: it does not look like it."""
    _, report = fused(function, *args)
    for name, words in reason.items():
        assert name not in report.fused, report
        refused = report.refused.get(name, [])
        assert any(words in why for why in refused) if words else not refused, report
