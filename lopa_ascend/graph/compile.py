"""Chooses the compiler of decode steps."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from lopa_ascend.backend import find_device
from lopa_ascend.backend.compiler import Compiler, Eager
from lopa_ascend.config import GRAPH_MODES_BY_DEVICE


def load_compiler(device: str, mode: str, *, key: str, cache_dir: str | Path | None = None) -> Compiler:
    """The compiler of a device's graph mode; ValueError if there is no such mode.

    ``key`` tells model and configuration: steps with equal keys and tensors of equal shapes must be the same. The code
    of this package is added here, the versions of libraries by the compiler. Compiled steps outlive the process in
    ``cache_dir``.
    """
    if mode not in GRAPH_MODES_BY_DEVICE[device]:
        choices = ", ".join(GRAPH_MODES_BY_DEVICE[device])
        raise ValueError(f"graph mode of device {device}: unknown value {mode!r}; choose one of {choices}")
    if mode == "eager":
        return Eager()
    key, directory = f"{key}; code {code_digest()}", None if cache_dir is None else Path(cache_dir)
    return find_device(device).load_compiler(mode, key, directory)


def code_digest() -> str:
    """16 hexadecimal digits that change with this package's source files."""
    folders: list[Path] = []
    for name in ("lopa_ascend", "lopa_ascend.graph", "lopa_ascend.parallel"):
        spec = find_spec(name)
        assert spec is not None
        folders += map(Path, spec.submodule_search_locations or ())
    digest = hashlib.sha256()
    for file in sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")}):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
