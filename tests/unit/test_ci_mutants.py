"""ci.mutants on a stand-in for cosmic-ray, which only its own extra installs."""

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ci import mutants
from ci.mutants import Score, Target, run

TARGET = Target(("module.py",), ("test_module.py",))


class Outcome(enum.Enum):
    SURVIVED = "survived"
    KILLED = "killed"
    INCOMPETENT = "incompetent"


def result(outcome: Outcome | None) -> SimpleNamespace:
    return SimpleNamespace(test_outcome=outcome, diff="- a\n+ b")


KILLED = result(Outcome.KILLED)


@pytest.fixture
def cosmic_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets what cosmic-ray does: the results that it has of three mutants, and its exit status."""
    package = tmp_path / "cosmic_ray"
    package.mkdir()
    (package / "__init__.py").touch()
    work_item = ModuleType("cosmic_ray.work_item")
    work_item.TestOutcome = Outcome  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cosmic_ray", ModuleType("cosmic_ray"))
    monkeypatch.setitem(sys.modules, "cosmic_ray.work_item", work_item)

    def runs(results: list[SimpleNamespace], status: int = 0) -> None:
        (package / "cli.py").write_text(f"import sys\nsys.exit({status} if sys.argv[1] == 'exec' else 0)\n")
        monkeypatch.setattr(mutants, "_duration", lambda *_: 1.0)
        monkeypatch.setattr(mutants, "_choose", lambda *_: {"1", "2", "3"})
        monkeypatch.setattr(mutants, "_results", lambda *_: results)

    return runs


def test_all_targets_are_there():
    files = {file for target in mutants.TARGETS.values() for file in (*target.modules, *target.tests)}
    assert [file for file in sorted(files) if not (mutants.ROOT / file).is_file()] == []


def test_mutants_without_a_verdict_are_not_killed(cosmic_ray, tmp_path: Path):
    cosmic_ray([result(Outcome.KILLED), result(Outcome.SURVIVED), result(Outcome.INCOMPETENT)])
    score = run(TARGET, tmp_path, 3, 0, tmp_path / "survivors.diff")
    assert score == Score(killed=1, survived=1, untested=1)
    assert score.share == 0.5
    assert (tmp_path / "survivors.diff").read_text() == "- a\n+ b"
    assert mutants._row("module", score + Score(1, 0, 1)) == "| module | 5 | 2 | 1 | 2 | 67% |"


@pytest.mark.parametrize(
    ("num_results", "status", "message"),
    [
        (1, 1, "cosmic-ray ended with status 1 and 1 results of 3 mutants"),
        (2, 0, "cosmic-ray ended with status 0 and 2 results of 3 mutants"),
        (3, 1, "cosmic-ray ended with status 1 and 3 results of 3 mutants"),
    ],
)
def test_a_run_that_ends_early_has_no_score(cosmic_ray, tmp_path: Path, num_results: int, status: int, message: str):
    cosmic_ray([KILLED] * num_results, status)
    with pytest.raises(RuntimeError, match=message):
        run(TARGET, tmp_path, 3, 0, tmp_path / "survivors.diff")
    assert not (tmp_path / "survivors.diff").exists()
