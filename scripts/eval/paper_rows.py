"""The rows of the LoPA paper's Tables 1 to 4: settings, what they ran on, and the published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.presets import Preset, find_preset
from scripts.bench.plan.validate import read_paper

FILE = Path(__file__).with_name("paper.json")
TABLES = {
    "table1": "D2F-Dream: tokens per forward pass and score",
    "table2": "D2F-DiffuCoder: tokens per forward pass and score",
    "table3": "LoPA-Dist: tokens/s, tokens per forward pass and latency",
    "table4": "LoPA-Dist: tokens/s and score by setting",
}
METRICS = {
    "table1": {"TPF": "lopa_tpf", "score": "score"},
    "table2": {"TPF": "summed_tpf", "score": "score"},
    "table3": {
        "Avg TPS": "published_avg_tps",
        "Max TPS": "published_max_tps",
        "TPF": "lopa_tpf",
        "latency": "published_latency",
    },
    "table4": {
        "Avg TPS": "published_avg_tps",
        "Max TPS": "published_max_tps",
        "Top-10 TPS": "published_top10_tps",
        "score": "score",
    },
}
"""By table: heading of the paper -> the metric of ours that counts the same."""
PROMPTS = {"D2F-Dream-Base": "dream-base", "D2F-Dream-Instruct": "dream-instruct"}
"""Prompt formats of the models of Tables 3 and 4; the other tables' are their presets'."""


@dataclass(frozen=True, eq=False)
class Row:
    """One setting of one model on one task."""

    table: str
    model: str
    """Which checkpoint it needs, by the paper's name."""
    label: str
    """The setting, by the paper's name."""
    task: str
    preset: Preset
    options: Mapping[str, Any]
    """Decoding parameters in place of the preset's."""
    prompt: str
    published: Mapping[str, float]
    """By heading of the table."""
    certainty: str
    """Where the setting comes from."""

    @property
    def name(self) -> str:
        """Names the row in files and for --rows."""
        return f"{self.model}-{self.label}-{self.task}".replace(" ", "-")

    @property
    def ranks(self) -> tuple[int, int]:
        """Tensor-parallel and branch-parallel sizes that the row's numbers are of."""
        launch, is_split = self.preset.launch, self.table in ("table3", "table4")
        return (launch.tensor_parallel_size, launch.branch_parallel_size) if is_split else (1, 1)


def rows_of(table: str) -> list[Row]:
    """The rows of a table, in the paper's order."""
    return {"table1": _scores, "table2": _scores, "table3": _dist_summary, "table4": _dist_settings}[table](table)


def models_of(table: str) -> list[str]:
    """The models that a table has rows of."""
    return list(dict.fromkeys(row.model for row in rows_of(table)))


def _scores(table: str) -> list[Row]:
    content = read_json_object(FILE, ValueError)
    found = []
    for decoding, by_task in content[table].items():
        model, _, algorithm = decoding.partition(" ")
        for task, (tpf, score) in by_task.items():
            preset = find_preset(content["presets"][task])
            entry = content["decodings"][decoding]
            numbers = {"TPF": float(tpf), "score": float(score)}
            found.append(
                Row(table, model, algorithm, task, preset, entry["options"], preset.prompts[0].name, numbers,
                    _certainty(entry["certainty"], preset, entry["options"]))
            )  # fmt: skip
    return found


def _dist_settings(table: str) -> list[Row]:
    found = []
    for row in read_paper()["rows"]:
        numbers = {
            "Avg TPS": row["avg_tps"],
            "Max TPS": row["max_tps"],
            "Top-10 TPS": row["top10_tps"],
            "score": row["score"],
        }
        found.append(_dist_row(table, row, numbers))
    return found


def _dist_summary(table: str) -> list[Row]:
    paper = read_paper()
    speeds = {(row["setting"], row["model"], row["task"]): row for row in paper["rows"]}
    found = []
    for row in paper["tokens_per_forward"]:
        speed = speeds[row["setting"], row["model"], row["task"]]
        numbers = {
            "Avg TPS": speed["avg_tps"],
            "Max TPS": speed["max_tps"],
            "TPF": row["tpf"],
            "latency": row["latency_s"],
        }
        found.append(_dist_row(table, row, numbers))
    return found


def _dist_row(table: str, row: Mapping[str, Any], numbers: Mapping[str, float]) -> Row:
    model, setting = row["model"], row["setting"]
    preset = find_preset(setting)
    certainty = _certainty("Table 6", preset, {})
    return Row(table, model, setting, row["task"].lower(), preset, {}, PROMPTS[model], numbers, certainty)


def _certainty(source: str, preset: Preset, options: Mapping[str, Any]) -> str:
    """Where a row's setting comes from, and which decoding parameters of its preset are inferred."""
    kept = [name for name in preset.merged(options) if name not in options]
    inferred = [name for name in kept if "inferred" in preset.certainty[name]]
    return f"{source}; inferred: {', '.join(inferred)}" if inferred else source
