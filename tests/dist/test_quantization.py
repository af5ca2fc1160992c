"""W8A8 and fp8 on several ranks: branch parallelism changes no token, nor does tensor parallelism of whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests.dist import ranks
from tests.dist.generate import shown
from tests.tiers import slow_but
from tests.tiny import write_dream, write_tokenizer

PROMPTS = [[5, 6, 7], list(range(20, 60)), [300, 2, 300, 9]]
PARAMS: dict[str, Any] = {
    "num_branches": 3,
    "max_new_tokens": 40,
    "block_size": 8,
    "tau_conf": 0.5,
    "ignore_eos": True,
}
WHOLE_ROWS = {"quantization_exclude": ["o_proj", "down_proj"]}
"""Layers that are split by outputs alone: every rank has the whole row that a scale belongs to."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return write_dream(path, hidden=64, intermediate=96, layers=3, scale=0.1)


def on_ranks(path: Path, tp: int, bp: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
    options |= {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    requests = [{"prompt": prompt, "params": PARAMS} for prompt in PROMPTS]
    return ranks.generate(tp * bp, [{"model": str(path), "options": options, "requests": requests}], folder)[0]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("quantization", "tp", "bp"), slow_but([("w8a8", 2, 1), ("w8a8", 2, 2), ("fp8", 2, 1)], [("w8a8", 2, 2)])
)
def test_layers_that_have_whole_rows_give_the_same_tokens(
    path: Path, quantization: str, tp: int, bp: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"quantization": quantization, **WHOLE_ROWS}
    llm, params = LLM(path, **options), DecodingParams(**PARAMS)
    expected = [
        shown(output) for prompt in PROMPTS for output in llm.generate([prompt], params, trace=True, quiet=True)
    ]
    outputs = on_ranks(path, tp, bp, tmp_path, **options)
    for output, alone in zip(outputs, expected, strict=True):
        assert output["tokens"] == list(alone["tokens"])
        assert output["forwards"] == alone["forwards"]
        assert output["winners"] == alone["winners"]


@pytest.mark.multirank
@pytest.mark.parametrize("tp", slow_but([1, 2], [1]))
def test_branch_parallelism_changes_no_token(path: Path, tp: int, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (on_ranks(path, tp, bp, folder, quantization="w8a8") for bp, folder in zip((1, 2), folders, strict=True))
    assert [output["tokens"] for output in one] == [output["tokens"] for output in two]
    assert [output["forwards"] for output in one] == [output["forwards"] for output in two]
