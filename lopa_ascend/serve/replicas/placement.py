"""Where the ranks of a replica run. Ray keeps each bundle of a placement group on one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.backend import find_device
from lopa_ascend.config import EngineConfig, ParameterError

OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Resources that have an option of Ray's."""


def actor_options(config: EngineConfig) -> dict[str, Any]:
    """What Ray keeps for the actor of one rank."""
    device = find_device(config.device)
    resource, needs = device.resource, device.rank_needs(config)
    return {"num_cpus": 0} | ({OPTIONS[resource]: needs} if resource in OPTIONS else {"resources": {resource: needs}})


@dataclass(frozen=True)
class ReplicaPlacement:
    """How the ranks of a replica are spread: rank r belongs to bundle r // ``per_node``."""

    per_node: int
    """Ranks on each node, whole tensor-parallel groups."""
    nodes: int
    resource: str
    needs: int
    """Of the resource, for each rank."""

    def options(self) -> dict[str, Any]:
        """Of the deployment."""
        if self.per_node * self.nodes == 1:
            return {}
        bundle = {self.resource: float(self.per_node * self.needs)}
        strategy = "STRICT_PACK" if self.nodes == 1 else "STRICT_SPREAD"
        return {"placement_group_bundles": [bundle] * self.nodes, "placement_group_strategy": strategy}


def place(config: EngineConfig, nodes: Sequence[float]) -> ReplicaPlacement:
    """Puts a replica's ranks on as few nodes as can be, the same number on each. ``nodes``: how much of the device's
    resource each has. Raises ParameterError if a tensor-parallel group is larger than every node."""
    tp, bp = config.tensor_parallel_size, config.branch_parallel_size
    device = find_device(config.device)
    resource, needs = device.resource, device.rank_needs(config)
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
    """Raises ParameterError for more replicas, given by model, than the cluster has room for."""
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
