"""Counts the project: lines of code and words of documents by room, flags and decoding parameters.

    python -m ci.size                    the work tree
    python -m ci.size --base COMMIT      a commit, the work tree, and the difference
    python -m ci.size --check            fails if the work tree is larger than ci/sizes.json says
    python -m ci.size --record           writes ci/sizes.json

Prints a Markdown table. "text" are lines of templates and of other text that is neither code nor data. A commit that
lets a room grow records it, and says why in its message.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lopa_ascend.config.settings import HelpFormatter

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {"py": (".py",), "cpp": (".cpp", ".c", ".h"), "sh": (".sh",), "text": (".txt", ".yaml"), "words": (".md",)}
"""By column, the endings of the files that are counted in it."""
SURFACE = "tests/data/public_surface.json"
"""The file in which the flags and parameters are listed."""
RECORD = "ci/sizes.json"
"""The sizes that nothing may exceed, and the commit on which they were recorded."""
NO_SETTING = {"-h", "--help-all", "--version"}

Sizes = dict[str, Counter[str]]
"""By room, and in it by column."""


def files_of(commit: str | None) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of the files of a commit, or of the work tree; links are left out."""
    if commit is not None:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
            for member in archive:
                if member.isfile() and (content := archive.extractfile(member)):
                    yield member.name, content.read()
        return
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    for name in sorted({*listed} - {""}):
        if (file := ROOT / name).is_file() and not file.is_symlink():
            yield name, file.read_bytes()


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def room_of(name: str) -> str:
    """The room of a file: a folder of lopa_ascend/, scripts/ or tests/, or another folder of the top."""
    folders = PurePosixPath(name).parts[:-1]
    if folders[:1] in (("graph",), ("parallel",)):  # where these packages were at first
        folders = ("lopa_ascend", *folders)
    depth = 2 if folders[:1] in (("lopa_ascend",), ("scripts",), ("tests",)) else 1
    return "/".join(folders[:depth]) or "top folder"


def count(commit: str | None) -> tuple[Sizes, Counter[str]]:
    """What a commit, or the work tree, has in each room and in all, and how many settings."""
    sizes: Sizes = {"all": Counter()}
    settings: Counter[str] = Counter()
    column_of = {ending: column for column, endings in COLUMNS.items() for ending in endings}
    for name, content in files_of(commit):
        column = column_of.get(PurePosixPath(name).suffix)
        if column is not None:
            amount = len(content.split()) if column == "words" else content.count(b"\n")
            for room in (room_of(name), "all"):
                sizes.setdefault(room, Counter())[column] += amount
        if name == SURFACE:
            surface = json.loads(content)
            settings["flags of the server"] = len(surface["flags"].keys() - NO_SETTING)
            settings["decoding parameters"] = len(surface["dataclasses"]["DecodingParams"]["fields"])
    return sizes, settings


def table(after: Sizes, before: Sizes | None) -> str:
    """A row for each room; cells are numbers, or "before > after (difference)"."""
    rows = [["room", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
    for room in sorted(after.keys() | (before or {}).keys(), key=lambda room: (room == "all", room)):
        now = after.get(room, Counter())
        then = now if before is None else before.get(room, Counter())
        rows.append([room, *(cell(now[column], then[column]) for column in COLUMNS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(now: int, then: int) -> str:
    if then == now:
        return f"{now:,}" if now else ""
    return f"{then:,} > {now:,} ({now - then:+,})"


def limited(sizes: Sizes, settings: Counter[str]) -> dict[str, int]:
    """What may not grow unsaid: lines of the rooms of the library and of scripts/, words of documents, settings."""
    rooms = {
        room: columns["py"] + columns["cpp"]
        for room, columns in sorted(sizes.items())
        if room.startswith(("lopa_ascend", "scripts")) and columns["py"]
    }
    return {**rooms, "words of documents": sizes["all"]["words"], **settings}


def grown(now: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """What exceeds the record, in words."""
    return [
        f"{name}: {recorded.get(name, 0):,} recorded, {number:,} now"
        for name, number in now.items()
        if number > recorded.get(name, 0)
    ]


def check_record() -> int:
    """The exit status."""
    recorded = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))["sizes"]
    found = grown(limited(*count(None)), recorded)
    if found:
        print("\n".join(found), file=sys.stderr)
        advice = "shorten it, or run python -m ci.size --record and say in the commit's message why it must grow"
        print(f"larger than {RECORD}: {advice}", file=sys.stderr)
    return int(bool(found))


def write_record() -> None:
    since = _git("rev-parse", "HEAD").decode().strip()
    text = json.dumps({"since": since, "sizes": limited(*count(None))}, indent=1)
    (ROOT / RECORD).write_text(f"{text}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.size", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--base", metavar="COMMIT", help="compare the work tree with this commit")
    parser.add_argument("--check", action="store_true", help=f"compare the work tree with {RECORD} alone")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD}")
    arguments = parser.parse_args()
    if arguments.record:
        write_record()
    if arguments.check or arguments.record:
        return check_record()
    base: str | None = arguments.base
    before, settings_before = count(base) if base is not None else (None, None)
    after, settings = count(None)
    print(table(after, before))
    for name, number in settings.items():
        print(f"\n{name}: {cell(number, number if settings_before is None else settings_before[name])}", end="")
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
