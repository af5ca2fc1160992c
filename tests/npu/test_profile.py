"""Profiles of an engine on the simulated device, by torch_npu's own profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch_npu import npu

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import GraphParams
from lopa_ascend.engine.commands import StartProfile
from tests.npu.lab import capture, device, engine  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.tiny import write_dream

pytestmark = pytest.mark.npu
FIELDS: dict[str, Any] = {"num_branches": 1, "block_size": 8, "max_new_tokens": 24, "tau_conf": 1.0, "ignore_eos": True}


def test_a_profile_of_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins record nothing, but torch_npu writes its folder, and the parts of a step are ranges in order."""
    ranges: list[str] = []
    start = npu.mstx.range_start

    def noted(name: str, *rest: Any) -> Any:
        ranges.append(name)
        return start(name, *rest)

    monkeypatch.setattr(npu.mstx, "range_start", noted)
    model, traces = write_dream(tmp_path / "model"), tmp_path / "traces"
    options: dict[str, Any] = {"graph_window_blocks": 4, "graph_params": GraphParams(block_size=8, num_branches=1)}
    with numeric():
        llm = LLM(model, device="npu", dtype="float32", max_num_seqs=1, profile_dir=str(traces), **options)
        llm.engine.start_profile(StartProfile("p", [0], delay_steps=1, num_steps=3))
        llm.generate([[5, 3, 8]], DecodingParams(**FIELDS), quiet=True)
        (found,) = llm.engine.stop_profile()
    assert found.failure is None
    (file,) = found.files
    assert file.startswith("p/rank0_")
    assert file.endswith("_ascend_pt")
    assert (traces / file).is_dir()
    launch = ranges.index("launch", ranges.index("ProfilerStep#0"))
    assert ranges[launch - 1 : launch + 2] == ["inputs", "launch", "update"]
    assert "absorb" in ranges[launch:]
