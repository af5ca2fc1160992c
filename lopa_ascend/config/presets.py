"""Published settings by name, such as S13: those of evaluations, and those that a model's authors recommend.

presets.json has the origin of each decoding parameter: "paper", "script" (the published code), or "inferred", if
nothing published says it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.errors import ParameterError

FILE = Path(__file__).with_name("presets.json")
LIST = "list"
"""Takes the place of a name in --preset, to print all presets."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How an evaluation makes prompts for a model."""

    name: str
    model: str
    """Checkpoint and adapter."""
    add_bos: bool
    """The prompt begins with a BOS token."""
    chat_template: bool
    fewshot_as_multiturn: bool
    """The examples are turns of the conversation."""
    system: str | None
    """The system message; None: the template's own, or none."""
    user: str
    """The user's message, with {prompt} for the problem."""
    answer_prefix: str
    """The beginning of the assistant's turn, which the model continues."""
    source: str


@dataclass(frozen=True, kw_only=True)
class PresetRanks:
    """The hardware and ranks of a published row; for information, not set by the preset."""

    hardware: str
    precision: str
    """bf16 or w8a8."""
    tensor_parallel_size: int
    branch_parallel_size: int

    def __str__(self) -> str:
        return f"{self.hardware}, {self.precision}, tp {self.tensor_parallel_size} x bp {self.branch_parallel_size}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    title: str
    decoding: Mapping[str, Any]
    """Decoding parameters by name."""
    certainty: Mapping[str, str]
    """The origin of each decoding parameter."""
    launch: PresetRanks
    tasks: Mapping[str, int]
    """Task of lm-eval or evalplus -> examples in the prompt. Empty if a model's authors recommend the settings."""
    prompts: tuple[PromptFormat, ...]
    """One for each model that was evaluated."""
    postprocessing: str
    """How answers are changed before they are scored."""
    cuts_answers: bool
    """Answers are first cut at the stop strings of their task."""
    source: str

    def merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's decoding parameters, with ``options`` in place of some. Another ``decoding`` drops values that
        belong to the preset's, such as its number of branches."""
        return {**fitting_defaults(self.decoding, options), **options}


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name, in the order of the papers' tables."""
    content = json.loads(FILE.read_text("utf-8"))
    formats = {name: PromptFormat(name=name, **fields) for name, fields in content["prompts"].items()}
    found = {}
    for name, own in content["presets"].items():
        group = content["groups"][own["group"]]
        fields = {**group, **own}
        decoding = {**group["decoding"], **own["decoding"]}
        found[name] = Preset(
            name=name,
            title=fields["title"],
            decoding={parameter: value for parameter, (value, _) in decoding.items()},
            certainty={parameter: certainty for parameter, (_, certainty) in decoding.items()},
            launch=PresetRanks(**fields["launch"]),
            tasks=fields["tasks"],
            prompts=tuple(formats[prompt] for prompt in fields["prompts"]),
            postprocessing=content["postprocessing"][fields["postprocessing"]],
            cuts_answers=fields["postprocessing"] != "lm-eval-uncut",
            source=fields["source"],
        )
    return found


def find_preset(name: object) -> Preset:
    """A preset by its name. Raises ParameterError with all names for an unknown one."""
    found = presets().get(name) if isinstance(name, str) else None
    if found is None:
        raise ParameterError("preset", f"unknown value {name!r}; choose one of {', '.join(presets())}")
    return found


def presets_text() -> str:
    """All presets with their values and sources, for people. Neighbours share what they have in common."""
    blocks = []
    for common, members in groupby(presets().values(), _common_text):
        blocks.append("\n".join([common, *(f"  {preset.name}\n{_values_text(preset)}" for preset in members), ""]))
    return "\n".join(blocks)


def _values_text(preset: Preset) -> str:
    """The decoding parameters as a request has them."""
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in preset.decoding.items())
    return textwrap.indent(textwrap.fill(values, 106), " " * 6)


def _common_text(preset: Preset) -> str:
    """Everything but the values of the decoding parameters."""
    tasks = ", ".join(f"{task} ({shots}-shot)" for task, shots in preset.tasks.items())
    lines = [
        preset.title,
        f"  source  {preset.source}",
        f"  ran on  {preset.launch}",
        f"  tasks   {tasks or 'none in particular'}; answers are {preset.postprocessing}",
    ]
    for prompt in preset.prompts:
        parts = ["BOS" if prompt.add_bos else "no BOS", "chat template" if prompt.chat_template else "no template"]
        if prompt.fewshot_as_multiturn:
            parts.append("examples as turns")
        if prompt.system:
            parts.append(f"system {prompt.system!r}")
        if prompt.user != "{prompt}":
            parts.append(f"user {prompt.user!r}")
        if prompt.answer_prefix:
            parts.append(f"answer begins with {prompt.answer_prefix!r}")
        lines.append(f"  prompt  {prompt.name} ({prompt.model}): {', '.join(parts)}")
    for certainty in dict.fromkeys(preset.certainty.values()):
        names = ", ".join(sorted(name for name, value in preset.certainty.items() if value == certainty))
        lines.append(f"  from    {names} ({certainty})")
    return "\n".join(lines)
