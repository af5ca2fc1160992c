"""What the samples of each setting come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.eval.metrics import Spread, measure, over_runs
from scripts.eval.samples import Sample, SampleFile, Setting


@dataclass(frozen=True)
class Result:
    """What came of one setting."""

    setting: Setting
    samples: tuple[Sample, ...]
    metrics: dict[str, Spread | None]
    num_runs: int

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
    return found
