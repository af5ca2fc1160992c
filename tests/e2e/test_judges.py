"""The judges that need no tools, in short, against the bundled model."""

from pathlib import Path
from typing import Any

import pytest

from scripts.judge import faults, fuzz, kill, soak, starve
from scripts.judge.report import Options, Report


@pytest.mark.parametrize(
    ("judge", "amount"),
    [
        pytest.param(faults.judge, {"hostile": 0, "good": 12}, id="faults"),  # one of each kind
        pytest.param(faults.judge, {"hostile": 400, "good": 24}, id="more-faults", marks=pytest.mark.slow),
        pytest.param(fuzz.judge, {"fuzz_seconds": 3.0}, id="fuzz"),
        pytest.param(fuzz.judge, {"fuzz_seconds": 120.0}, id="more-fuzz", marks=pytest.mark.slow),
        pytest.param(starve.judge, {}, id="starve", marks=pytest.mark.slow),
        pytest.param(kill.judge, {}, id="kill", marks=pytest.mark.slow),
        pytest.param(soak.judge, {"minutes": 0.5}, id="soak", marks=pytest.mark.slow),
    ],
)
def test_judge_is_content(judge, amount: dict[str, Any], tmp_path: Path):
    report = Report()
    judge(Options(out=tmp_path, **amount), report)
    # Half a minute says nothing about memory: its pages are touched for the first time.
    assert [what for what in report.failed if not what.startswith("growth")] == []
