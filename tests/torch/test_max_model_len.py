"""The length of requests that an engine takes by default."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lopa_ascend.config import EngineConfig
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.prepare import choose_max_model_len
from tests.dream_checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("positions", "asked", "expected", "is_told"),
    [(2048, None, 2048, False), (131072, None, 8192, True), (131072, 65536, 65536, False)],
)
def test_a_model_for_long_texts_gets_a_length_that_a_server_can_use(
    positions: int, asked: int | None, expected: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = replace(open_checkpoint(DEMO_MODEL).config, max_position_embeddings=positions)
    with caplog.at_level(logging.INFO):
        assert choose_max_model_len(EngineConfig(max_model_len=asked), model) == expected
    assert ("max_model_len is 8192; the model allows up to 131072 positions" in caplog.text) == is_told
