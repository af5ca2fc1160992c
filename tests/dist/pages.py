"""What every rank of tests/dist/test_pages.py runs: `python -m tests.dist.pages JOB OUT`.

Several random requests run together, and after every step the committed keys and values of every slot of every
branch-parallel rank are compared. JOB names the model, the sizes, the window mode and write rules to leave out, one run
each.
"""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.kv.pages import PAGE_SIZE, PageTables
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.parallel.placement import Share
from lopa_ascend.runner import batch
from lopa_ascend.runner.batch import slot_mapping
from lopa_ascend.runner.eager import EagerExecutor


def leave_out_writes(patch: pytest.MonkeyPatch, kept: Callable[[Share, PageTables], set[int]]) -> None:
    """Only the slots in ``kept`` are written to."""
    whole = batch._writes

    def writes(share, row_tokens, pages):
        slots, source = whole(share, row_tokens, pages)
        live = [page for slot in kept(share, pages) for page in pages.by_slot[slot]]
        where = np.isin(slots // PAGE_SIZE, live)
        return slots[where], source[where]

    patch.setattr(batch, "_writes", writes)


def without_idle_slots(patch: pytest.MonkeyPatch) -> None:
    """A slot without a branch takes no committing write."""
    leave_out_writes(patch, lambda share, pages: set(share.slots))


def without_repeats(patch: pytest.MonkeyPatch) -> None:
    """A rank without a branch does not write what commits."""
    leave_out_writes(
        patch, lambda share, _: set(range(share.num_slots)) if any(row.masked for row in share.rows) else set()
    )


def without_sending(patch: pytest.MonkeyPatch) -> None:
    """The winner's keys and values stay where they are."""

    def broadcast(self, table, begin, end, group, hidden):
        return torch.zeros(self.model.config.hidden_size) if self.bp.rank != group else hidden.clone()

    patch.setattr(EagerExecutor, "_broadcast", broadcast)


def without_copies(patch: pytest.MonkeyPatch) -> None:
    """The other slots of a rank do not get the winner's keys and values."""
    patch.setattr(KVPool, "copy", lambda *_: None)


RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda patch: None,
    "idle slots": without_idle_slots,
    "repeats": without_repeats,
    "sending": without_sending,
    "copies": without_copies,
}


def differing(engine: Engine) -> int:
    """Slots of all ranks whose committed keys and values are not those of slot 0 here."""
    digests = []
    for sequence in engine.scheduler.running.values():
        for table in sequence.page_tables.by_slot:
            at = torch.from_numpy(slot_mapping(table, 0, sequence.num_committed))
            digests.append(zlib.crc32(engine.runner.pool.caches.flatten(2, 3)[:, :, at].numpy().tobytes()))
        digests += [digests[-len(sequence.page_tables.by_slot)]]  # slot 0's once more, to compare the others with
    gathered = engine.mesh.bp.all_gather(torch.tensor(digests or [0]), "test")
    count, first = 0, 0
    for sequence in engine.scheduler.running.values():
        last = first + len(sequence.page_tables.by_slot)
        count += int((gathered[:, first:last] != gathered[0, last]).sum())
        first = last + 1
    return count


def num_committed(engine: Engine) -> int:
    """Positions that the running sequences have committed."""
    return sum(sequence.num_committed for sequence in engine.scheduler.running.values())


def run(model: str, sizes: dict[str, int], window: str) -> dict[str, int]:
    """Decodes and compares; what was seen."""
    rng = random.Random(7)
    report = {"steps": 0, "committing": 0, "differing": 0}
    with LLM(model, enable_prefix_caching=False, **sizes) as llm:
        engine = llm.engine
        for index in range(4):
            prompt = [rng.randrange(50) for _ in range(rng.choice([5, 100, 127, 128, 200]))]
            params = DecodingParams(
                num_branches=rng.choice([0, 2, 3, 4]),
                block_size=rng.choice([8, 24]),
                max_new_tokens=96,
                tau_conf=0.6,
                tau_add=0.3,
                ignore_eos=True,
                window_attention=window,
            )
            engine.add(Request(str(index), tuple(prompt), params))
        while engine.has_work():
            before = num_committed(engine)
            engine.step()
            report["steps"] += 1
            report["committing"] += num_committed(engine) > before
            report["differing"] += differing(engine)
        report["kv_bytes"] = {t.purpose: t.num_bytes for t in engine.stats().traffic}.get("kv", 0)
    return report


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    reports = {}
    for rule in job["left_out"]:
        with pytest.MonkeyPatch.context() as patch:
            RULES[rule](patch)
            reports[rule] = run(job["model"], job["sizes"], job["window"])
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
