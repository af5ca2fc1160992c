"""Changes of a step's FX graph that save kernels of a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
collectives = torch.ops._c10d_functional


def sum_in_place(module: GraphModule) -> None:
    """Lets all-reduces write into their argument, where nothing else reads it.

    The functional all-reduce copies its argument first.
    """
    for node in module.graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
        argument = node.args[0]
        assert isinstance(argument, Node)
        if len(argument.users) == 1 and makes_memory(argument):
            node.target = collectives.all_reduce_.default
    module.recompile()


def makes_memory(node: Node) -> bool:
    """Whether the result of a node is memory that no other tensor shares: neither an input nor a view."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and all(x.alias_info is None for x in target._schema.returns)


def split_in_one_kernel(module: GraphModule) -> None:
    """Lets one kernel split a tensor, where each part is copied to be contiguous by a kernel of its own."""
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
