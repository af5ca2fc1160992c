"""Whether a model fits into the memory of this machine, by its JSON files alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lopa_ascend.backend import find_device
from lopa_ascend.config import ConfigError, EngineConfig, ModelConfig, ParameterError
from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.int4_files import int4_description
from lopa_ascend.config.kinds import format_size
from lopa_ascend.config.quantized_files import (
    CONFIG_FIELD,
    fp8_format,
    has_fp8_weights,
    modelslim_descriptions,
    uses_compressed_tensors,
)
from lopa_ascend.families import Family, read_config, with_name
from lopa_ascend.families.table import sizes_of
from lopa_ascend.kv.pages import page_bytes, pages_for
from lopa_ascend.model.registry import find_model

SCORED_ROWS = 512
"""Rows of logits that are there at a time, each with two float32 numbers beside it: see ``runner/scoring.py``."""
_ASK_DEVICE = """
import sys
from lopa_ascend.backend import find_device
device = find_device(sys.argv[1])
try:
    device.open()
except (ValueError, RuntimeError) as error:
    sys.exit(str(error))
print(device.usable_memory(1, float(sys.argv[2]) if sys.argv[2:] else None))
"""


@dataclass(frozen=True)
class _Found:
    name: str
    config: ModelConfig
    family: Family | None
    """None: it is in plain torch."""
    stored: int
    """Bytes of its weights in files."""
    form: str | None
    """Of stored linear layers: "int8", "int4" or "fp8"; None: floats."""


@dataclass(frozen=True)
class _Need:
    """Bytes that a rank takes."""

    weights: int
    pages: int
    """Of one request of ``positions`` positions, or ``kv_cache_memory``."""
    step: int
    positions: int
    dtype: str

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.step

    def __str__(self) -> str:
        weights, pages, step, total = map(format_size, (self.weights, self.pages, self.step, self.total))
        return (
            f"weights {weights} ({self.dtype}), KV pages {pages} (a request of {self.positions} positions) and a step "
            f"{step} take {total}"
        )


def check_fit(name: str, engine: EngineConfig, directory: Path, stored: int) -> str:
    """Says for the user what a model takes of the free memory. ``directory`` has its JSON files; ``stored``: bytes of
    its weights.

    Raises:
        ParameterError: no family has the model; or it does not fit: the message names a setting with which it does, if
            there is one.
    """
    found = _read(name, directory, stored)
    _check_device(engine, found)
    need, free = _need(engine, found), _free_memory(engine)
    a_rank = f"{format_size(free)} {'of each rank ' if engine.world_size > 1 else ''}are free"
    if need.total <= free:
        return f"{need}; {a_rank}"
    problem = f"{name} does not fit: {need}, and {a_rank}"
    least, remedy = need.total, ""
    for settings, other in _alternatives(engine, found):
        if other.total <= free:
            remedy = f"; choose {settings}, which takes {format_size(other.total)}"
            break
        if other.total < least:
            least, remedy = other.total, f"; nor does it with {settings}: {format_size(other.total)}"
    raise ParameterError("model", problem + remedy)


def _read(name: str, directory: Path, stored: int) -> _Found:
    file = directory / "config.json"
    try:
        raw = with_name(read_json_object(file, ConfigError), directory)
        family = find_model(raw)
        generation = read_json_object(directory / "generation_config.json", ConfigError, optional=True)
        config = read_config(raw, generation, str(file), family)
        int4 = int4_description(directory, raw, ConfigError)
    except ValueError as error:
        raise ParameterError("model", f"{name} cannot be served: {error}. Code of a repository is never run") from error
    described = raw.get(CONFIG_FIELD)
    form = "int8" if uses_compressed_tensors(described) or modelslim_descriptions(directory) else None
    if fp8_format(described) is not None:
        form = "fp8" if has_fp8_weights(described) else None
    form = form if int4 is None else "int4"
    if not (raw.get("torch_dtype") or raw.get("dtype")) and family is not None:
        parameters = family.tensors(config).num_bytes(1)
        config = replace(config, dtype="float32" if stored > 3 * parameters else "bfloat16")
    return _Found(name, config, family, stored, form)


def _check_device(engine: EngineConfig, found: _Found) -> None:
    """Refuses what the ranks or the device cannot run, as the engine will."""
    engine.check_split(found.config)
    model = found.config if engine.dtype == "auto" else replace(found.config, dtype=engine.dtype)
    device, codes = find_device(engine.device), found.form or engine.codes
    if found.form is not None:
        device.check_codes("model", found.name, found.form)
    elif found.family is not None and engine.codes is not None:
        device.check_codes("quantization", repr(engine.quantization), engine.codes)
        tensors = found.family.tensors(model)
        layers = tensors.quantized(engine.quantized_layers(), engine.group_size, is_fp8=engine.codes == "fp8")
        tensors.check_groups(layers, engine.tensor_parallel_size, model.tensor_parallel_sizes())
    device.check_model(engine, model, Path(found.name), codes=codes)


def _need(engine: EngineConfig, found: _Found) -> _Need:
    model, tp = found.config, engine.tensor_parallel_size
    dtype = model.dtype if engine.dtype == "auto" else engine.dtype
    item, stored_item = (4 if name == "float32" else 2 for name in (dtype, model.dtype))
    if found.form is not None:
        # The scales of int4 have 2 bytes in files and 4 in memory: with groups of 32 an eighth more.
        weights = found.stored * (9 if found.form == "int4" else 8) // 8 // tp
    elif found.family is None:
        weights = found.stored * item // stored_item
    else:
        tensors = found.family.tensors(model)
        weights = tensors.num_bytes(item, tensors.quantized(engine.quantized_layers(), engine.group_size), tp)
    positions = engine.longest_sequence(model)
    pages = engine.kv_cache_memory or pages_for(positions) * page_bytes(model.kv_shape(tp), item)
    form = found.form or engine.codes
    step = step_bytes(model, engine.batched_tokens(positions), item, tp)
    return _Need(weights, pages, step, positions, f"{dtype} and {form}" if form else dtype)


def step_bytes(model: ModelConfig, tokens: int, item: int, tp: int) -> int:
    """The most bytes of a step beside weights and pages: a layer's residual and norm, inputs and outputs of its widest
    linear layers; and a piece of the logits with its statistics."""
    sizes = sizes_of(model)
    experts = model.experts
    inner = sizes["inner"] if experts is None else experts.per_token * experts.inner + experts.shared_inner
    layer = 4 * sizes["hidden"] + (2 * sizes["qkv_heads"] + 3 * inner) // tp
    return tokens * layer * item + SCORED_ROWS * model.vocab_shard(tp) * (item + 8)


def _free_memory(engine: EngineConfig) -> int:
    """Bytes for each rank. Another process asks a device other than the CPU: this one may be an HTTP server's, without
    torch. Raises ParameterError if the device cannot be used."""
    device = find_device(engine.device)
    if device.on_host:
        return device.free_memory(engine.world_size)
    share = [] if engine.gpu_memory_utilization is None else [str(engine.gpu_memory_utilization)]
    asked = subprocess.run([sys.executable, "-c", _ASK_DEVICE, engine.device, *share], capture_output=True, text=True)
    if asked.returncode:
        raise ParameterError(
            "device", f"{engine.device} cannot be asked for its memory: {asked.stderr.strip().splitlines()[-1]}"
        )
    return int(asked.stdout.split()[-1])


def _alternatives(engine: EngineConfig, found: _Found) -> Iterator[tuple[str, _Need]]:
    """Other settings that run the model, from the smallest change on, and what it takes then."""
    formats: list[Mapping[str, Any]] = [{}, {"dtype": "bfloat16"}]
    if engine.quantization is None and found.form is None and found.family is not None:
        choices = ("w8a8", "w4a8")
        formats += [{**dtype, "quantization": name} for name in choices for dtype in ({}, {"dtype": "bfloat16"})]
    sizes = [engine.tensor_parallel_size]
    if not find_device(engine.device).on_host:  # ranks of a CPU share its memory
        sizes += [size for size in found.config.tensor_parallel_sizes() if size > sizes[0]]
    for size, form in itertools.product(sizes, formats):
        values = {**form, "tensor_parallel_size": size}
        changed = {name: value for name, value in values.items() if value != getattr(engine, name)}
        try:
            other = replace(engine, **changed)
            _check_device(other, found)
        except ParameterError:  # the device or the graph mode does not run it
            continue
        yield " and ".join(f"{name} {value}" for name, value in changed.items()), _need(other, found)
