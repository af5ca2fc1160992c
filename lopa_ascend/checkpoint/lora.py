"""Checks PEFT LoRA adapters, and merges them into the weights one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lopa_ascend.checkpoint.files import CheckpointError, Header, check_directory, no_weights_error, read_headers
from lopa_ascend.checkpoint.read import ExpectedTensors, dream_tensors, map_tensor
from lopa_ascend.checkpoint.shard import TensorSlices
from lopa_ascend.config import ModelConfig
from lopa_ascend.config.files import read_json_object

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""

_SUPPORTED_FIELDS = {
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
_FIELDS_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""For training, for bookkeeping, or read only if another field is set; they have no part in W + scaling * B @ A."""
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
"""Ways to initialise A and B that leave the base weights alone. The others (pissa, olora, loftq, corda, lora_ga) change
the base weights first, so that the adapter does not fit the weights on disk."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one weight W [O, I]: scaling * B @ A."""

    a: str
    """Name of A [r, I] in the adapter's file."""
    b: str
    """Name of B [O, r] in the adapter's file."""
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has passed every check against a model."""

    path: Path
    """Its directory."""
    deltas: Mapping[str, Delta]
    """By Hugging Face name of the weight that they change."""


def open_adapter(path: str | Path, config: ModelConfig, model_tensors: ExpectedTensors | None = None) -> Adapter:
    """Checks the directory of a PEFT adapter against a model, without reading a weight.

    Args:
        path: the directory.
        config: the model's.
        model_tensors: what the model's checkpoint holds; None: what that of a Dream holds.

    Raises:
        CheckpointError: the adapter is malformed, uses a feature other than plain LoRA, or does not fit the model.
    """
    path = Path(path)
    check_directory(path)
    if not (path / _WEIGHTS).exists():
        raise no_weights_error(path, f"{_CONFIG} and {_WEIGHTS}")
    settings = _Settings(path / _CONFIG, read_json_object(path / _CONFIG, CheckpointError))
    settings.refuse_features()
    model_tensors = model_tensors or dream_tensors(config)
    modules = settings.targets(model_tensors.linears)
    for name, original in model_tensors.copies.items():
        module = name.removesuffix(".weight")
        if settings.is_target(module):
            raise settings.error("target_modules", f"adapts {module}, which is the same tensor as {original} here")
    deltas: dict[str, Delta] = {}
    expected: dict[str, tuple[int, int]] = {}
    for module in modules:
        a, b = f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
        num_rows, num_columns = model_tensors.shapes[f"{module}.weight"]
        rank = settings.rank(module)
        expected[a] = rank, num_columns
        expected[b] = num_rows, rank
        deltas[f"{module}.weight"] = Delta(a, b, settings.scaling(module))
    _check_tensors(path / _WEIGHTS, read_headers(path / _WEIGHTS), expected)
    return Adapter(path, deltas)


def merge_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], adapter: Adapter, slices: TensorSlices
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replaces every adapted weight W by W + scaling * B @ A, computed in float32 and cast back to the dtype of W.

    Args:
        tensors: Hugging Face names and tensors of this rank.
        adapter: what to add.
        slices: the rows and columns of each weight that this rank holds. Only these rows of B and these columns of A
            are used.
    """
    file = adapter.path / _WEIGHTS
    for name, weight in tensors:
        delta = adapter.deltas.get(name)
        if delta is not None:
            rows, columns = slices[name]
            a = map_tensor(file, delta.a)[:, columns]
            b = map_tensor(file, delta.b)[rows]
            weight = (b.float() @ a.float()).mul_(delta.scaling).add_(weight).to(weight.dtype)
        yield name, weight


