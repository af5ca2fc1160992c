"""The inputs of a fused graph that change from step to step: the engine's attention, and the wanted rows."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from lopa_ascend.backend.interface import Ops
from lopa_ascend.graph.fusion.nodes import aten, method_of, static, value
from lopa_ascend.graph.fusion.trace import ATTEND
from lopa_ascend.model.plain import Attend

BY_ROW = frozenset({"linear", "rms_norm", "add_rms_norm", "swiglu"})
"""Methods of ``Ops`` that compute each row [i] of their results from row [i] of their arguments."""


def call_attend(attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of one layer, as a function that a graph can call."""
    return attend(layer, q, k, v)


def take_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def bind_attend(module: GraphModule) -> None:
    """Adds the input ``attend`` to a graph, and calls it in place of ``trace.attend_op``."""
    attend = _input(module, "attend")
    for node in module.graph.find_nodes(op="call_function", target=ATTEND):
        q, k, v, layer = node.args
        with module.graph.inserting_before(node):
            call = module.graph.call_function(call_attend, (attend, layer, q, k, v))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


def bind_rows(module: GraphModule, ops: Ops) -> None:
    """Adds the input ``rows`` to a graph: tokens whose hidden states are wanted, int64 [R], or None for all. If no
    token depends on another after the last attention, only these rows are computed from there on; otherwise they are
    taken at the end."""
    graph, rows = module.graph, _input(module, "rows")
    (output,) = graph.find_nodes(op="output")
    last = graph.find_nodes(op="call_function", target=call_attend)[-1]
    on_rows = {output: None}  # the nodes that see the wanted rows only
    after = _dependents(last, output)
    if all(_is_by_row(node, ops) for node in after):
        on_rows |= after
    sources = {source: None for node in on_rows for source in node.all_input_nodes if source not in on_rows}
    for source in filter(_has_token_rows, sources):
        first = next(node for node in graph.nodes if node in on_rows and source in node.all_input_nodes)
        with graph.inserting_before(first):
            taken = graph.call_function(take_rows, (source, rows))
        source.replace_all_uses_with(taken, delete_user_cb=lambda user: user in on_rows)
    graph.lint()
    module.recompile()


def _input(module: GraphModule, name: str) -> Node:
    with module.graph.inserting_after(module.graph.find_nodes(op="placeholder")[-1]):
        return module.graph.placeholder(name)


def _dependents(node: Node, output: Node) -> dict[Node, None]:
    found: dict[Node, None] = {}
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in found and user is not output:
            found[user] = None
            waiting += user.users
    return found


def _has_token_rows(node: Node) -> bool:
    """Whether a node's result has one row for each token."""
    found = node.meta.get("val")
    return isinstance(found, Tensor) and found.dim() > 0 and isinstance(found.shape[0], SymInt)


def _is_by_row(node: Node, ops: Ops) -> bool:
    """Whether each row of a node's result depends on the same row of its arguments alone."""
    target: Any = node.target
    inputs = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
    if target is operator.getitem:
        return method_of(getattr(node.args[0], "target", None), ops) in BY_ROW
    if method_of(target, ops) in BY_ROW:
        return all(_has_token_rows(x) or x.op == "get_attr" for x in inputs)
    if not _has_token_rows(node):
        return False
    if target is aten.reshape.default:
        before, after = static(value(inputs[0]).shape), static(value(node).shape)
        return before[0] == -1 and math.prod(before[1:]) == math.prod(after[1:])
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.pointwise not in target.tags and target is not aten._to_copy.default:
        return False
    # Broadcasting aligns dimensions from the last one on. So the token dimension of an input meets that of the result
    # only if both have the same number of dimensions.
    with_tokens = [value(x) for x in inputs if -1 in static(value(x).shape)]
    return all(x.dim() == value(node).dim() for x in with_tokens)
