"""What every rank of tests/dist/test_memory.py runs: `python -m tests.dist.memory MODEL OUT`.

Rank r has memory for 40 - 10 * r pages. What the engine says of its pages and rows goes to OUT with the rank after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lopa_ascend import LLM, DecodingParams

NUM_PAGES, LESS = 40, 10
NUM_LOOKAHEADS = 4


def main() -> None:
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lopa_ascend.engine.engine.choose_num_pages", lambda *_: NUM_PAGES - LESS * rank)
        with LLM(sys.argv[1], branch_parallel_size=2) as llm:
            params = DecodingParams(num_branches=NUM_LOOKAHEADS, max_new_tokens=40, block_size=8, ignore_eos=True)
            output = llm.generate([[1, 2, 3]], params, trace=True, quiet=True)[0]
            stats = llm.engine.stats()
            seen = {
                "pages": [stats.num_pages, llm.engine.limits.num_pages, llm.engine.runner.pool.num_pages],
                "rows": [len(record.branches) for record in output.trace or ()],
                "num_rows": stats.num_rows,
                "idle_rows": stats.idle_rows,
            }
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
