"""Checks PEFT LoRA adapters, and merges them into the weights one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lopa_ascend.checkpoint.files import CheckpointError, Header, check_directory, no_weights_error, read_headers
from lopa_ascend.checkpoint.lora_settings import AdapterSettings
from lopa_ascend.checkpoint.read import map_tensor
from lopa_ascend.checkpoint.streams import check_finite
from lopa_ascend.config.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json_object, shown
from lopa_ascend.families.registry import FAMILIES, family_of_checkpoint
from lopa_ascend.families.table import ALL, LORA_A, LORA_B, Selected, Tensors, TensorSlices

logger = logging.getLogger(__name__)

_BASE = "base_model_name_or_path"
_INSTEAD = "save the merged model instead (merge_and_unload of PEFT)"
_ROWS = 4096
"""Rows that are compared at a time."""
_PREFIX = "base_model.model."
"""PEFT's prefix of a module's name."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's addition to one weight W [O, I]: scaling * B @ A."""

    a: str
    """Name of A [r, I] in the adapter's file."""
    b: str
    """Name of B [O, r] in the adapter's file."""
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has passed every check against a model."""

    path: Path
    deltas: Mapping[str, Delta]
    """By the weight's name in the checkpoint."""
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in the adapter's file of the model's tensors that it holds too, by name in the checkpoint. PEFT saves the
    embedding and the head if they may have been changed."""


def open_adapter(path: str | Path, model: Tensors, architecture: str = "") -> Adapter:
    """Checks the directory of a PEFT adapter against the tensors of a model, without reading a weight.

    Args:
        architecture: the model's name in ``FAMILIES``, if it has one.

    Raises:
        CheckpointError: the adapter is malformed, is more than plain LoRA, does not fit the model, or was trained on
            another family.
    """
    path = Path(path)
    check_directory(path)
    if not (path / ADAPTER_WEIGHTS).exists():
        raise no_weights_error(path, f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    settings = AdapterSettings(
        path / ADAPTER_CONFIG, read_json_object(path / ADAPTER_CONFIG, CheckpointError), model.head
    )
    settings.refuse_features()
    linears = model.linears
    modules = settings.targets(linears)
    for name, original in model.copies.items():
        module = name.removesuffix(".weight")
        if settings.is_target(module):
            raise settings.error("target_modules", f"adapts {module}, which is the same tensor as {original} here")
    if base := settings.values.get(_BASE):
        # Models of equal shapes take each other's adapters, and answer worse.
        family = family_of_checkpoint(str(base))
        own = FAMILIES.get(architecture)
        if own and family and FAMILIES[family].checkpoints != own.checkpoints:
            raise settings.error(_BASE, f"is {shown(base)}, a {family} model, expected a {architecture} model")
        logger.info("%s: an adapter that was trained on %s", path, shown(base))
    deltas: dict[str, Delta] = {}
    expected: dict[str, tuple[int, int]] = {}
    for module in modules:
        a, b = f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
        num_rows, num_columns = linears[module].shape
        rank = settings.rank(module)
        expected[a] = rank, num_columns
        expected[b] = num_rows, rank
        deltas[linears[module].name] = Delta(a, b, settings.scaling(module))
    headers = read_headers(path / ADAPTER_WEIGHTS)
    copies = _copies(path / ADAPTER_WEIGHTS, headers, model)
    names = [name for several in copies.values() for name in several]
    _check_tensors(path / ADAPTER_WEIGHTS, {n: header for n, header in headers.items() if n not in names}, expected)
    saved = {_original(name).removesuffix(".weight").removesuffix(".bias") for name in names}
    settings.check_saved((name.removesuffix(".weight") for name in (*model.specs, *model.copies)), saved)
    return Adapter(path, deltas, copies)


def _original(name: str) -> str:
    """The model's name of a tensor in an adapter."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def _copies(file: Path, headers: Mapping[str, Header], model: Tensors) -> dict[str, tuple[str, ...]]:
    """``Adapter.copies``."""
    found: dict[str, tuple[str, ...]] = {}
    for name, header in headers.items():
        original = model.copies.get(_original(name), _original(name))
        if not name.startswith(_PREFIX) or original not in model.specs:
            continue
        shape = model.specs[original].shape
        if header.shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name}: has shape {list(header.shape)}, and the model's {list(shape)}: the vocabulary "
                f"was resized when the adapter was trained, which is not supported; {_INSTEAD}"
            )
        found[original] = (*found.get(original, ()), name)
    return found


