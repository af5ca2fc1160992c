"""Where the ranks of a replica run. Ray keeps each bundle of a placement group on one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.config import EngineConfig, ParameterError

RESOURCES = {"cpu": "CPU", "npu": "NPU", "cuda": "GPU"}
"""By device: what Ray calls that of which a rank needs some."""


def rank_needs(config: EngineConfig) -> int:
    """How much of the device's resource one rank takes: a die or a GPU, or as many cores as it has threads."""
    return (config.threads or 1) if config.device == "cpu" else 1


def actor_options(config: EngineConfig) -> dict[str, Any]:
    """What Ray must keep for the actor of one rank."""
    if config.device == "cpu":
        return {"num_cpus": rank_needs(config)}
    if config.device == "cuda":
        return {"num_cpus": 0, "num_gpus": rank_needs(config)}
    return {"num_cpus": 0, "resources": {RESOURCES[config.device]: rank_needs(config)}}


@dataclass(frozen=True)
class ReplicaPlacement:
    """How the ranks of one replica are spread over nodes: rank r belongs to bundle r // ``per_node``."""

    per_node: int
    """Ranks on each node, whole tensor-parallel groups."""
    nodes: int
    resource: str
    needs: int
    """Of the resource, for each rank."""

    def options(self) -> dict[str, Any]:
        """The options of the deployment that place its replicas."""
        if self.per_node * self.nodes == 1:
            return {}
        bundle = {self.resource: float(self.per_node * self.needs)}
        strategy = "STRICT_PACK" if self.nodes == 1 else "STRICT_SPREAD"
        return {"placement_group_bundles": [bundle] * self.nodes, "placement_group_strategy": strategy}


def place(config: EngineConfig, nodes: Sequence[float]) -> ReplicaPlacement:
    """Puts the ranks of a replica on as few nodes as can be, with the same number on each.

    Args:
        config: the replica's engine.
        nodes: how much of the device's resource each node has.

    Raises:
        ParameterError: a tensor-parallel group is larger than every node.
    """
    tp, bp = config.tensor_parallel_size, config.branch_parallel_size
    resource, needs = RESOURCES[config.device], rank_needs(config)
    largest = max(nodes, default=0)
    for parts in range(1, bp + 1):
        if bp % parts == 0 and bp // parts * tp * needs <= largest:
            return ReplicaPlacement(bp // parts * tp, parts, resource, needs)
    raise ParameterError(
        "tensor_parallel_size",
        f"{tp} ranks that split a forward pass need {tp * needs} {resource} on one node, and the largest node of the "
        f"cluster has {largest:g}; a tensor-parallel group never crosses nodes",
    )


def check_room(placements: Sequence[tuple[ReplicaPlacement, int]], nodes: Sequence[float]) -> None:
    """Refuses more replicas than the cluster has room for.

    Args:
        placements: of each model how a replica is placed, and how many replicas there are.
        nodes: how much of the resource each node has.

    Raises:
        ParameterError: they do not fit.
    """
    free = sorted(nodes, reverse=True)
    for placement, replicas in placements:
        share = placement.per_node * placement.needs
        for _ in range(replicas):
            free.sort(reverse=True)
            for node in range(placement.nodes):
                if node >= len(free) or free[node] < share:
                    wanted = sum(p.per_node * p.nodes * p.needs * count for p, count in placements)
                    raise ParameterError(
                        "replicas",
                        f"want {wanted} {placement.resource}, and the cluster has {sum(nodes):g} on {len(nodes)} "
                        f"node(s): {replicas} replica(s) of {placement.nodes} x {share} do not fit",
                    )
                free[node] -= share
