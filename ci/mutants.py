"""Changes the code in small ways, one at a time, and counts the changes that no test notices.

    python -m ci.mutants                            every target, 60 mutants of each
    python -m ci.mutants scheduler --mutants 0      all mutants of one target

A target is some modules and the tests that hold them. cosmic-ray makes the mutants (pip install -e '.[ci]'):
another operator, number or comparison, a condition negated, a loop left out. The tests run once for each
mutant, in a copy of the last commit. Prints a Markdown table, and writes the mutants that survived to --out as diffs.
A mutant survives because a test is missing, or because the change has no effect. Mutants for which cosmic-ray has no
such verdict, as where the changed code could not be run, are untested and have no part in the score.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lopa_ascend.config.settings import HelpFormatter
from scripts.arguments import number_from

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=first-failure")
TIMEOUT = 5.0
"""A mutant is killed after so many times the duration of the unchanged tests."""
HEADER = "| target | mutants | killed | survived | untested | score |\n|---|---|---|---|---|---|"
WITHOUT_EFFECT = re.compile(
    r"core/(ReplaceBinaryOperator_BitOr_\w+|ReplaceComparisonOperator_(Eq_Is|Is_Eq|NotEq_IsNot|IsNot_NotEq))"
)
"""Operators of cosmic-ray that are left out: "|" stands in type annotations, which nothing evaluates, and small
numbers and None are equal if they are the same object."""
DATACLASS = re.compile(r"\s*@dataclass\b")
"""Lines that are left out: the flags of these decorators save memory and refuse assignments."""


@dataclass(frozen=True)
class Target:
    """Modules, and the tests that are to hold them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = {
    "decode": Target(
        ("lopa_ascend/decode/blocks.py", "lopa_ascend/decode/strategy.py", "lopa_ascend/decode/block_pipeline.py")
        + ("lopa_ascend/decode/lopa.py", "lopa_ascend/decode/branch_scores.py", "lopa_ascend/decode/filters.py"),
        ("tests/unit/test_blocks.py", "tests/unit/test_lopa.py", "tests/unit/test_filters.py")
        + ("tests/unit/test_policy.py", "tests/unit/test_canvas.py", "tests/unit/test_verified.py")
        + ("tests/unit/test_block_causal.py", "tests/e2e/test_golden.py", "tests/e2e/test_golden_families.py")
        + ("tests/unit/test_grammar_decoding.py",),
    ),
    "scheduler": Target(
        ("lopa_ascend/engine/scheduler.py", "lopa_ascend/engine/turns.py"),
        ("tests/unit/test_scheduler.py", "tests/unit/test_turns.py", "tests/unit/test_prefix_cache.py")
        + ("tests/unit/test_block_prefix_cache.py",),
    ),
    "pages": Target(
        ("lopa_ascend/kv/pages.py", "lopa_ascend/kv/prefix_cache.py"),
        ("tests/unit/test_pages.py", "tests/unit/test_prefix_cache.py", "tests/unit/test_scheduler.py")
        + ("tests/unit/test_block_prefix_cache.py",),
    ),
    "placement": Target(("lopa_ascend/parallel/placement.py",), ("tests/unit/test_placement.py",)),
    "policy": Target(
        ("lopa_ascend/graph/policy/rows.py", "lopa_ascend/graph/policy/advance.py"),
        ("tests/unit/test_policy.py", "tests/torch/test_policy_tensors.py"),
    ),
    "graphs": Target(
        ("lopa_ascend/graph/executor.py", "lopa_ascend/graph/window.py", "lopa_ascend/graph/seats.py"),
        ("tests/e2e/test_graph.py", "tests/e2e/test_graph_windows.py"),
    ),
}


@dataclass
class Score:
    """What became of the mutants of a target."""

    killed: int = 0
    survived: int = 0
    untested: int = 0
    """Neither killed nor survived, such as cosmic-ray's "incompetent" ones."""

    @property
    def share(self) -> float:
        """Share of the tested mutants that tests noticed."""
        return self.killed / max(1, self.killed + self.survived)

    def __add__(self, other: Score) -> Score:
        return Score(self.killed + other.killed, self.survived + other.survived, self.untested + other.untested)


