"""What was measured: recorded so that samples of two models, machines or settings are never mixed."""

from __future__ import annotations

import hashlib
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import EngineConfig
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.hub import model_name, repository_of

if TYPE_CHECKING:
    from lopa_ascend import LLM

PATHS = ("model", "lora", "graph_cache")
"""Fields of the engine's configuration that are directories: those of weights are described by a digest, and the cache
of graphs changes no figure."""
SUFFIXES = (".json", ".safetensors", ".jinja")
"""Of a model's files that its digest covers, beside merges.txt."""
CHUNK = 1 << 20
"""Bytes of a piece of a weight file."""
NUM_CHUNKS = 32
"""Evenly spaced pieces of a weight file that are read for its digest: whole files of tens of gigabytes would take
minutes."""


def describe_run(llm: LLM) -> dict[str, Any]:
    """What is known of a run once its model is loaded, beside ``describe_model`` and ``describe_machine``: by which
    revisions, on which device, how many answers at a time."""
    import torch

    config = llm.engine.config
    device = None if config.device == "cpu" else torch.get_device_module(config.device).get_device_name()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit_of(Path(__file__).parent),
        "number_format": number_format(config),
        "device": config.device,
        "device_name": device,
        "ranks": config.world_size,
        "threads": torch.get_num_threads(),
        "concurrency": config.max_num_seqs,
    }


def commit_of(folder: Path) -> str | None:
    """The commit of a checkout, with "+changes" if tracked files differ from it; None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def number_format(config: EngineConfig) -> str:
    """The number format of linear layers, such as "bfloat16" or "w8a8"."""
    from lopa_ascend.checkpoint import config_json, open_checkpoint, with_dtype  # these import torch
    from lopa_ascend.model.registry import find_model

    path = DEMO_MODEL if config.model is None else Path(config.model)
    family = find_model(config_json(path))
    if family is None:
        return f"plain torch, {config.dtype}"
    found = open_checkpoint(path, family)
    if found.quantized is not None:
        codes = found.quantized.codes
        return codes if codes == "fp8" else f"w{codes.removeprefix('int')}a8"
    return config.quantization or with_dtype(found.config, config.dtype).dtype


def describe_engine(config: EngineConfig) -> dict[str, Any]:
    """The engine's settings by name, without directories."""
    return {name: getattr(config, name) for name in EngineConfig.names() if name not in PATHS}


def describe_model(model: str | None, adapter: str | None) -> dict[str, Any]:
    """What a model and an adapter are called, a digest of each one's files, and the commit of those in the hub's cache.

    Raises:
        CheckpointError: there is no such directory.
    """

    for path in (model, adapter):
        if path is not None:
            from lopa_ascend.checkpoint.files import check_directory  # loads torch

            check_directory(Path(path))
    found: dict[str, Any] = {"model": "bundled" if model is None else model_name(EngineConfig(model=model))}
    found["model_digest"] = _digest(DEMO_MODEL if model is None else Path(model))
    if adapter is not None:
        found |= {"adapter": model_name(EngineConfig(model=adapter)), "adapter_digest": _digest(Path(adapter))}
    for name, path in (("model", model), ("adapter", adapter)):
        if path is not None and (repository := repository_of(Path(path).resolve())) is not None:
            found[f"{name}_revision"] = repository[1]
    return found


def _digest(folder: Path) -> str:
    """A digest of a model's weights, configuration, tokenizer and chat template."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES or path.name == "merges.txt"):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(NUM_CHUNKS):
                end_of_previous = index * CHUNK  # a small file is read once, chunk after chunk
                file.seek(max(end_of_previous, (size - CHUNK) * index // (NUM_CHUNKS - 1)))
                digest.update(file.read(CHUNK))
    return digest.hexdigest()[:16]
