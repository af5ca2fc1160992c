"""What every rank of a test runs: `python -m tests.dist.generate JOB OUT`.

JOB is a JSON file with a list of {"model", "options", "requests": [{"prompt", "params"}], "together", "eager_steps"};
requests with "continuations" are scored besides. The outputs go to OUT with this process's rank, or 0, after it. Graphs
are not compiled, they run as the functions that they are of. After every step the ranks compare what they have decided.
With "eager_steps" a rank fails unless graphs have decoded, and left just these steps to the eager executor (see
``GraphStats``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import GraphParams
from lopa_ascend.engine import engine
from lopa_ascend.graph import setup
from lopa_ascend.types import GenerationOutput
from tests import kestrel, research


def shown(output: GenerationOutput) -> dict[str, Any]:
    """What ranks and engines must agree on."""
    return {
        "tokens": output.token_ids,
        "forwards": output.num_forwards,
        "positions": output.num_positions,
        "reason": output.finish_reason,
        "winners": [record.winner for record in output.trace or ()],
        "fills": [[(fill.position, fill.token) for fill in record.fills] for record in output.trace or ()],
        "cached": output.cached_tokens,
        "seed": output.seed,
        "alternatives": output.alternatives,
    }


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """All requests, one after the other or ``together``, which takes different parameters in one batch."""
    options = job["options"]
    if "graph_params" in options:
        options = {**options, "graph_params": GraphParams(**options["graph_params"])}
    decodings = research.registered() if job.get("research") else nullcontext()
    families = kestrel.registered() if job.get("kestrel") else nullcontext()
    with decodings, families, LLM(job["model"], **options) as llm:
        requests = [(request["prompt"], DecodingParams(**request["params"])) for request in job["requests"]]
        if job.get("together"):
            outputs = decode_together(llm, requests)
        else:
            outputs = [llm.generate([prompt], params, trace=True, quiet=True)[0] for prompt, params in requests]
        if "eager_steps" in job:
            graphs = llm.engine.stats().graphs
            assert graphs is not None
            assert graphs.num_steps > 0, graphs
            assert graphs.eager_steps == job["eager_steps"], graphs
        scored = [request for request in job["requests"] if "continuations" in request]
        scores = [{"scores": llm.score(request["prompt"], request["continuations"])} for request in scored]
        return [*map(shown, outputs), *scores]


def decode_together(llm: LLM, requests: Sequence[tuple[list[int], DecodingParams]]) -> list[GenerationOutput]:
    """All requests in one batch, each with its own parameters."""
    outputs: dict[int, GenerationOutput] = {}
    streams = dict(enumerate(llm.stream(prompt, params, trace=True) for prompt, params in requests))
    while streams:
        for index, stream in list(streams.items()):
            progress = next(stream)
            if progress.output is not None:
                outputs[index] = progress.output
                stream.close()
                del streams[index]
    return [outputs[index] for index in range(len(requests))]


def main() -> None:
    mock.patch.object(engine, "AGREEMENT_INTERVAL", 1).start()
    mock.patch.object(setup, "load_compiler", side_effect=lambda *_, **__: Eager()).start()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(f"{sys.argv[2]}.{os.environ.get('RANK', 0)}").write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main()
