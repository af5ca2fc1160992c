"""The settings of a PEFT LoRA adapter: the modules that it changes, ranks and factors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from lopa_ascend.checkpoint.files import CheckpointError, matches_pattern
from lopa_ascend.config.files import shown

MAX_FIELD = 200
"""Characters of a field's name that messages show whole."""
MAX_ALPHA = 1e9
"""Usual values are around 16."""
MAX_RANK = 2**20
"""Usual values are around 32."""
_SUPPORTED_FIELDS = {
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "lora_alpha",
    "modules_to_save",
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
    "ensure_weight_tying",
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
"""Fields for training and bookkeeping, or read only if another one is set: W + scaling * B @ A does not need them."""
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
"""Ways to initialise A and B that leave the base weights alone. The others (pissa, olora, loftq, corda, lora_ga) change
them first, so the adapter does not fit the weights on disk."""


def _is_unset(value: object) -> bool:
    # 0 is a layer number in layers_to_transform, so it counts as set.
    return value is None or value is False or value in ([], {}, "")


class AdapterSettings:
    """The fields of adapter_config.json, with patterns as PEFT understands them. Errors name the file and the field.
    "all-linear" leaves out ``head``, the LM head's module."""

    def __init__(self, file: Path, values: dict[str, Any], head: str):
        self.file, self.values, self._head = file, values, head
        self._names: dict[str, frozenset[str]] = {}
        """The names in a field's list."""
        self.default_rank = self._parse_rank("r", values.get("r"))
        self.default_alpha = self._parse_alpha("lora_alpha", values.get("lora_alpha"))

    def error(self, field: str, message: str) -> CheckpointError:
        name = field if len(field) <= MAX_FIELD and field.isprintable() else shown(field)
        return CheckpointError(f"{self.file}: {name}: {message}")

    def refuse_features(self) -> None:
        """Raises CheckpointError if the adapter needs more than W + scaling * B @ A."""
        values = self.values
        if values.get("peft_type") != "LORA":
            raise self.error("peft_type", f"is {shown(values.get('peft_type'))}, expected 'LORA'")
        if values.get("bias", "none") != "none":
            raise self.error("bias", f"is {shown(values['bias'])}, expected 'none'")
        if not isinstance(values.get("use_rslora", False), bool):
            raise self.error("use_rslora", f"is {shown(values['use_rslora'])}, expected true or false")
        init = values.get("init_lora_weights", True)
        if not isinstance(init, bool) and init not in _PLAIN_INITS:
            raise self.error(
                "init_lora_weights",
                f"{shown(init)} changes the base weights, so the adapter does not fit them as stored; expected true "
                "or false (which PEFT writes when save_pretrained is given path_initial_model_for_weight_conversion)",
            )
        for field, value in values.items():
            if field not in _SUPPORTED_FIELDS | _FIELDS_WITHOUT_EFFECT and not _is_unset(value):
                raise self.error(field, f"is {shown(value)}; only plain LoRA is supported, expected it unset")

    def targets(self, linears: Iterable[str]) -> list[str]:
        """The model's linear layers that the adapter changes."""
        modules = [module for module in linears if self.is_target(module)]
        if not modules:
            value = self.values.get("target_modules")
            raise self.error("target_modules", f"{shown(value)} matches no linear layer of this model")
        return modules

    def rank(self, module: str) -> int:
        pattern = self._find_pattern("rank_pattern", module)
        if pattern is None:
            return self.default_rank
        return self._parse_rank(f"rank_pattern[{shown(pattern)}]", self.values["rank_pattern"][pattern])

    def scaling(self, module: str) -> float:
        """The factor of a module's B @ A."""
        pattern = self._find_pattern("alpha_pattern", module)
        alpha = self.default_alpha
        if pattern is not None:
            alpha = self._parse_alpha(f"alpha_pattern[{shown(pattern)}]", self.values["alpha_pattern"][pattern])
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank

    def is_target(self, module: str) -> bool:
        """Whether the adapter changes a linear layer."""
        if self._names_module("exclude_modules", module):
            return False
        target = self.values.get("target_modules")
        if isinstance(target, str) and target.lower() == "all-linear":
            return module != self._head
        return self._names_module("target_modules", module)

    def check_saved(self, modules: Iterable[str], saved: Collection[str]) -> None:
        """Raises CheckpointError if ``modules_to_save`` names a module that is not in ``saved``."""
        for module in modules:
            if module not in saved and self._names_module("modules_to_save", module):
                raise self.error("modules_to_save", f"names {module}, of which the adapter has no weight")

    def _names_module(self, field: str, module: str) -> bool:
        """Whether a field names a module: a string is a regular expression for the whole name; a list has whole names,
        or ends of names after a dot."""
        value = self.values.get(field)
        if _is_unset(value):
            return False
        if isinstance(value, str):
            return self._fully_matches(field, value, module)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, f"is {shown(value)}, expected a list of module names or a regular expression")
        if field not in self._names:
            self._names[field] = frozenset(value)
        parts = module.split(".")
        return any(".".join(parts[start:]) in self._names[field] for start in range(len(parts)))

    def _find_pattern(self, field: str, module: str) -> str | None:
        """The first pattern in a field that matches a module's whole name, or its end after a dot."""
        patterns = self.values.get(field) or {}
        if not isinstance(patterns, dict):
            raise self.error(field, f"is {shown(patterns)}, expected an object")
        # PEFT's own wording of the regex, so that odd patterns (alternatives, anchors) mean the same here.
        return next((key for key in patterns if self._fully_matches(field, rf"(.*\.)?({key})$", module)), None)

    def _fully_matches(self, field: str, pattern: str, module: str) -> bool:
        try:
            return matches_pattern(pattern, module, is_whole=True)
        except ValueError as error:
            raise self.error(field, str(error)) from error

    def _parse_rank(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
            raise self.error(field, f"is {shown(value)}, expected an integer from 1 to {MAX_RANK}")
        return value

    def _parse_alpha(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            raise self.error(field, f"is {shown(value)}, expected a number from {-MAX_ALPHA:g} to {MAX_ALPHA:g}")
        if value == 0:
            raise self.error(field, "is 0, expected another number: with 0 the adapter changes nothing")
        return value
