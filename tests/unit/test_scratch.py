"""Temporary folders do not outlive their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lopa_ascend.process.scratch import ScratchFolder, remove_abandoned

KILLED = """
import os, signal
from lopa_ascend.process.scratch import ScratchFolder
folder = ScratchFolder()
(folder.path / "file").write_text("x")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_when_it_is_closed_or_its_process_ends(temporary: Path):
    folder = ScratchFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    subprocess.run(
        [sys.executable, "-c", "import lopa_ascend.process.scratch as s; kept = s.ScratchFolder()"], check=True
    )
    assert list(temporary.iterdir()) == []


def test_the_folders_of_killed_processes_are_removed_and_no_others(temporary: Path):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (abandoned,) = temporary.iterdir()
    used = ScratchFolder()
    (temporary / "lopa-scratch-of-mine").mkdir()
    other = temporary / "other"
    other.mkdir()
    (temporary / "lopa-scratch-00000000").symlink_to(other)
    remove_abandoned()
    assert not abandoned.exists()
    assert used.path.exists()
    assert other.exists()
    assert sorted(os.listdir(temporary)) == sorted(
        [used.path.name, "lopa-scratch-of-mine", "other", "lopa-scratch-00000000"]
    )
