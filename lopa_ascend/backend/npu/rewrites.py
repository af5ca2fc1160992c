"""Changes of a step's FX graph: some save kernels of a captured graph, one lets GE take it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
OUT_VARIANTS: dict[Any, Any] = {
    aten.exp.default: aten.exp.out,
    aten.gather.default: aten.gather.out,
    aten.index_select.default: aten.index_select.out,
    aten.sub.Tensor: aten.sub.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.where.self: aten.where.self_out,
}
"""Ops with one result, and their variants that write it into given memory."""
SAME_MEMORY = {
    *(aten.alias.default, aten.detach.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.view.default, aten.view.dtype),
}
"""Ops whose result is all of their first argument, if that is contiguous."""


def multiply_in_float32(module: GraphModule) -> None:
    """Replaces products with float32 results of narrower tensors, which torchair cannot convert for GE, by the same
    products of float32 tensors."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.mm.dtype):
        *factors, dtype = node.args
        with graph.inserting_before(node):
            wide = [graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype}) for x in factors]
            for copy, x in zip(wide, factors, strict=True):
                assert isinstance(x, Node)
                copy.meta = {**x.meta, "val": x.meta["val"].to(dtype)}
        node.target, node.args = aten.mm.default, tuple(wide)
    module.recompile()


def sum_in_place(module: GraphModule) -> None:
    """Lets all-reduces write into their argument if nothing else reads it: the functional all-reduce copies
    it first."""
    for node in module.graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
        argument = node.args[0]
        assert isinstance(argument, Node)
        if len(argument.users) == 1 and makes_memory(argument):
            node.target = collectives.all_reduce_.default
    module.recompile()


def makes_memory(node: Node) -> bool:
    """Whether a node's result is memory that no other tensor shares: neither an input nor a view."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and all(x.alias_info is None for x in target._schema.returns)


def split_in_one_op(module: GraphModule) -> None:
    """Lets one op split a tensor if each part is copied to be contiguous by an op of its own. torch_npu runs that op as
    one kernel if it has one for the shapes, otherwise as a copy for each part."""
    graph = module.graph
    for split in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        copies = contiguous_parts(split)
        if copies is None:
            continue
        whole = split.args[0]
        with graph.inserting_before(split):
            parts = []
            for copy in copies:
                part = graph.call_function(aten.new_empty.default, (whole, list(copy.meta["val"].shape)))
                part.meta = dict(copy.meta)
                parts.append(part)
            graph.call_function(aten.split_with_sizes_copy.out, split.args, {**split.kwargs, "out": parts})
        for copy, part in zip(copies, parts, strict=True):
            getitem = copy.args[0]
            assert isinstance(getitem, Node)
            copy.replace_all_uses_with(part)
            graph.erase_node(copy)
            graph.erase_node(getitem)
        graph.erase_node(split)
    module.recompile()


def contiguous_parts(split: Node) -> list[Node] | None:
    """The contiguous copies of all parts of a split, in order; None if a part is used in another way."""
    copies = {}
    for getitem in split.users:
        users = list(getitem.users)
        if getitem.target is not operator.getitem or len(users) != 1:
            return None
        (copy,) = users
        if copy.target is not aten.clone.default or copy.kwargs != {"memory_format": torch.contiguous_format}:
            return None
        copies[getitem.args[1]] = copy
    sizes = split.args[1]
    assert isinstance(sizes, Sequence)
    return [copies[index] for index in range(len(sizes))] if len(copies) == len(sizes) else None


def join_in_place(module: GraphModule) -> None:
    """Lets the parts of a tensor that is joined along its first dimension be computed where they lie in it. A joint
    whose parts cannot all be computed in place stays: a copy of each other part would cost as much."""
    graph = module.graph
    for target in (aten.stack.default, aten.cat.default):
        for joint in graph.find_nodes(op="call_function", target=target):
            parts, *dimension = joint.args
            assert isinstance(parts, Sequence)
            sources = [source_of(part) for part in parts]
            writable = [source for source in sources if source is not None]
            joins_first_dimension = not any(dimension)
            can_all_be_written = len(set(writable)) == len(parts)  # a source of two parts can lie in one place only
            if joins_first_dimension and can_all_be_written:
                _compute_inside(joint, writable)
    graph.eliminate_dead_code()
    module.recompile()


def source_of(part: Node) -> Node | None:
    """The node whose result has the bytes of a part, if it can write it into given memory: an op of ``OUT_VARIANTS``, a
    contiguous copy, or the values of a maximum."""
    while part.target in SAME_MEMORY:
        part = part.all_input_nodes[0]
    is_copy = part.target is aten.clone.default and part.kwargs == {"memory_format": torch.contiguous_format}
    is_maximum = part.target is operator.getitem and part.args[1] == 0 and _whole(part).target is aten.max.dim
    writes = part.target in OUT_VARIANTS or is_copy or is_maximum
    return part if writes and part.meta["val"].is_contiguous() else None


def _whole(getitem: Node) -> Node:
    (whole,) = getitem.all_input_nodes
    return whole


def _compute_inside(joint: Node, sources: list[Node]) -> None:
    """Replaces a joint by memory that ``sources`` write one after the other."""
    graph, result = joint.graph, joint.meta["val"]
    writers = [_whole(source) if source.target is operator.getitem else source for source in sources]
    first = min(writers)  # nodes are ordered as in the graph
    with graph.inserting_before(first):
        memory = graph.call_function(
            aten.new_empty.default, (first.all_input_nodes[0], [result.numel()]), {"dtype": result.dtype}
        )
    begin = 0
    for source in sources:
        value = source.meta["val"]
        with graph.inserting_after(memory):
            place = graph.call_function(aten.slice.Tensor, (memory, 0, begin, begin + value.numel()))
        with graph.inserting_after(place):
            typed = graph.call_function(aten.view.dtype, (place, value.dtype))
        with graph.inserting_after(typed):
            shaped = graph.call_function(aten.view.default, (typed, list(value.shape)))
        shaped.meta = dict(source.meta)
        _write_to(source, shaped)
        begin += value.numel()
    assert begin == result.numel()
    with graph.inserting_before(joint):
        whole = graph.call_function(aten.view.default, (memory, list(result.shape)))
    whole.meta = dict(joint.meta)
    joint.replace_all_uses_with(whole)
    graph.erase_node(joint)


def _write_to(source: Node, place: Node) -> None:
    """Lets a node write its result to ``place``, which its users read then."""
    graph = source.graph
    if source.target is operator.getitem:
        maximum = _whole(source)
        with graph.inserting_before(maximum):
            indices = graph.call_function(
                aten.new_empty.default, (maximum.args[0], list(source.meta["val"].shape)), {"dtype": torch.int64}
            )
            outputs = {"max": place, "max_values": indices}
            written = graph.call_function(aten.max.dim_max, maximum.args, {**maximum.kwargs, **outputs})
        written.meta = dict(maximum.meta)
        maximum.replace_all_uses_with(written)
        graph.erase_node(maximum)
        return
    with graph.inserting_before(source):
        if source.target is aten.clone.default:
            written = graph.call_function(aten.copy_.default, (place, source.args[0]))
        else:
            written = graph.call_function(OUT_VARIANTS[source.target], source.args, {**source.kwargs, "out": place})
    written.meta = dict(source.meta)
    source.replace_all_uses_with(written)
    graph.erase_node(source)