def merge_adapter(
    stream: Iterable[tuple[str, torch.Tensor]], adapter: Adapter, slices: TensorSlices = ALL
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replaces every adapted weight W by W + scaling * B @ A in float32. The sum is not rounded to the dtype of W: the
    next cast or quantisation may be to a wider one.

    Args:
        slices: the rank's part of W: rows of B and columns of A.

    Raises:
        CheckpointError: a value of the adapter is not finite, or its copy of a model's tensor has other values.
    """
    file = adapter.path / ADAPTER_WEIGHTS
    for name, weight in stream:
        for copy in adapter.copies.get(name, ()):
            _check_copy(file, copy, weight, slices.get(name, ()))
        delta = adapter.deltas.get(name)
        if delta is not None:
            rows, columns = slices.get(name, (slice(None), slice(None)))
            a = map_tensor(file, delta.a)[:, columns]
            b = map_tensor(file, delta.b)[rows]
            check_finite(file, delta.a, a)
            check_finite(file, delta.b, b)
            weight = (b.float() @ a.float()).mul_(delta.scaling).add_(weight)
        yield name, weight


def draft_factors(adapter: Adapter, model: Tensors, slices: TensorSlices) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors of an adapter by our names, A [r, I] and scaling * B [O, r], for layers that ranks split by columns:
    ``slices`` select columns of A. Raises CheckpointError if a value is not finite."""
    file = adapter.path / ADAPTER_WEIGHTS
    for name, delta in adapter.deltas.items():
        a, b = map_tensor(file, delta.a), map_tensor(file, delta.b)
        check_finite(file, delta.a, a)
        check_finite(file, delta.b, b)
        module, _, kind = model.specs[name].ours.rpartition(".")
        yield f"{module}{LORA_A}.{kind}", a[:, slices[name][1]]
        yield f"{module}{LORA_B}.{kind}", b.float() * delta.scaling


def open_draft_adapter(path: Path, model: Tensors, architecture: str) -> Adapter:
    """``open_adapter`` for an adapter that is not merged. It must change o_proj alone: else CheckpointError."""
    adapter = open_adapter(path, model, architecture)
    for name in adapter.deltas:
        if not model.specs[name].ours.endswith(".o.weight"):
            raise CheckpointError(
                f"{path / ADAPTER_CONFIG}: target_modules: adapts {name.removesuffix('.weight')}; an adapter that only "
                "drafts use may adapt o_proj alone"
            )
    return adapter


def _check_copy(file: Path, name: str, weight: torch.Tensor, part: tuple[Selected, ...]) -> None:
    """A copy must equal the model's tensor in the adapter's dtype: training may have loaded the model in that one."""
    for rows, others in zip(map_tensor(file, name)[part].split(_ROWS), weight.split(_ROWS), strict=True):
        if not torch.equal(rows, others.to(rows.dtype)):
            raise CheckpointError(
                f"{file}: tensor {name}: differs from the model's, so it was trained too (modules_to_save), or belongs "
                f"to another model; only LoRA of linear layers is supported: {_INSTEAD}"
            )


def _check_tensors(file: Path, headers: dict[str, Header], expected: dict[str, tuple[int, int]]) -> None:
    """Compares an adapter's tensors with the shapes by its settings and the model."""
    for name, header in headers.items():
        if "lora_embedding_" in name:
            raise CheckpointError(f"{file}: tensor {name}: LoRA on embeddings is not supported, only on linear layers")
        if name not in expected:
            raise CheckpointError(
                f"{file}: tensor {name}: unexpected; expected lora_A and lora_B of target_modules in this model"
            )
        if header.shape != expected[name]:
            raise CheckpointError(
                f"{file}: tensor {name}: has shape {list(header.shape)}, expected {list(expected[name])} "
                f"by r in {ADAPTER_CONFIG} and the model's weight"
            )
    for name, shape in expected.items():
        if name not in headers:
            raise CheckpointError(f"{file}: tensor {name}: is missing, expected {list(shape)}")
