"""A family of an installed package, served."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_ascend import LLM
from tests.e2e.conftest import running
from tests.e2e.serving import events, installed
from tests.kestrel import as_kestrel

MODEL = Path(__file__).parents[1] / "data" / "golden" / "models" / "sdar" / "model_a"


@pytest.mark.multirank
def test_a_server_of_two_ranks_answers_as_sdar(tmp_path: Path) -> None:
    """No process registers it: they find the entry point. ``ep_size`` is a field of SDAR."""
    path = as_kestrel(MODEL, tmp_path / "kestrel")
    body = {"prompt": [5, 6, 7], "max_tokens": 32, "ignore_eos": True}
    flags = ("--model", str(path), "--tensor-parallel-size", "2")
    with running(*flags, env=installed("kestrel", tmp_path)) as server:
        answer = server.http.post("/v1/diffusion/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = "".join(server.stderr.seen)
    warning = f"{path}/config.json: not known for model_type 'Kestrel', so without effect: {{'ep_size': 1}}"
    assert said.count(warning) == 1
    llm = LLM(MODEL)
    expected = llm.generate([[5, 6, 7]], llm.params(max_new_tokens=32, ignore_eos=True), quiet=True)[0]
    assert events(answer.text)[-1]["token_ids"] == list(expected.token_ids)
