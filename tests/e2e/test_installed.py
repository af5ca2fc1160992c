"""What `pip install` of a release gives: a wheel, built here from an sdist, in an environment of its own that sees the
dependencies of this one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lopa_ascend
from lopa_ascend.backend.cpu.processor import int8_instructions
from tests.e2e.conftest import ROOT, ServerProcess, running

NOT_INSTALLED = (".cpp", ".h")
READ_ONLY = r"""
while read -r _ target _; do
    [ "$target" = /proc ] || mount -o remount,bind,ro "$target" 2>/dev/null || true
done </proc/self/mounts
mount -t tmpfs tmpfs "$TMPDIR"
for folder in "$HOME" "$PWD" /tmp /dev/shm; do
    if touch "$folder/probe" 2>/dev/null; then echo "$folder can be written to" >&2 && exit 1; fi
done
exec unshare --user --map-user=1000 --map-group=1000 "$@"
"""
"""Runs a command without root and with a file system that cannot be written to, but for the temporary directory."""
CONFINED = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", READ_ONLY, "sh")
MISTAKES = """
count: int = output.text
llm.generate(1)
llm.no_such_method()
"""


def python(*arguments: str, cwd: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        (sys.executable, *arguments), cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not one of pytest's, where another user may not look."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """Built as in a clone, but without what git ignores."""
    source = folder / "source"
    shutil.copytree(ROOT / "lopa_ascend", source / "lopa_ascend", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "graph", "parallel"):
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    python("setup.py", "sdist", "--formats", "tar", "--dist-dir", "..", cwd=source)
    (sdist,) = folder.glob("*.tar")
    quick = "--config-settings=--build-option=--compression=stored"
    python("-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", quick, str(sdist), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel, and a file that leads to the dependencies."""
    venv = folder / "venv"
    python("-m", "venv", "--without-pip", str(venv), cwd=folder)
    target = str(venv / "bin/python")
    python("-m", "pip", "--python", target, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    (site,) = venv.glob("lib/python3*/site-packages")
    lines = (f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages"))
    (site / "dependencies.pth").write_text("".join(lines))
    return venv


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory that has only a module which must not be imported."""
    if sys.version_info >= (3, 11):
        (tmp_path / "lopa_ascend.py").write_text("raise ImportError('this is not the installed package')")
    return tmp_path


def ask(server: ServerProcess) -> str:
    question = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"
    body = {"messages": [{"role": "user", "content": question}]}
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_the_wheel_has_what_the_package_has(wheel: Path):
    listed = subprocess.check_output(["git", "ls-files", "lopa_ascend"], cwd=ROOT, text=True).splitlines()
    wanted = {name for name in listed if not name.endswith(NOT_INSTALLED)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith(".so")}
        metadata = {name.partition(".dist-info/")[2] for name in names - wanted}
    assert wanted <= names
    assert metadata == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def test_lopa_serve_answers_in_an_empty_directory(environment: Path, elsewhere: Path):
    command = (str(environment / "bin/lopa-serve"),)
    shown = subprocess.check_output([*command, "--help"], cwd=elsewhere, text=True, timeout=60)
    assert shown.startswith("usage: lopa-serve ")
    assert "\n  lopa-serve --" in shown
    assert "python -m" not in shown
    with running("--dtype", "bfloat16", command=command, cwd=elsewhere, env={"PYTHONPATH": ""}) as server:
        assert "47" in ask(server)
        assert server.http.get("/version").json() == {"version": lopa_ascend.__version__}
        assert "<title>" in server.http.get("/", headers={"Accept": "text/html"}).text
        mapped = Path(f"/proc/{server.engine_pid}/maps").read_text()
        is_compiled = shutil.which("g++") is not None and int8_instructions() is not None
        assert ("site-packages/lopa_ascend/backend/cpu/native/compiled.abi3.so" in mapped) == is_compiled


def test_it_needs_no_root_and_writes_to_the_temporary_directory_alone(
    environment: Path, elsewhere: Path, request: pytest.FixtureRequest
):
    """As in the container of scripts/deploy/compose.yaml and cpu.yaml."""
    scratch = tempfile.TemporaryDirectory()  # the folder of the test has a path that is too long for a socket
    request.addfinalizer(scratch.cleanup)
    env = {"PYTHONPATH": "", "TMPDIR": scratch.name, "HOME": str(elsewhere)}
    tried = subprocess.run(
        [*CONFINED, "id", "-u"], cwd=elsewhere, env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    if tried.returncode:
        pytest.skip(f"this system lets nobody make a file system read-only: {tried.stderr}")
    assert tried.stdout == "1000\n"
    with running(prefix=CONFINED, command=(str(environment / "bin/lopa-serve"),), cwd=elsewhere, env=env) as server:
        assert "47" in ask(server)
        status, log = server.stop(signal.SIGTERM)
    assert status == 0
    assert not re.search("warn|read-only|denied|permi", log.lower()), log


@pytest.mark.slow
def test_a_stranger_gets_types(environment: Path, elsewhere: Path):
    """mypy --strict on the Python of README.md, which is right, and on mistakes."""
    (text,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (elsewhere / "stranger.py").write_text(text)
    (elsewhere / "mistaken.py").write_text(text + MISTAKES)
    (elsewhere / "lopa_ascend.py").unlink(missing_ok=True)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment / "bin/python")]
    done = subprocess.run(
        [*command, "stranger.py", "mistaken.py"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    first = len(text.splitlines()) + 2
    found = re.findall(r"^(\w+)\.py:(\d+): error: .+\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert found == [
        ("mistaken", str(first), "assignment"),
        ("mistaken", str(first + 1), "arg-type"),
        ("mistaken", str(first + 2), "attr-defined"),
    ], done.stdout
