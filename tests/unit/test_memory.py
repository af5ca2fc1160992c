"""How much memory a CPU's KV pool may take, and which errors say that there was none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_ascend.backend import memory
from lopa_ascend.backend.cpu import DEVICE
from lopa_ascend.backend.memory import is_out_of_memory

GIB = 2**30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control group of a container that may use 3 GiB and uses 2, of which 1.5 are page cache."""
    for name, content in {
        "memory.max": f"{3 * GIB}\n",
        "memory.current": f"{2 * GIB}\n",
        "memory.stat": f"anon {GIB // 2}\nactive_file {GIB // 2}\ninactive_file {GIB}\n",
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_available", lambda: 6 * GIB)
    return tmp_path


def test_a_container_s_limit_counts_where_it_leaves_less(container: Path) -> None:
    assert memory.free_memory(1) == 5 * GIB // 2
    assert DEVICE.kv_memory(2) == 5 * GIB // 8
    (container / "memory.max").write_text(f"{9 * GIB}\n")
    assert memory.free_memory(1) == 6 * GIB


def test_no_limit_is_that_of_the_machine(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    assert memory.free_memory(1) == 6 * GIB
    (container / "memory.max").unlink()
    assert memory.free_memory(1) == 6 * GIB


def test_this_machine_has_memory() -> None:
    assert 0 < memory.free_memory(1) < 2**50


def test_what_says_that_there_was_no_memory() -> None:
    """torch_npu raises a plain RuntimeError for a kernel's workspace, and an error at the end of a broken capture."""
    workspace = RuntimeError("NPU out of memory. NPUWorkspaceAllocator tried to allocate 2.00 GiB")
    assert is_out_of_memory(workspace)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
    assert not is_out_of_memory(RuntimeError("the device is gone"))
    end_of_capture = RuntimeError("error 107026: the capture is invalid")
    end_of_capture.__context__ = workspace
    assert is_out_of_memory(end_of_capture)
