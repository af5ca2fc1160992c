"""Where the ranks of replicas run; without Ray."""

import pytest

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.serve.replicas.placement import actor_options, check_room, place

NODE_OF_16 = [16.0]


def npu(tp: int, bp: int) -> EngineConfig:
    return EngineConfig(device="npu", tensor_parallel_size=tp, branch_parallel_size=bp)


@pytest.mark.parametrize(
    ("tp", "bp", "nodes", "per_node", "number"),
    [
        (1, 1, [16.0], 1, 1),
        (4, 4, [16.0], 16, 1),
        (4, 8, [16.0, 16.0], 16, 2),
        (4, 6, [16.0, 16.0], 12, 2),
        (4, 7, [16.0] * 8, 4, 7),
        (16, 2, [8.0, 16.0, 16.0], 16, 2),
    ],
)
def test_nodes_get_whole_tensor_parallel_groups(tp: int, bp: int, nodes: list[float], per_node: int, number: int):
    placement = place(npu(tp, bp), nodes)
    assert (placement.per_node, placement.nodes) == (per_node, number)
    if tp * bp == 1:
        assert placement.options() == {}
        return
    assert placement.options() == {
        "placement_group_bundles": [{"NPU": float(per_node)}] * number,
        "placement_group_strategy": "STRICT_PACK" if number == 1 else "STRICT_SPREAD",
    }


def test_a_tensor_parallel_group_never_crosses_nodes():
    with pytest.raises(ParameterError, match="need 32 NPU on one node, and the largest node of the cluster has 16"):
        place(npu(32, 1), [16.0, 16.0])


def test_a_rank_takes_a_die_or_its_threads():
    assert actor_options(npu(1, 1)) == {"num_cpus": 0, "resources": {"NPU": 1}}
    assert actor_options(EngineConfig(threads=3)) == {"num_cpus": 3}
    assert place(EngineConfig(threads=3, branch_parallel_size=2), [4.0, 4.0]).nodes == 2


@pytest.mark.parametrize(
    ("tp", "bp", "replicas", "nodes", "fits"),
    [
        (1, 1, 16, [16.0], True),
        (1, 1, 17, [16.0], False),
        (4, 2, 2, [12.0, 8.0], True),
        (4, 2, 3, [12.0, 12.0], False),  # room for 24, in no pieces of 8
        (4, 8, 2, [16.0] * 4, True),
        (4, 8, 2, [16.0] * 3, False),
    ],
)
def test_what_does_not_fit_is_refused(tp: int, bp: int, replicas: int, nodes: list[float], fits: bool):
    wanted = [(place(npu(tp, bp), nodes), replicas)]
    if fits:
        check_room(wanted, nodes)
        return
    message = f"want {tp * bp * replicas} NPU, and the cluster has {sum(nodes):g} on {len(nodes)} node"
    with pytest.raises(ParameterError, match=message):
        check_room(wanted, nodes)
