"""What a measurement ran on: recorded so that figures of two machines or of two versions are never mixed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import lopa_ascend
from lopa_ascend import __version__
from lopa_ascend.config.presets import FILE as PRESETS

PACKAGES = ("torch", "torch_npu", "transformers", "tokenizers", "lm_eval")
SCRIPTS = Path(__file__).parents[1]


def describe_machine() -> dict[str, Any]:
    """The processor, the system and the versions of what runs on them."""
    own = {"python": platform.python_version(), "lopa_ascend": f"{__version__}, sources {sources_digest()}"}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": own | versions_of(PACKAGES),
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@cache
def sources_digest() -> str:
    """A digest of what makes figures: the engine's code, that of tasks, scores and measurements, and prompt formats."""
    digest = hashlib.sha256()
    for folder in (Path(lopa_ascend.__file__).parent, SCRIPTS / "eval", SCRIPTS / "bench"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") or path == PRESETS:
                digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "CPU part"))]
    return names[0] if names else platform.machine()
