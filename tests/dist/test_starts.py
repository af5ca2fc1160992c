"""Starts of `LLM` that break off: no rank goes on by itself, and another start works."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, llm
from tests.tiny import write_dream, write_tokenizer

pytestmark = pytest.mark.multirank


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The ranks that the engine starts; the third one cannot be started."""
    ranks: list[subprocess.Popen[bytes]] = []
    start: Any = subprocess.Popen

    def noted(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        if "lopa_ascend.engine.follower" not in command:
            return start(command, **options)
        if len(ranks) == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        ranks.append(start(command, **options))
        return ranks[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return ranks


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_dream(tmp_path)
    write_tokenizer(tmp_path)
    return str(tmp_path)


def test_ranks_end_if_a_later_one_cannot_be_started(path: str, started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(OSError, match="temporarily unavailable"):
        LLM(path, branch_parallel_size=4, threads=1)
    assert [rank.poll() is not None for rank in started] == [True, True]


def test_ranks_end_if_what_follows_their_start_is_interrupted(
    path: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm, "load_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LLM(path, branch_parallel_size=2, threads=1)
    assert started[0].wait(timeout=60) is not None
    with LLM(path, branch_parallel_size=2, threads=1) as second:
        assert second.engine.config.world_size == 2
