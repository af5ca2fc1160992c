"""ci.size: what it counts, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import size


def test_a_room_is_a_folder():
    assert size.room_of("README.md") == "top folder"
    assert size.room_of("docs/images/a.md") == "docs"
    assert size.room_of("scripts/serve.sh") == "scripts"
    assert size.room_of("lopa_ascend/backend/cpu/native/rows.cpp") == "lopa_ascend/backend"


def new_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)

    monkeypatch.setattr(size, "ROOT", root)
    surface = root / size.SURFACE
    surface.parent.mkdir(parents=True)
    surface.write_text('{"flags": {"-h": 0, "--port": 0}, "dataclasses": {"DecodingParams": {"fields": ["a", "b"]}}}')
    return git


def test_what_a_commit_and_the_work_tree_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git = new_repository(tmp_path, monkeypatch)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("three short words\n")
    (tmp_path / "a.py").write_text("1\n2\n")
    (tmp_path / "link.py").symlink_to("a.py")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "a.py").unlink()
    (tmp_path / "b.sh").write_text("1\n")
    before, settings = size.count("HEAD")
    after, _ = size.count(None)
    assert before == {"all": Counter(py=2, words=3), "top folder": Counter(py=2), "docs": Counter(words=3)}
    assert after == {"all": Counter(sh=1, words=3), "top folder": Counter(sh=1), "docs": Counter(words=3)}
    assert settings == {"flags of the server": 1, "decoding parameters": 2}
    assert size.table(after, before).splitlines()[2:] == [
        "| docs |  |  |  |  | 3 |",
        "| top folder | 2 > 0 (-2) |  | 0 > 1 (+1) |  |  |",
        "| all | 2 > 0 (-2) |  | 0 > 1 (+1) |  | 3 |",
    ]


def test_a_room_that_grows_must_be_recorded(tmp_path: Path, monkeypatch, capsys):
    git = new_repository(tmp_path, monkeypatch)
    (tmp_path / "ci").mkdir()
    room = tmp_path / "lopa_ascend" / "kv"
    room.mkdir(parents=True)
    (room / "pages.py").write_text("1\n2\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")

    def status(option: str) -> int:
        monkeypatch.setattr(sys, "argv", ["size", option])
        return size.main()

    assert status("--record") == 0
    (room / "pages.py").write_text("1\n")
    assert status("--check") == 0
    (room / "pool.py").write_text("1\n2\n")
    assert status("--check") == 1
    assert "lopa_ascend/kv: 2 recorded, 3 now" in capsys.readouterr().err
    assert status("--record") == 0
    assert status("--check") == 0
