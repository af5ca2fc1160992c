"""The example of a decoding strategy in the engine: its rows share steps with those of other requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.near_first.near_first import NearFirst
from lopa_ascend import register_decoding
from lopa_ascend.config import DecodingParams, EngineConfig, decodings
from lopa_ascend.engine.engine import Engine
from tests.e2e import test_batching as batching
from tests.e2e.batching import decisions, run
from tests.tiny import write_dream


def test_its_rows_are_batched_with_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding("near_first", NearFirst)
    path = write_dream(tmp_path, eos_token_id=batching.EOS, hidden=64, heads=4, kv_heads=2)
    engine = Engine(EngineConfig(model=str(path), enable_prefix_caching=False))
    rng = random.Random(3)
    choices = [
        DecodingParams(decoding="near_first", num_branches=k, block_size=8, max_new_tokens=40, tau_conf=0.3)
        for k in (2, 5)
    ]
    asked = [([rng.randrange(4, 200) for _ in range(20)], choices[i % 2]) for i in range(6)] + batching.requests(0, 5)
    rng.shuffle(asked)
    outputs = [run(engine, [one])[0] for one in asked]
    alone = [decisions(output) for output in outputs]
    steps = engine.stats().num_steps
    assert [decisions(output) for output in run(engine, asked)] == alone
    assert engine.stats().num_steps - steps < steps / 2
    own = [output for output, (_, params) in zip(outputs, asked, strict=True) if params.decoding == "near_first"]
    assert {1, 3, 6} <= {len(record.branches) for output in own for record in output.trace or ()}
