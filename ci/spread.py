"""Measures how far a change spreads: the library files, rooms and hunks that it touches outside its own room.

    python -m ci.spread MERGE                a merge, or any other commit, against its first parent
    python -m ci.spread BASE..BRANCH         a range; BASE...BRANCH begins where the branch left BASE
    python -m ci.spread MERGE MERGE          several changes, and all of them together: a feature merged in parts
    python -m ci.spread --own decode MERGE   the change belongs to decode/
    python -m ci.spread --hotspots 300       files by commits x lines, of the last 300 commits to the library
    python -m ci.spread --hotspots COMMIT    of those since COMMIT
    python -m ci.spread --check              fails if a commit since ci/sizes.json was recorded spreads too far unsaid

A room is a folder of lopa_ascend/ or of lopa_ascend/serve/; the modules at the top are the room "top". A change belongs
to the room that gets most of its added lines. A hunk is a run of changed lines. What was only renamed is not touched.
A commit that adds more lines than it removes and touches more than 12 files or 4 rooms outside its own says why in a
line "Rooms: ...".

Prints Markdown tables; one change is listed by room, with its hunks in each file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lopa_ascend.config.settings import HelpFormatter

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "lopa_ascend"
DIFF = ("diff", "-M", "-U0", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
MOST_FILES, MOST_ROOMS = 12, 4
"""That a commit may touch outside its own room without a reason."""
Row = list[object]


class Change(NamedTuple):
    hunks: Counter[str]  # by file, under its new name
    added: Counter[str]  # lines by room


def _git(*arguments: str) -> str:
    command = ["git", "-c", "core.quotePath=false", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    return done.stdout if done.returncode == 0 else sys.exit(done.returncode)  # git has said why


def room_of(name: str) -> str:
    folders = PurePosixPath(name).parts[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ("serve",) else 1]) or "top"


def read(changes: list[str]) -> Change:
    """What commits and ranges change, all together."""
    hunks_of: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for change in changes:
        patch = _git(*DIFF, change if ".." in change else f"{change}^1..{change}", "--", LIBRARY)
        # The lines of files have a sign before them, so only headers begin with these words.
        for file in re.split(r"^diff --git ", patch, flags=re.M)[1:]:
            header, *hunks = re.split(r"^@@ .*\n", file, flags=re.M)
            if hunks:
                name = re.findall(r"^(?:--- a|\+\+\+ b)/(.*?)\t?$", header, flags=re.M)[-1]
                hunks_of[name] += len(hunks)
                added[room_of(name)] += sum(len(re.findall(r"^\+", hunk, flags=re.M)) for hunk in hunks)
    return Change(hunks_of, added)


def row(title: str, change: Change, own: str | None) -> Row:
    """Own room and its files; files, rooms and hunks outside it."""
    own = own or max(change.added, key=change.added.__getitem__, default="none")
    outside = {name: hunks for name, hunks in change.hunks.items() if room_of(name) != own}
    num_own = len(change.hunks) - len(outside)
    return [title, own, num_own, len(outside), len({*map(room_of, outside)}), sum(outside.values())]


def rooms_of(change: Change) -> list[Row]:
    """Room, added lines, and files with their hunks."""
    texts: dict[str, list[str]] = {}
    for name, hunks in sorted(change.hunks.items()):
        texts.setdefault(room_of(name), []).append(f"{name.removeprefix(LIBRARY + '/')} {hunks}")
    return [[room, change.added[room], ", ".join(files)] for room, files in sorted(texts.items())]


def unexplained() -> int:
    """Checks the commits since the record of sizes. The exit status."""
    since = json.loads((ROOT / "ci" / "sizes.json").read_text(encoding="utf-8"))["since"]
    known = subprocess.run(["git", "merge-base", "--is-ancestor", since, "HEAD"], cwd=ROOT, capture_output=True)
    if known.returncode:
        print(f"not checked: this copy has no history since {since[:8]}")
        return 0
    wide = []
    for commit in _git("rev-list", "--no-merges", f"{since}..HEAD").split():
        _, own, _, files, rooms, _ = row(commit, read([commit]), None)
        assert isinstance(files, int)
        assert isinstance(rooms, int)
        if (files > MOST_FILES or rooms > MOST_ROOMS) and _grows(commit):
            message = _git("log", "-1", "--format=%B", commit)
            if not re.search(r"^Rooms: \S", message, flags=re.M):
                wide.append(f"{commit[:8]} of {own}: {files} files in {rooms} rooms: {message.splitlines()[0]}")
    if wide:
        print("\n".join(wide), file=sys.stderr)
        print('commits that spread far; say why in a line "Rooms: ..." of their messages', file=sys.stderr)
    return int(bool(wide))


def _grows(commit: str) -> bool:
    counts = re.findall(r"^(\d+)\t(\d+)\t", _git("show", "--numstat", "--format=", commit, "--", LIBRARY), flags=re.M)
    return sum(int(added) - int(removed) for added, removed in counts) > 0


def hotspots(since: str) -> list[Row]:
    """Files of the work tree, the highest product first."""
    commits: Counter[str] = Counter()
    name_now: dict[str, str] = {}
    wanted = f"-{since}" if since.isdecimal() and len(since) < 7 else f"{since}.."  # a short name has 7 digits
    log = _git("log", "-M", "--no-merges", "--name-status", "--format=", wanted, "--", LIBRARY)
    for status, *names in (line.split("\t") for line in log.splitlines() if line):  # the newest commit first
        name_now[names[0]] = name = name_now.get(names[-1], names[-1])
        commits[name] += status != "R100"
    contents = {name: (ROOT / name).read_bytes() for name in commits if (ROOT / name).is_file()}
    lines = {name: content.count(b"\n") for name, content in contents.items() if b"\0" not in content}
    ordered = sorted(lines, key=lambda name: (-commits[name] * lines[name], name))
    return [[name, commits[name], lines[name], commits[name] * lines[name]] for name in ordered]


def table(head: Row, rows: list[Row]) -> str:
    rows = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.spread", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="RANGE_OR_MERGE", help="commits or ranges, as git names them")
    parser.add_argument("--own", metavar="ROOM", help="the room that the changes belong to, such as serve/api")
    parser.add_argument("--hotspots", metavar="N|COMMIT", help="list files by commits x lines instead")
    parser.add_argument("--check", action="store_true", help="check the commits since ci/sizes.json was recorded")
    asked = parser.parse_args()
    if sum(map(bool, (asked.changes, asked.hotspots, asked.check))) != 1:
        parser.error("name changes, or use --hotspots or --check")
    if asked.check:
        return unexplained()
    if asked.own and asked.own != "top" and not (ROOT / LIBRARY / asked.own).is_dir():
        parser.error(f"--own: there is no {LIBRARY}/{asked.own}")
    if asked.hotspots:
        print(table(["file", "commits", "lines", "commits x lines"], hotspots(asked.hotspots)[:25]))
        return 0
    rows = [row(change, read([change]), asked.own) for change in asked.changes]
    together = read(asked.changes)
    if len(rows) > 1:
        rows.append(row("together", together, asked.own))
    print(table(["change", "own room", "its files", "files outside", "rooms", "hunks"], rows))
    if len(rows) == 1:
        print("\n" + table(["room", "lines added", "files, and the hunks of each"], rooms_of(together)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
