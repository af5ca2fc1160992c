"""Runs requests on an engine, and says what of their outputs must not depend on the neighbours."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend import DecodingParams
from lopa_ascend.engine.engine import Engine
from lopa_ascend.text.output_stream import OutputStream
from lopa_ascend.types import GenerationOutput


def run(
    engine: Engine, asked: list[tuple[list[int], DecodingParams]], arrivals: list[int] | None = None
) -> list[GenerationOutput]:
    """All requests together; request i arrives before step arrivals[i]."""
    arrivals = arrivals or [0] * len(asked)
    streams = {str(i): OutputStream(prompt, params, None) for i, (prompt, params) in enumerate(asked)}
    outputs: dict[str, GenerationOutput] = {}
    step = 0
    while len(outputs) < len(asked):
        for i, (prompt, params) in enumerate(asked):
            if arrivals[i] == step:
                engine.add(str(i), prompt, params, trace=True)
        for update in engine.step():
            assert update.error is None
            progress = streams[update.request_id].push(update)
            if progress.output is not None:
                outputs[update.request_id] = progress.output
        step += 1
    return [outputs[str(i)] for i in range(len(asked))]


def one_at_a_time(engine: Engine) -> Engine:
    """Lets an engine read the results of each compiled step before it launches the next one."""
    executor = engine.runner.graphs
    assert executor is not None
    executor.graphs = replace(executor.graphs, ahead=False)
    return engine


def decisions(output: GenerationOutput) -> object:
    """Everything that a neighbour could disturb, to the last bit."""
    assert output.trace is not None
    trace = [(r.span, r.cache_length, r.winner, r.fills, r.branches) for r in output.trace]
    return output.token_ids, output.max_probs, output.finish_reason, output.num_forwards, trace
