"""What a capture cannot hold: ops without an aclnn kernel, and more graphs than the device has streams for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch_npu
import yaml

from tests.npu.lab.collectives import expansion

FUNCTIONS = Path("csrc/aten/npu_native_functions_by_codegen.yaml")
"""The file of torch_npu that says which of its two libraries has a kernel of an op: op_api (aclnn) or acl_op, whose
kernels are looked up on the host at each launch, and so cannot be captured."""
STREAMS = 1920
"""Streams of a device, and below what graphs take of them, as vllm-ascend counts them (``update_aclgraph_sizes`` in
its utils.py): a graph takes a stream. Each communicator takes streams in every graph that it is part of, and some for
itself unless it is expanded on the vector cores (AIV)."""
STREAMS_OF_COMMUNICATOR = {"AIV": 0, "AI_CPU": 40}
STREAMS_IN_GRAPH = {"AIV": 1, "AI_CPU": 2}


@cache
def ops_without_aclnn() -> frozenset[str]:
    """Names of torch_npu's ops, with overloads, that no aclnn kernel computes."""
    text = (Path(torch_npu.__file__).parent / FUNCTIONS).read_text(encoding="utf-8")
    sections = yaml.safe_load(text)
    ops = [op for section in ("custom", "supported") for op in sections[section] if isinstance(op, dict)]
    return frozenset(op["func"].partition("(")[0] for op in ops if op.get("impl_ns") == "acl_op")


def refuse_without_aclnn(op: torch._ops.OpOverload) -> None:
    """Refuses an op that cannot be captured."""
    name = op.name().partition("::")[2]
    if name in ops_without_aclnn():
        raise RuntimeError(f"{op.name()}: torch_npu has no aclnn kernel of this op, so no graph can hold it")


def streams_taken(graphs: Iterable[frozenset[str]]) -> int:
    """Streams that graphs take together.

    Args:
        graphs: for each graph, the names of the communicators in it.
    """
    groups_of_graphs = list(graphs)
    communicators = frozenset[str]().union(*groups_of_graphs)
    in_graphs = sum(1 + sum(STREAMS_IN_GRAPH[expansion(name)] for name in groups) for groups in groups_of_graphs)
    return in_graphs + sum(STREAMS_OF_COMMUNICATOR[expansion(name)] for name in communicators)


def refuse_too_many(graphs: Iterable[frozenset[str]]) -> None:
    """Fails as the runtime does if the device has no stream for the last of these graphs."""
    if streams_taken(graphs) > STREAMS:
        raise RuntimeError("NPU function error: aclrtCreateStream, error code is 207008: no stream resource is left")
