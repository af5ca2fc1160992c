"""Of the NPUs' self-test what runs without one: its all-reduces, between two gloo ranks, and what it says then."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lopa_ascend.parallel.collectives import ALONE
from scripts.selftest.times import SIZES, SUMS, latencies
from tests.dist.ranks import ROOT, finish, start

pytestmark = pytest.mark.multirank

RANK = """
import json, sys, torch
from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.launch import Rendezvous, exit_rank
from lopa_ascend.parallel.mesh import Mesh
from scripts.selftest import times
from scripts.selftest.times import latencies

times.SIZES = times.SIZES[:6]
mesh = Mesh.join(EngineConfig(tensor_parallel_size=2), Rendezvous.from_environment(), exit_rank)
found = latencies(mesh.tp, torch.device("cpu"), 5)
calls = [(traffic.calls, traffic.num_bytes) for traffic in mesh.traffic()]
said = mesh.all_gather_text("self-test", json.dumps([mesh.rank, list(found.items()), calls]))
if mesh.rank == 0:
    open(sys.argv[1], "w").write(json.dumps([json.loads(text) for text in said]))
mesh.tp.all_reduce(torch.zeros(1), "end")  # rank 0 takes the store with it, which the other one has read by now
mesh.close()
"""


def test_all_reduces_are_timed_on_every_rank(tmp_path) -> None:
    out = tmp_path / "out.json"
    finish(start(2, "-c", RANK, str(out)))
    ranks = json.loads(out.read_text())
    assert [rank for rank, _, _ in ranks] == [0, 1]
    alone = latencies(ALONE, torch.device("cpu"), 51)  # each takes microseconds, so a busy machine may spoil a few
    for _, found, calls in ranks:
        sizes = [size for size, _ in found]
        assert sizes == list(SIZES[:6])
        assert all(micros > alone[size] for size, micros in found)
        assert calls == [[len(sizes) * 8 * SUMS, sum(sizes) * 8 * SUMS]]


def test_without_an_npu_it_says_what_is_missing() -> None:
    """Where pytest is not installed, either."""
    code = "import sys; sys.modules |= {'pytest': None}; from scripts.selftest.__main__ import main; sys.exit(main([]))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == "error: device npu needs torch_npu, which is not installed\n"
