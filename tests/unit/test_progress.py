"""Progress of long work where nobody sees a terminal."""

import logging
import time

import pytest

from lopa_ascend.process.progress import INTERVAL, progress


@pytest.mark.parametrize("seconds", [0.01, INTERVAL / 4, 2 * INTERVAL])
def test_a_pipe_gets_a_line_now_and_then(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "lopa_ascend.process.progress")
    seen = []
    for item in progress(iter("abcdefgh"), "compiling", 8, "graph"):
        seen.append(item)
        now[0] += seconds
    assert seen == list("abcdefgh")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "compiling: 0 of 8 graphs after 0 s"
    shown = [int(line.split()[1]) for line in lines]
    assert shown == {0.01: [0], INTERVAL / 4: [0, 4], 2 * INTERVAL: [*range(8)]}[seconds]


def test_short_work_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lopa_ascend.process.progress")
    assert list(progress(range(3), "loading", 3, "tensor", delay=1)) == [0, 1, 2]
    assert not caplog.records
