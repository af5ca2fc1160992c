"""PEFT LoRA adapters, merged into the weights while these stream by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lopa_ascend.checkpoint.files import CheckpointError, Header, check_directory, no_weights, read_headers
from lopa_ascend.checkpoint.read import expected_shapes, map_tensor
from lopa_ascend.checkpoint.shard import Slices
from lopa_ascend.config import ModelConfig
from lopa_ascend.config.files import read_json_object

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_READ = {
    *("peft_type", "bias", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights"),
}
# What training, bookkeeping or another feature's own switch needs; it has no part in W + scaling * B @ A.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"),
    *("task_type", "runtime_config", "corda_config", "eva_config", "lora_ga_config", "loftq_config", "megatron_core"),
    "qalora_group_size",
}
# The others (pissa, olora, loftq, corda, lora_ga) start by changing the base weights, which are not those on disk then.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Delta:
    """One adapted weight [O, I]: the names of A [r, I] and B [O, r] in the adapter's file, and scaling."""

    a: str
    b: str
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that passed every check against a model. ``deltas`` are by the name of the weight they change."""

    path: Path
    deltas: Mapping[str, Delta]


def open_adapter(path: str | Path, config: ModelConfig) -> Adapter:
    """Checks a PEFT directory against the model without reading a weight.

    Raises:
        CheckpointError: the adapter is malformed, uses a feature other than plain LoRA, or does not fit the model.
    """
    path = Path(path)
    check_directory(path)
    if not (path / _WEIGHTS).exists():
        raise no_weights(path, f"{_CONFIG} and {_WEIGHTS}")
    settings = _Settings(path / _CONFIG, read_json_object(path / _CONFIG, CheckpointError))
    settings.refuse_features()
    shapes = expected_shapes(config)
    linears = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    linears.remove("model.embed_tokens")
    modules = settings.targets(linears)
    if config.tie_word_embeddings and settings.targets_head():
        raise settings.error("target_modules", "adapts lm_head, which this model shares with its embeddings")
    headers = read_headers(path / _WEIGHTS)
    deltas, expected = {}, {}
    for module in modules:
        a, b = (f"{_PREFIX}{module}.lora_{letter}.weight" for letter in "AB")
        rank, rows_columns = settings.rank(module), shapes[f"{module}.weight"]
        expected[a], expected[b] = (rank, rows_columns[1]), (rows_columns[0], rank)
        deltas[f"{module}.weight"] = Delta(a, b, settings.scaling(module))
    _check_tensors(path / _WEIGHTS, headers, expected)
    return Adapter(path, deltas)


def merge(
    stream: Iterable[tuple[str, torch.Tensor]], adapter: Adapter, slices: Slices
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream with W + scaling * B @ A for every adapted W, computed in float32 and cast back to W's dtype.

    Each W is the part that ``slices`` names, and only these rows of B and columns of A are used.
    """
    file = adapter.path / _WEIGHTS
    for name, weight in stream:
        delta = adapter.deltas.get(name)
        if delta is not None:
            rows, columns = slices[name]
            a, b = map_tensor(file, delta.a)[:, columns], map_tensor(file, delta.b)[rows]
            weight = (b.float() @ a.float()).mul_(delta.scaling).add_(weight).to(weight.dtype)
        yield name, weight


def _check_tensors(file: Path, headers: dict[str, Header], expected: dict[str, tuple[int, int]]) -> None:
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


def _unset(value: object) -> bool:
    # 0 is a layer number in layers_to_transform, so it counts as set.
    return value is None or value is False or value in ([], {}, "")


class _Settings:
    """adapter_config.json, with PEFT's meaning of patterns; errors name the file and the field."""

    def __init__(self, file: Path, values: dict[str, Any]):
        self.file, self.values = file, values
        self.r = self._rank("r", values.get("r"))
        self.alpha = self._alpha("lora_alpha", values.get("lora_alpha"))

    def error(self, field: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {field}: {message}")

    def refuse_features(self) -> None:
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
            if field not in _READ | _WITHOUT_EFFECT and not _unset(value):
                raise self.error(field, f"is {value!r}; only plain LoRA is supported, expected it unset")

    def targets(self, linears: list[str]) -> list[str]:
        """The adapted modules out of ``linears``."""
        modules = [module for module in linears if self._is_target(module)]
        if not modules:
            value = self.values.get("target_modules")
            raise self.error("target_modules", f"{value!r} matches no linear layer of this model")
        return modules

    def targets_head(self) -> bool:
        return self._is_target("lm_head")

    def rank(self, module: str) -> int:
        pattern = self._pattern("rank_pattern", module)
        if pattern is None:
            return self.r
        return self._rank(f"rank_pattern[{pattern!r}]", self.values["rank_pattern"][pattern])

    def scaling(self, module: str) -> float:
        pattern = self._pattern("alpha_pattern", module)
        alpha = self.alpha
        if pattern is not None:
            alpha = self._alpha(f"alpha_pattern[{pattern!r}]", self.values["alpha_pattern"][pattern])
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank

    def _is_target(self, module: str) -> bool:
        if self._matches("exclude_modules", module):
            return False
        target = self.values.get("target_modules")
        if isinstance(target, str) and target.lower() == "all-linear":
            return module != "lm_head"
        return self._matches("target_modules", module)

    def _matches(self, field: str, module: str) -> bool:
        """A string is a regex for the whole name; names in a list match whole or from a dot on."""
        value = self.values.get(field)
        if _unset(value):
            return False
        if isinstance(value, str):
            return self._match(field, value, module)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, f"is {value!r}, expected a list of module names or a regular expression")
        return any(module == name or module.endswith(f".{name}") for name in value)

    def _pattern(self, field: str, module: str) -> str | None:
        """The first pattern that matches the whole name, or its end from a dot on."""
        patterns = self.values.get(field) or {}
        if not isinstance(patterns, dict):
            raise self.error(field, f"is {patterns!r}, expected an object")
        # PEFT's own wording of the regex, so that odd patterns (alternatives, anchors) mean the same here.
        return next((key for key in patterns if self._match(field, rf"(.*\.)?({key})$", module)), None)

    def _match(self, field: str, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as error:
            raise self.error(field, f"{pattern!r} is not a regular expression: {error}") from error

    def _rank(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"is {value!r}, expected a positive integer")
        return value

    def _alpha(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(field, f"is {value!r}, expected a number")
        return value
