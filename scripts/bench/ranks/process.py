"""The ranks that are measured: starts them, and records what each of them sends or how long it computes.

`run` starts this module for each rank, with one thread each, and returns what they have recorded; there is no need to
start it by hand.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
from tqdm import tqdm

from lopa_ascend import LLM
from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.engine.ranks import follow
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, free_port
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.probe import PartTimes
from lopa_ascend.runner.scoring import HEAD_ROWS
from lopa_ascend.score.shards import columns
from lopa_ascend.types import SequencePlan, Traffic

ROOT = Path(__file__).resolve().parents[3]


class TrafficJob(msgspec.Struct, tag=True):
    """Decode requests together, as a server does. Every rank records a list of Step."""

    config: EngineConfig
    requests: list[tuple[list[int], DecodingParams]]
    """Token ids of the prompt, and parameters."""


class ScalingJob(msgspec.Struct, tag=True):
    """Decode one prompt together, several times. Every rank records a list of RankDecode."""

    config: EngineConfig
    prompt: list[int]
    """Token ids."""
    params: DecodingParams
    repetitions: int


Job = TrafficJob | ScalingJob


def run(job: Job, kind: Any) -> list[Any]:
    """Starts the ranks of a job; returns what each of them has recorded, by rank.

    Args:
        job: what the ranks do.
        kind: type of what a rank records.

    Raises:
        RuntimeError: a rank failed; its stderr says why.
    """
    size, port = job.config.world_size, free_port()
    with tempfile.TemporaryDirectory() as directory:
        task, out = Path(directory) / "job", Path(directory) / "out"
        task.write_bytes(msgspec.msgpack.encode(job))
        processes = []
        for rank in range(size):
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            environment |= Rendezvous.on_this_machine(rank, size, port).environment()
            command = [sys.executable, "-m", "scripts.bench.ranks.process", str(task), f"{out}.{rank}"]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        _wait(processes)
        return [msgspec.msgpack.decode(Path(f"{out}.{rank}").read_bytes(), type=kind) for rank in range(size)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until all processes have ended; ends the others if one fails."""
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.05)
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed:
                raise RuntimeError(f"rank {failed[0]} ended with status {processes[failed[0]].returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- traffic -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one rank sent in one step, and what the step computed."""

    traffic: list[Traffic]
    """What was sent, by purpose."""
    plans: list[SequencePlan]
    """The plans of the sequences that took part."""
    tokens: int = 0
    """Tokens that this rank computed."""
    rows: int = 0
    """Tokens among them whose hidden state after the last layer was needed."""
    scored: list[tuple[int, int]] = field(default_factory=list)
    """Rows and float32 columns of each message about this rank's part of the vocabulary."""

    def sent(self, purpose: str) -> Traffic:
        """What was sent for a purpose, possibly nothing."""
        return next((traffic for traffic in self.traffic if traffic.purpose == purpose), Traffic(purpose, 0, 0))


class Recorder:
    """Records every step of an engine."""

    def __init__(self, engine: Engine):
        self.steps: list[Step] = []
        self._engine, self._sent = engine, engine.mesh.traffic()
        self._plans: list[SequencePlan] = []
        self._tokens, self._rows = 0, 0
        self._scored: list[tuple[int, int]] = []
        engine.runner.set_probe(self._note)
        step = engine.step

        def recorded() -> Any:
            updates = step()
            self._close()
            return updates

        engine.step = recorded  # type: ignore[method-assign]

    @contextmanager
    def _note(self, part: str, work: Any) -> Iterator[None]:
        if part == "exchange":
            self._plans = list(work)
        elif part == "forward":
            self._tokens, self._rows = len(work.tokens), len(work.rows)
        elif part == "score":
            num_rows, scoring = work
            # A last piece of one row is scored as two; a token and its logit follow the columns (see shard_scores).
            score_rows = self._engine.runner.ops.score_rows or HEAD_ROWS
            self._scored.append((num_rows + (num_rows % score_rows == 1), len(columns(scoring)) + 2))
        yield

    def _close(self) -> None:
        before, self._sent = {t.purpose: t for t in self._sent}, self._engine.mesh.traffic()
        traffic = []
        for now in self._sent:
            then = before.get(now.purpose, Traffic(now.purpose, 0, 0))
            if now.calls > then.calls:
                traffic.append(Traffic(now.purpose, now.calls - then.calls, now.num_bytes - then.num_bytes))
        self.steps.append(Step(traffic, self._plans, self._tokens, self._rows, self._scored))
        self._plans, self._tokens, self._rows, self._scored = [], 0, 0, []


def traffic(job: TrafficJob) -> list[Step]:
    """Runs one rank of the job; returns its steps."""
    mesh = Mesh.join(job.config, Rendezvous.from_environment(), exit_rank)
    if mesh.rank:
        engine = Engine(job.config, mesh)
        recorder = Recorder(engine)
        follow(engine)
    else:
        engine = Engine(job.config, mesh)
        engine.lead()
        recorder = Recorder(engine)
        for index, (prompt, params) in enumerate(job.requests):
            engine.add(Request(str(index), tuple(prompt), params))
        with tqdm(total=len(job.requests), desc="problems", disable=None, leave=False) as bar:
            while engine.has_work():
                bar.update(sum(update.finish_reason is not None for update in engine.step()))
    engine.close()
    return recorder.steps


# ---- scaling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankDecode:
    """CPU seconds of one rank for one decode.

    The main thread computes everything, and sleeps while it waits for another rank.
    """

    total: float
    """All threads of the process."""
    main_thread: float
    """The main thread; the next three are parts of this."""
    forward: float
    """Forward passes of the model."""
    scores: float
    """LM head and scores."""
    exchange: float
    """The exchange of predictions between groups."""
    num_steps: int
    token_ids: tuple[int, ...]
    """The tokens that were decoded."""

    @property
    def host(self) -> float:
        """Main thread without forward passes, head and scores."""
        return self.main_thread - self.forward - self.scores

    @property
    def rest(self) -> float:
        """The host's work without the exchange: plan, layout, policy."""
        return self.host - self.exchange

    @property
    def other_threads(self) -> float:
        """Threads of gloo and torch."""
        return self.total - self.main_thread


def scaling(job: ScalingJob) -> list[RankDecode]:
    """Runs one rank of the job; returns its decodes."""
    options = {name: getattr(job.config, name) for name in EngineConfig.names()}
    with LLM(**options) as llm:
        llm.generate([job.prompt], replace(job.params, max_new_tokens=8), quiet=True)  # first calls take longer
        return [_timed_decode(llm, job) for _ in range(job.repetitions)]


def _timed_decode(llm: LLM, job: ScalingJob) -> RankDecode:
    times = PartTimes(clock=time.thread_time)
    llm.engine.runner.set_probe(times)
    process_start, thread_start = time.process_time(), time.thread_time()
    (output,) = llm.generate([job.prompt], job.params, quiet=True)
    return RankDecode(
        total=time.process_time() - process_start,
        main_thread=time.thread_time() - thread_start,
        forward=times.seconds["forward"],
        scores=times.seconds["score"],
        exchange=times.seconds["exchange"],
        num_steps=output.num_forwards,
        token_ids=output.token_ids,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, metavar="JOB", help="file with the job")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the records go")
    args = parser.parse_args()
    job = msgspec.msgpack.decode(args.job.read_bytes(), type=Job)
    noted = traffic(job) if isinstance(job, TrafficJob) else scaling(job)
    args.out.write_bytes(msgspec.msgpack.encode(noted))


if __name__ == "__main__":
    main()
