"""What a release says of itself."""

import re
import subprocess
import zlib
from pathlib import Path

import lopa_ascend

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## \[(.+)\](.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    name, date = headings[0]
    assert name == "Unreleased" or (name == lopa_ascend.__version__ and re.fullmatch(r" - \d{4}-\d\d-\d\d", date))


def test_a_clone_is_as_small_as_the_readme_says():
    """Files, and what git packs of them."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    contents = [(ROOT / name).read_bytes() for name in files if (ROOT / name).is_file()]
    megabytes = sum(len(content) + len(zlib.compress(content, 1)) for content in contents) / 1e6
    (said,) = re.findall(r"git clone --depth 1 .*# (\d+) MB", (ROOT / "README.md").read_text("utf-8"))
    assert megabytes < 70
    assert abs(megabytes - int(said)) < 3