def copy_of_last_commit(folder: Path) -> None:
    """Writes the files of the last commit; changes that are not committed stay out."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def run(target: Target, folder: Path, count: int, seed: int, survivors: Path) -> Score:
    """Tests mutants of a target in a copy of the project.

    Args:
        target: what is changed, and the tests.
        folder: the copy.
        count: mutants, chosen at random; 0 for all.
        seed: of the choice.
        survivors: file for the diffs of those that no test noticed.

    Raises:
        RuntimeError: the tests fail without any change, or cosmic-ray did not get through all chosen mutants.
    """
    tests = [sys.executable, *PYTEST, *target.tests]
    config, session = folder / "mutants.toml", folder / "mutants.sqlite"
    config.write_text(
        "[cosmic-ray]\n"
        f"module-path = {json.dumps(list(target.modules))}\n"
        f"timeout = {TIMEOUT * _duration(tests, folder):.1f}\n"
        f"test-command = {json.dumps(' '.join(tests))}\n"
        "excluded-modules = []\n\n"
        "[cosmic-ray.distributor]\nname = 'local'\n"
    )
    cosmic_ray = [sys.executable, "-m", "cosmic_ray.cli"]
    files = [str(config), str(session)]
    subprocess.run([*cosmic_ray, "init", *files], cwd=folder, check=True)
    chosen = _choose(session, folder, count, seed)
    process = subprocess.Popen([*cosmic_ray, "exec", *files], cwd=folder)
    with tqdm(total=len(chosen), disable=None, leave=False) as bar:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            bar.update(len(_results(session, chosen)) - bar.n)
    results = _results(session, chosen)
    if process.returncode or len(results) != len(chosen):
        found = f"{len(results)} results of {len(chosen)} mutants"
        raise RuntimeError(f"cosmic-ray ended with status {process.returncode} and {found}")
    return _score(results, survivors)


def _choose(session: Path, folder: Path, count: int, seed: int) -> set[str]:
    """The job ids of the mutants that are tested; the others are marked as skipped."""
    from cosmic_ray.work_db import WorkDB, use_db  # of the extra "ci"
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(str(session), WorkDB.Mode.open) as db:
        items = list(db.work_items)
        usable = [item for item in items if all(_may_have_effect(mutation, folder) for mutation in item.mutations)]
        if count:
            usable = random.Random(seed).sample(usable, min(count, len(usable)))
        chosen = {item.job_id for item in usable}
        for item in items:
            if item.job_id not in chosen:
                db.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    return chosen


def _may_have_effect(mutation: Any, folder: Path) -> bool:
    """Whether a test could notice one of cosmic-ray's mutations of the copy in a folder."""
    line = (folder / mutation.module_path).read_text().split("\n")[mutation.start_pos[0] - 1]
    return not (WITHOUT_EFFECT.fullmatch(mutation.operator_name) or DATACLASS.match(line))


def _results(session: Path, chosen: set[str]) -> list[Any]:
    """cosmic-ray's results of the chosen mutants, as far as there are any."""
    from cosmic_ray.work_db import WorkDB, use_db

    with use_db(str(session), WorkDB.Mode.open) as db:
        return [result for job_id, result in db.results if job_id in chosen]


def _score(results: list[Any], survivors: Path) -> Score:
    """Counts the results, and writes the diffs of the mutants that no test noticed."""
    from cosmic_ray.work_item import TestOutcome

    survived = [result.diff or "" for result in results if result.test_outcome is TestOutcome.SURVIVED]
    survivors.write_text("\n\n".join(survived))
    killed = sum(result.test_outcome is TestOutcome.KILLED for result in results)
    return Score(killed, len(survived), len(results) - killed - len(survived))


def _duration(tests: list[str], folder: Path) -> float:
    """Seconds that the unchanged tests take."""
    start = time.monotonic()
    done = subprocess.run(tests, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests fail without a change:\n{done.stdout[-3000:]}")
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ci.mutants", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument(
        "--mutants", type=number_from(0), default=60, metavar="N", help="mutants of each target; 0: all (default: 60)"
    )
    parser.add_argument(
        "--seed", type=number_from(0), default=0, metavar="N", help="seed of the choice of mutants (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "mutants",
        metavar="DIR",
        help="folder for the diffs (default: build/mutants)",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    print(HEADER)
    total = Score()
    for name in args.targets or TARGETS:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            copy_of_last_commit(folder)
            score = run(TARGETS[name], folder, args.mutants, args.seed, args.out / f"{name}.diff")
        total += score
        print(_row(name, score), flush=True)
    print(_row("all", total))


def _row(name: str, score: Score) -> str:
    num_mutants = score.killed + score.survived + score.untested
    return f"| {name} | {num_mutants} | {score.killed} | {score.survived} | {score.untested} | {score.share:.0%} |"


if __name__ == "__main__":
    main()