def _check_tensors(file: Path, headers: dict[str, Header], expected: dict[str, tuple[int, int]]) -> None:
    """Compares the adapter's tensors with those that its settings and the model ask for.

    Args:
        file: the adapter's weights, for messages.
        headers: by name, the tensors that are there.
        expected: by name, the shapes of those that must be there.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
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
                f"by r in {_CONFIG} and the model's weight"
            )
    for name, shape in expected.items():
        if name not in headers:
            raise CheckpointError(f"{file}: tensor {name}: is missing, expected {list(shape)}")


def _is_unset(value: object) -> bool:
    """Whether the value of a field means that the feature is not used."""
    # 0 is a layer number in layers_to_transform, so it counts as set.
    return value is None or value is False or value in ([], {}, "")


class _Settings:
    """The fields of adapter_config.json, with patterns as PEFT understands them. Errors name the file and the field."""

    def __init__(self, file: Path, values: dict[str, Any]):
        self.file, self.values = file, values
        self.default_rank = self._parse_rank("r", values.get("r"))
        self.default_alpha = self._parse_alpha("lora_alpha", values.get("lora_alpha"))

    def error(self, field: str, message: str) -> CheckpointError:
        """An error about a field."""
        return CheckpointError(f"{self.file}: {field}: {message}")

    def refuse_features(self) -> None:
        """Raises CheckpointError if the adapter needs more than W + scaling * B @ A."""
        values = self.values
        if values.get("peft_type") != "LORA":
            raise self.error("peft_type", f"is {values.get('peft_type')!r}, expected 'LORA'")
        if values.get("bias", "none") != "none":
            raise self.error("bias", f"is {values['bias']!r}, expected 'none'")
        if not isinstance(values.get("use_rslora", False), bool):
            raise self.error("use_rslora", f"is {values['use_rslora']!r}, expected true or false")
        init = values.get("init_lora_weights", True)
        if not isinstance(init, bool) and init not in _PLAIN_INITS:
            raise self.error(
                "init_lora_weights",
                f"{init!r} changes the base weights, so the adapter does not fit them as stored; expected true "
                "or false (which PEFT writes when save_pretrained is given path_initial_model_for_weight_conversion)",
            )
        for field, value in values.items():
            if field not in _SUPPORTED_FIELDS | _FIELDS_WITHOUT_EFFECT and not _is_unset(value):
                raise self.error(field, f"is {value!r}; only plain LoRA is supported, expected it unset")

    def targets(self, linears: Iterable[str]) -> list[str]:
        """The linear layers, out of those of the model, that the adapter changes."""
        modules = [module for module in linears if self.is_target(module)]
        if not modules:
            value = self.values.get("target_modules")
            raise self.error("target_modules", f"{value!r} matches no linear layer of this model")
        return modules

    def rank(self, module: str) -> int:
        """The rank r of a module's A and B."""
        pattern = self._find_pattern("rank_pattern", module)
        if pattern is None:
            return self.default_rank
        return self._parse_rank(f"rank_pattern[{pattern!r}]", self.values["rank_pattern"][pattern])

    def scaling(self, module: str) -> float:
        """The factor of a module's B @ A."""
        pattern = self._find_pattern("alpha_pattern", module)
        alpha = self.default_alpha
        if pattern is not None:
            alpha = self._parse_alpha(f"alpha_pattern[{pattern!r}]", self.values["alpha_pattern"][pattern])
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank

    def is_target(self, module: str) -> bool:
        """Whether the adapter changes a linear layer of this name."""
        if self._names_module("exclude_modules", module):
            return False
        target = self.values.get("target_modules")
        if isinstance(target, str) and target.lower() == "all-linear":
            return module != "lm_head"
        return self._names_module("target_modules", module)

    def _names_module(self, field: str, module: str) -> bool:
        """Whether a field names a module: a string is a regular expression for the whole name of the module; a list
        holds whole names, or ends of names that begin behind a dot."""
        value = self.values.get(field)
        if _is_unset(value):
            return False
        if isinstance(value, str):
            return self._fully_matches(field, value, module)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, f"is {value!r}, expected a list of module names or a regular expression")
        return any(module == name or module.endswith(f".{name}") for name in value)

    def _find_pattern(self, field: str, module: str) -> str | None:
        """The first pattern in a field that matches the whole name of a module, or its end behind a dot."""
        patterns = self.values.get(field) or {}
        if not isinstance(patterns, dict):
            raise self.error(field, f"is {patterns!r}, expected an object")
        # PEFT's own wording of the regex, so that odd patterns (alternatives, anchors) mean the same here.
        return next((key for key in patterns if self._fully_matches(field, rf"(.*\.)?({key})$", module)), None)

    def _fully_matches(self, field: str, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as error:
            raise self.error(field, f"{pattern!r} is not a regular expression: {error}") from error

    def _parse_rank(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"is {value!r}, expected a positive integer")
        return value

    def _parse_alpha(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(field, f"is {value!r}, expected a number")
        return value
