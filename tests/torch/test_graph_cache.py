"""The directory of compiled steps: who may have written to it, and what becomes of damage and full disks."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lopa_ascend import LLM
from lopa_ascend.backend.graph_cache import GraphCache, private_files
from lopa_ascend.config import ParameterError
from tests.tiny import write_dream
from tests.versions import HAS_DYNAMIC_SOURCES, compiles_steps

STEP = """
import logging, sys
from pathlib import Path
import torch
from lopa_ascend.backend.cpu.inductor import Inductor
logging.basicConfig(format="%(message)s")
tensors = [torch.arange(64.0).reshape(8, 8) / 64, torch.eye(8)]
step = lambda tensors, kv_lengths: torch.relu(tensors[0] @ tensors[1] + 1) * kv_lengths[0]
compiler = Inductor(Path(sys.argv[1]))
run = compiler.compile(step, "step", tensors, [5])
assert torch.equal(run([7]), step(tensors, [7]))
"""


def mode(bits: int) -> Callable[[Path], object]:
    return lambda path: path.chmod(bits)


def planted(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def change_file(path: Path) -> None:
        (path / "folder").mkdir(mode=0o755)
        (path / "folder/file").write_bytes(b"")
        (path / "folder/file").chmod(0o600)
        change(path / "folder/file")

    return change_file


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return planted(change)


OPEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory of all": (mode(0o777), "others may write to {}."),
    "directory of a group": (mode(0o775), "others may write to {}."),
    "sticky directory": (mode(0o1777), "others may write to {}."),
    "directory above": (lambda path: path.parent.chmod(0o777), "others may write to {parent}."),
    "folder in it": (planted(lambda file: file.parent.chmod(0o777)), "others may write to {}/folder."),
    "file of all": (planted(mode(0o666)), "others may write to {}/folder/file."),
    "file of a group": (planted(mode(0o660)), "others may write to {}/folder/file."),
    "pipe": (replaced(os.mkfifo), "it holds something that is neither a file nor a directory: {}/folder/file."),
    "link": (
        replaced(lambda file: file.symlink_to("/dev/null")),
        "it holds something that is neither a file nor a directory: {}/folder/file.",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "above" / "cache"
    path.mkdir(parents=True, mode=0o755)
    path.parent.chmod(0o755)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("case", OPEN)
def test_what_others_may_write_is_refused(folder: Path, case: str) -> None:
    change, words = OPEN[case]
    GraphCache(folder)
    change(folder)
    with pytest.raises(ParameterError) as caught:
        GraphCache(folder)
    message = (
        f"graph_cache: {folder} must be writable by this user alone, because the code in it runs at the next start"
    )
    assert str(caught.value).startswith(f"{message}, but {words.format(folder, parent=folder.parent)}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("name", ["", "..", "file"])
def test_what_others_own_is_refused(folder: Path, name: str) -> None:
    (folder / "file").write_bytes(b"")
    os.chown(folder / name, 12345, 0)
    with pytest.raises(ParameterError, match=r"but user 12345 owns .*: choose a directory of your own"):
        GraphCache(folder)


@compiles_steps
def test_a_planted_pickle_does_not_run(folder: Path, tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    folder.chmod(0o777)
    (folder / "fxgraph").mkdir()
    (folder / "fxgraph/entry").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(ParameterError, match="graph_cache: .* must be writable by this user alone"):
        LLM(str(write_dream(tmp_path / "model")), graph_mode="inductor", graph_cache=str(folder), max_model_len=64)
    assert not (tmp_path / "ran").exists()


def test_what_is_made_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = GraphCache(tmp_path / "new")
        with private_files():
            (cache.path / "file").write_bytes(b"")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o077 for path in (cache.path, *cache.path.iterdir())] == [0, 0]
    GraphCache(tmp_path / "new")


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ParameterError, match=f"graph_cache: {path} cannot be used"):
            GraphCache(path)


def test_an_abandoned_cache_is_a_temporary_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = GraphCache(folder)
    cache.abandon(OSError(28, "No space left on device"))
    assert not cache.is_kept
    assert cache.path != folder
    assert cache.path.stat().st_mode & 0o077 == 0
    (message,) = caplog.messages
    assert message.startswith(f"graph_cache: {folder} cannot be used (OSError: [Errno 28] No space left on device)")
    assert caplog.records[0].levelno == logging.WARNING


# ---- through inductor ------------------------------------------------------------------------------------------------


def compiled(folder: Path, *before: str) -> str:
    """What a process says that compiles a step and runs it."""
    command = [*before, sys.executable, "-c", STEP, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@compiles_steps
def test_damage_means_compiling_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    compiled(folder)
    python = next(path for path in folder.rglob("*.py"))
    os.truncate(python, python.stat().st_size // 2)
    assert compiled(folder).startswith(f"graph_cache: {folder} cannot be used (RuntimeError: Failed to import")


@pytest.mark.slow
@pytest.mark.timeout(900)
@compiles_steps
def test_a_full_disk_means_compiling_anew(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=40k,mode=0700 none {tmp_path}/disk"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user cannot make a small disk")
    said = compiled(tmp_path / "disk", "unshare", "-rm", "sh", "-c", f'{mount}; exec "$@"', "sh")
    assert f"graph_cache: {tmp_path}/disk cannot be " in said


@pytest.mark.skipif(HAS_DYNAMIC_SOURCES, reason="this torch compiles steps")
def test_a_torch_that_cannot_compile_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match='graph_mode: "inductor" needs the option dynamic_sources'):
        LLM(str(write_dream(tmp_path)), graph_mode="inductor", max_model_len=64)
