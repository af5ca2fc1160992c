"""ci.spread: what a change touches outside its own room, and the files that changes meet in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import spread


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *who, *arguments], cwd=tmp_path, text=True).strip()

    monkeypatch.setattr(spread, "ROOT", tmp_path)
    run("init", "-q")
    return run


def write(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        file = root / "lopa_ascend" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["spread", *arguments])
    spread.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line]
    return [row for row in rows if row[0] not in ("---", "change", "file", "room")]


@pytest.fixture
def history(git, tmp_path: Path) -> str:
    """A merged feature of decode/, after which one file has changed again; the commit before it."""
    names = ("llm.py", "core.py", "decode/old.py", "serve/app.py", "serve/http/body.py", "kv/pages.py", "kv/moved.py")
    texts = {name: "".join(f"{name} {number}\n" for number in range(20)) for name in names}
    write(tmp_path, texts)
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")
    git("checkout", "-qb", "feature")
    git("mv", "lopa_ascend/kv/moved.py", "lopa_ascend/kv/pool.py")  # touches nothing
    git("mv", "lopa_ascend/decode/old.py", "lopa_ascend/decode/new.py")
    looks_like_headers = "++ b/lopa_ascend/kv/pages.py\n@@ -1 +1 @@\n"
    write(
        tmp_path,
        {
            "decode/new.py": texts["decode/old.py"] + looks_like_headers,
            "decode/added.py": "new\n" * 9,
            "llm.py": texts["llm.py"].replace("llm.py 3\n", "").replace("llm.py 17\n", ""),
            "serve/app.py": texts["serve/app.py"].replace(" 5\n", " five\n"),
            "serve/http/body.py": "-- a\n" + texts["serve/http/body.py"],
        },
    )
    (tmp_path / "lopa_ascend" / "core.py").unlink()
    git("add", ".")
    git("commit", "-qm", "feature")
    git("checkout", "-q", first)
    write(tmp_path, {"kv/pages.py": "beside the feature\n"})
    git("commit", "-qam", "other")
    git("merge", "-q", "--no-ff", "-m", "merge", "feature")
    write(tmp_path, {"decode/new.py": texts["decode/old.py"]})
    git("commit", "-qam", "later")
    return first


def test_a_merge_is_measured_against_its_first_parent(history, monkeypatch, capsys):
    row, *rooms = printed(monkeypatch, capsys, "HEAD^")
    assert row == ["HEAD^", "decode", "2", "4", "3", "5"]
    assert rooms == [
        ["decode", "11", "decode/added.py 1, decode/new.py 1"],
        ["serve", "1", "serve/app.py 1"],
        ["serve/http", "1", "serve/http/body.py 1"],
        ["top", "0", "core.py 1, llm.py 2"],
    ]


def test_ranges_and_several_changes(history, monkeypatch, capsys):
    rows = printed(monkeypatch, capsys, "--own", "kv", "HEAD^", f"{history}..HEAD", f"HEAD...{history}")
    assert rows == [
        ["HEAD^", "kv", "0", "6", "4", "7"],
        [f"{history}..HEAD", "kv", "1", "5", "4", "6"],
        [f"HEAD...{history}", "kv", "0", "0", "0", "0"],
        ["together", "kv", "1", "6", "4", "13"],
    ]


def test_hotspots_follow_renames(history, monkeypatch, capsys):
    pages, body = ["lopa_ascend/kv/pages.py", "1", "1", "1"], ["lopa_ascend/serve/http/body.py", "2", "21", "42"]
    rows = printed(monkeypatch, capsys, "--hotspots", "300")
    assert rows[0] == ["lopa_ascend/decode/new.py", "3", "20", "60"]
    assert body in rows
    assert ["lopa_ascend/kv/pool.py", "1", "20", "20"] in rows
    assert not any(row[0].endswith(("core.py", "old.py", "moved.py")) for row in rows)
    assert pages in printed(monkeypatch, capsys, "--hotspots", history)


def test_what_is_not_there_is_refused(history, monkeypatch, capsys):
    for arguments in (["--own", "nowhere", "HEAD"], ["absent"], [], ["--hotspots", "3", "HEAD"]):
        with pytest.raises(SystemExit) as error:
            printed(monkeypatch, capsys, *arguments)
        assert error.value.code


def test_a_commit_that_spreads_far_says_why(git, tmp_path: Path, monkeypatch, capsys):
    rooms = ("decode", "engine", "graph", "kv", "model", "text")
    write(tmp_path, {f"{room}/a.py": "1\n" for room in rooms})
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "ci").mkdir()
    record = tmp_path / "ci" / "sizes.json"
    record.write_text(f'{{"since": "{git("rev-parse", "HEAD")}"}}')
    monkeypatch.setattr(sys, "argv", ["spread", "--check"])

    write(tmp_path, {f"{room}/a.py": "2\n" for room in rooms})
    git("commit", "-qam", "a change that adds nothing")
    assert spread.main() == 0
    write(tmp_path, {f"{room}/a.py": "2\n3\n" for room in rooms})
    git("commit", "-qam", "a feature")
    assert spread.main() == 1
    assert "5 files in 5 rooms: a feature" in capsys.readouterr().err
    git("commit", "-q", "--amend", "-m", "a feature\n\nRooms: each has its own form of it")
    assert spread.main() == 0
    record.write_text('{"since": "0123456789"}')
    assert spread.main() == 0
    assert "not checked" in capsys.readouterr().out
