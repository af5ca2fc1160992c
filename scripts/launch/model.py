"""Checks the files of a launch's model and adapter, and whether the ranks can split the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from lopa_ascend.config import ConfigError
from lopa_ascend.config.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    MAX_HEADER,
    SINGLE_FILE,
    read_json_object,
)
from lopa_ascend.config.quantized_files import MODELSLIM_WEIGHTS, modelslim_descriptions
from lopa_ascend.families import read_config
from lopa_ascend.hub import name_in
from lopa_ascend.model.registry import find_model
from scripts.launch.arguments import Launch
from scripts.launch.findings import Finding, fail, note, ok


def check_model(launch: Launch) -> Iterator[Finding]:
    """Checks that all files can be read, and that tp splits the model. What is on the hub the server checks itself."""
    if names := [str(path) for path in (launch.model, launch.lora_path) if path and name_in(str(path))]:
        yield note(f"model: the server downloads {' and '.join(names)}, and checks then whether it fits")
        return
    for check in (_check_files, _check_tensor_parallel_size):
        try:
            yield from check(launch)
        except (ConfigError, OSError) as error:
            yield fail(f"model: {error}", "give a whole Hugging Face directory of a Dream or of a registered model")


def _check_files(launch: Launch) -> Iterator[Finding]:
    files = _weights(launch.model)
    if launch.lora_path is not None:
        files += [launch.lora_path / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    unreadable = [file for file in files if not file.is_file() or not os.access(file, os.R_OK)]
    for file in unreadable:
        yield fail(f"model: {file} is not there or cannot be read", "finish its download, or let this user read it")
    incomplete = [file for file in files if file not in unreadable and not _is_whole(file)]
    for file in incomplete:
        yield fail(f"model: {file} is not a whole safetensors file", "finish its download, with git-lfs if git made it")
    if not unreadable and not incomplete:
        yield ok(f"model: {launch.model}")


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says: 8 bytes with the header's length, the header, the
    tensors. Other files are."""
    if file.suffix != ".safetensors":
        return True
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > min(file.stat().st_size, MAX_HEADER):  # what git-lfs leaves in place of a file is text
            return False
        try:
            header = json.loads(content.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0) == file.stat().st_size
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
            return False


def _weights(model: Path) -> list[Path]:
    """The files with the weights of a model, of which some may be missing."""
    single, index = model / SINGLE_FILE, model / INDEX
    if not single.exists() and not index.exists() and modelslim_descriptions(model):
        single = next(iter(sorted(model.glob(MODELSLIM_WEIGHTS))), model / MODELSLIM_WEIGHTS)
        index = next(iter(sorted(model.glob(f"{MODELSLIM_WEIGHTS}.index.json"))), index)
    if single.exists() or not index.exists():  # as the loader does it
        return [single]
    weight_map = read_json_object(index, ConfigError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: has no weight_map")
    return [model / name for name in sorted(set(weight_map.values()))]


def _check_tensor_parallel_size(launch: Launch) -> Iterator[Finding]:
    file = launch.model / "config.json"
    values = read_json_object(file, ConfigError)
    try:
        family = find_model(values)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    config = read_config(values, {}, str(file), family)
    sizes, heads = config.tensor_parallel_sizes(), f"{config.num_heads} query and {config.num_kv_heads} KV heads"
    if launch.tp in sizes:
        yield ok(f"model: tp {launch.tp} splits {heads}")
    else:
        remedy = f"choose --tp from {', '.join(map(str, sizes))}"
        yield fail(f"model: tp {launch.tp} does not split a model with {heads}", remedy)
