"""Sampled answers: seeds that are drawn and returned, and tokens that follow the model's distribution."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests.categorical import SAMPLED, SAMPLED_FIELDS, assert_follows_the_distribution, write_categorical
from tests.e2e.conftest import ServerProcess, running
from tests.tiny import VOCAB_SIZE, write_tokenizer

PROMPT = [1, 2, 3]
ASKED = {"prompt": "hello", "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_categorical(tmp_path_factory.mktemp("categorical"), VOCAB_SIZE)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, seed=1)


def test_together_and_alone_tokens_follow_the_distribution(llm: LLM) -> None:
    together = llm.generate([PROMPT] * 1000, SAMPLED, quiet=True)
    alone = [llm.generate([PROMPT], SAMPLED, quiet=True)[0] for _ in range(250)]
    assert_follows_the_distribution([token for output in together for token in output.token_ids])
    assert_follows_the_distribution([token for output in alone for token in output.token_ids])


def test_restricted_sampling_follows_the_restricted_distribution(llm: LLM) -> None:
    for limit in ({"top_k": 3}, {"top_p": 0.6}):
        params = DecodingParams(**{**SAMPLED_FIELDS, **limit})
        outputs = llm.generate([PROMPT] * 500, params, quiet=True)
        assert_follows_the_distribution([token for output in outputs for token in output.token_ids], kept=3)


def test_equal_requests_differ_and_their_seeds_repeat_them(path: Path) -> None:
    llm, other = LLM(path), LLM(path)
    params = DecodingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 4, params, quiet=True)
    outputs += [llm.generate([PROMPT], params, quiet=True)[0] for _ in range(3)]
    assert len({output.token_ids for output in outputs}) == len({output.seed for output in outputs}) == 7
    for output in outputs:
        seed = output.seed
        repeated = DecodingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True, seed=seed)
        assert other.generate([PROMPT], repeated, quiet=True)[0].token_ids == output.token_ids
    assert llm.generate([PROMPT], DecodingParams(max_new_tokens=4), quiet=True)[0].seed is None


def test_the_engines_seed_fixes_the_answers_to_requests_in_the_same_order(path: Path) -> None:
    params = DecodingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)

    def answers(**options: Any) -> list[tuple[int, ...]]:
        return [output.token_ids for output in LLM(path, **options).generate([PROMPT] * 3, params, quiet=True)]

    assert answers(seed=5) == answers(seed=5)
    assert answers(seed=5) != answers(seed=6)
    assert answers() != answers()


def test_a_server_draws_seeds_and_returns_them(server: ServerProcess) -> None:
    choices = [server.http.post("/v1/completions", json=ASKED).json()["choices"][0] for _ in range(4)]
    batch = server.http.post("/v1/completions", json={**ASKED, "prompt": ["hello"] * 3, "n": 2}).json()
    choices += batch["choices"]
    assert len({choice["text"] for choice in choices}) == len({choice["seed"] for choice in choices}) == 10
    for choice in choices:
        again = server.http.post("/v1/completions", json={**ASKED, "seed": choice["seed"]}).json()["choices"][0]
        assert again["text"] == choice["text"]
    streamed = server.http.post("/v1/completions", json={**ASKED, "seed": 7, "stream": True})
    parts = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [part["choices"][0]["seed"] for part in parts] == [None] * (len(parts) - 1) + [7]
    greedy = server.http.post("/v1/completions", json={**ASKED, "temperature": 0}).json()["choices"][0]
    assert greedy["seed"] is None


def test_the_log_and_the_servers_seed(path: Path) -> None:
    def answers(seed: str | None) -> tuple[list[str], int, list[int]]:
        arguments = ["--model", str(path)] + (["--seed", seed] if seed else [])
        with running(*arguments) as process:
            texts = [process.http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] for _ in range(2)]
            in_effect = process.http.get("/server_info").json()["backend"]["seed"]
            process.stop(signal.SIGTERM)
        lines = [json.loads(line) for line in process.stderr.seen if line.startswith('{"event": "finished"')]
        return texts, in_effect, [seed for line in lines for seed in line["seeds"]]

    texts, in_effect, logged = answers("9")
    assert in_effect == 9
    assert len(set(texts)) == len(set(logged)) == 2
    assert answers("9") == (texts, in_effect, logged)
