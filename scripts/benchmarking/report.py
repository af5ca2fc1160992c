"""Writes what a benchmark has found: a CSV file with everything, and a Markdown table for people."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.benchmarking.metrics import METRICS, Spread, accuracy_under_parallelism, measure, over_runs
from scripts.benchmarking.samples import Sample, SampleFile
from scripts.benchmarking.settings import Setting

EAGER = "eager_share"
"""Shown only if a setting made forward passes outside compiled steps: then its speed is not that of compiled steps."""
SHOWN = (
    ("published_avg_tps", "Avg TPS, published", ".1f"),
    ("published_max_tps", "Max TPS, published", ".1f"),
    ("published_top10_tps", "Top-10 TPS, published", ".1f"),
    ("published_tpf", "TPF, published", ".2f"),
    ("user_avg_tps", "Avg TPS, user", ".1f"),
    ("user_tpf", "TPF, user", ".2f"),
    ("user_latency", "latency, s", ".3f"),
    ("outside_share", "outside forward", ".1%"),
    (EAGER, "eager steps", ".0%"),
    ("score", "score", ".1f"),
)
"""Metric, heading and format of the columns of the Markdown table."""
ON_A_CURVE = ("tau_conf", "tau_act")
"""Parameters that differ between the points of one curve of accuracy and TPF."""


@dataclass(frozen=True)
class Result:
    """What came of one setting."""

    setting: Setting
    samples: tuple[Sample, ...]
    metrics: dict[str, Spread | None]
    num_runs: int
    aup: float | None = None
    """AUP of the curve that this setting forms together with the settings that differ from it in thresholds alone; None
    if there are no others."""

    def value(self, name: str) -> float:
        """The median of a metric that every run has."""
        spread = self.metrics[name]
        assert spread is not None
        return spread.median


def results(settings: Sequence[Setting], file: SampleFile, num_problems: int) -> list[Result]:
    """What the file says of each setting. Runs that were not finished do not count.

    Args:
        num_problems: answers of a whole run.
    """
    found = []
    for setting in settings:
        runs: dict[int, list[Sample]] = {}
        for sample in file.samples.values():
            if sample.setting == setting.key:
                runs.setdefault(sample.run, []).append(sample)
        whole = [samples for _, samples in sorted(runs.items()) if len(samples) == num_problems]
        if whole:
            samples = tuple(sample for samples in whole for sample in samples)
            found.append(Result(setting, samples, over_runs([measure(samples) for samples in whole]), len(whole)))
    return _with_aup(found)


def _with_aup(found: list[Result]) -> list[Result]:
    best = max((result.value("score") for result in found), default=0.0)
    curves: dict[str, list[Result]] = {}
    for result in found:
        curves.setdefault(_curve(result.setting), []).append(result)
    scores = {
        curve: accuracy_under_parallelism([(r.value("user_tpf"), r.value("score")) for r in points], best)
        for curve, points in curves.items()
        if len(points) > 1
    }
    return [replace(result, aup=scores.get(_curve(result.setting))) for result in found]


def _curve(setting: Setting) -> str:
    """Names the curve of a setting: all its parameters but the thresholds."""
    return repr({name: value for name, value in asdict(setting.params).items() if name not in ON_A_CURVE})


def write_csv(found: Sequence[Result], path: Path) -> None:
    """A row for each setting: its parameters, and each metric's median, lowest and highest value over the runs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = list(asdict(found[0].setting.params)) if found else []
        columns = [f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high")]
        writer.writerow(["setting", "runs", "answers", *names, *columns, "aup"])
        for result in found:
            cells: list[Any] = []
            for metric in METRICS:
                spread = result.metrics[metric]
                cells += ["", "", ""] if spread is None else [spread.median, spread.low, spread.high]
            parameters = asdict(result.setting.params).values()
            aup = "" if result.aup is None else result.aup
            writer.writerow([result.setting.label, result.num_runs, len(result.samples), *parameters, *cells, aup])


def markdown(found: Sequence[Result]) -> str:
    """The table for people: medians over the runs, in brackets the extremes where there are several runs."""
    eager_shares = [result.metrics[EAGER] for result in found]
    has_eager = any(share is not None and share.high > 0 for share in eager_shares)
    shown = [(metric, heading, form) for metric, heading, form in SHOWN if metric != EAGER or has_eager]
    headings = ["setting", *(heading for _, heading, _ in shown), "AUP"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for result in found:
        cells = [_cell(result.metrics[metric], form, result.num_runs) for metric, _, form in shown]
        aup = "" if result.aup is None else f"{result.aup:.0f}"
        lines.append(f"| {' | '.join([result.setting.label, *cells, aup])} |")
    return "\n".join(lines) + "\n"


def _cell(spread: Spread | None, form: str, num_runs: int) -> str:
    if spread is None:
        return ""
    text = format(spread.median, form)
    if num_runs > 1 and spread.low != spread.high:
        text += f" ({format(spread.low, form)} to {format(spread.high, form)})"
    return text
