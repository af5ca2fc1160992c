"""A rank of test_agreement.py that decides otherwise than the others, or stops: `python -m tests.dist.differing CASE
SIZES`.

SIZES are options of ``LLM`` as JSON. Rank 1 differs as CASE says; what the failure is called goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn
from unittest import mock

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.engine import engine
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.types import RowResult, SequencePlan
from tests.dist.ranks import KV_MEMORY

select = Lopa.select


def drift(self: Lopa, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
    winner, _, scores = select(self, plan, results)
    other = (winner + 1) % len(results)
    return other, self.branches[other], scores


def hang(self: Lopa, plan: SequencePlan, results: Sequence[RowResult]) -> NoReturn:
    time.sleep(3600)
    raise AssertionError("nobody has ended this rank")


def main() -> None:
    case, sizes = sys.argv[1], json.loads(sys.argv[2])
    differs = os.environ["RANK"] == "1"
    if differs and case != "seed":
        mock.patch.object(Lopa, "select", {"winner": drift, "hang": hang}[case]).start()
    mock.patch.object(engine, "AGREEMENT_INTERVAL", 1).start()
    seed = int(differs and case == "seed")
    try:
        sizes |= {"kv_cache_memory": KV_MEMORY}
        llm = LLM(**sizes, distributed_timeout_seconds=2, seed=seed)
        # One position a pass: many passes.
        llm.generate("hi", DecodingParams(max_new_tokens=64, tau_conf=1.0, ignore_eos=True), quiet=True)
    except RankError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
