"""Collectives that fail, or would wait too long."""

from datetime import timedelta

import pytest
import torch

from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel import mesh
from lopa_ascend.parallel.collectives import MAX_REASON, Group, Ledger, RankError
from lopa_ascend.types import Traffic


def test_a_failure_shows_what_the_communication_library_said():
    group = Group()
    with pytest.raises(RankError) as caught, group._counted(torch.zeros(1), "layers"):
        raise RuntimeError("EI0006: getting socket times out.\n  Reason: " + "x" * 1000)
    message = str(caught.value)
    start = "the ranks' exchange of layers failed: a rank does not answer (EI0006: getting socket times out. Reason: xx"
    assert message.startswith(start)
    assert len(message) < len(start) + MAX_REASON


def test_a_failure_of_another_rank_is_shown_in_its_place() -> None:
    group = Group(explain=lambda: "rank 1 has ended")
    with pytest.raises(RankError) as caught, group._counted(torch.zeros(1), "layers"):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value) == "the ranks' exchange of layers failed: rank 1 has ended"


@pytest.mark.parametrize(("own", "expected"), [("", 91), ("300", 300)])
def test_hccl_waits_as_long_as_the_engine(monkeypatch: pytest.MonkeyPatch, own: str, expected: int) -> None:
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", own)
    config = EngineConfig(device="npu", tensor_parallel_size=2, distributed_timeout_seconds=90.5)
    assert mesh.exec_timeout(config) == expected
    assert mesh.creation_timeout("hccl", timedelta(), 5000) > timedelta(seconds=5000)


def test_a_ledger_can_pause() -> None:
    ledger = Ledger()
    ledger.add("layers", 4)
    with ledger.paused():
        ledger.add("layers", 8)
        ledger.add("branches", 1)
    assert ledger.traffic() == (Traffic("layers", 1, 4),)
