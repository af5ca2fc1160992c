"""examples/research_decodings: the engine against plain definitions on random models, and as an installed package."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from tests import reference, research
from tests.e2e import test_batching as batching
from tests.e2e.batching import decisions, run
from tests.e2e.conftest import ROOT, running
from tests.e2e.test_reference import random_params
from tests.tiers import slow_but
from tests.tiny import write_dream

EOS = 3


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with research.registered():
        yield


# ---- plain definitions -----------------------------------------------------------------------------------------------


class EntropyBound(reference.Reference):
    def accepted(self, here: list[int], predicted: dict) -> list[int]:
        own = dict(self.p.own)
        ranked = sorted(here, key=lambda q: -predicted[q][2])
        most = 0
        for n in range(1, len(ranked) + 1):
            entropies = [-predicted[q][2] for q in ranked[:n]]
            room = own["acceptance_gamma"] - (sum(entropies) - max(entropies))
            if n > 1:  # one position alone is 0 from the largest entropy, exactly
                self.near(room)
            if room >= 0:
                most = n
        if 0 < most < len(ranked):
            self.near(predicted[ranked[most - 1]][2] - predicted[ranked[most]][2])
        return sorted(ranked[:most])


class Frechet(reference.Reference):
    def accepted(self, here: list[int], predicted: dict) -> list[int]:
        delta = dict(self.p.own)["acceptance_delta"]
        return self.most(here, predicted, lambda c: max(0.0, sum(c) - (len(c) - 1)) - (1 - c[-1]) - delta)


class OtherScores(reference.Reference):
    def predict(self, logits: torch.Tensor, x: list[int]) -> dict[int, tuple[int, float, float]]:
        predicted = super().predict(logits, x)
        rows = {q: self.last if q == self.length else logits[q - 1 - self.length] for q in predicted}
        self.entropies = [
            -float((row.softmax(-1) * row.log_softmax(-1)).sum()) for row in rows.values() if row is not None
        ]
        return predicted

    def score(self, branch: dict, predicted: dict) -> float:
        if not predicted:
            return math.inf
        if self.p.decoding == "entropy_score":
            return -sum(self.entropies) / len(self.entropies)
        return ("draft" in branch) + sum(min(1.0, top / self.p.tau_conf) for _, top, _ in predicted.values())

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        winner = scores.index(max(scores))
        for other in scores:
            # Equal numbers of positions that pass are equal. The engine rounds to a grid of 2^-16 for each position.
            if other != scores[winner] and scores[winner] - other < 0.001:
                self.near(0)
        return winner

    def spawn(self, winner: dict, predicted: dict, fills: list[tuple[int, int]]) -> list[dict]:
        branches = super().spawn(winner, predicted, fills)
        branches[-1].pop("draft", None)
        return branches


class Pivot(reference.Reference):
    """LoPA with other branches and another score, from whole distributions."""

    pivot: int | None = None
    rows: dict[int, torch.Tensor]

    def predict(self, logits: torch.Tensor, x: list[int]) -> dict[int, tuple[int, float, float]]:
        predicted = super().predict(logits, x)
        assert self.last is not None or self.length not in predicted
        rows = {q: self.last if q == self.length else logits[q - 1 - self.length] for q in predicted}
        self.rows = {q: row.double().softmax(-1) for q, row in rows.items() if row is not None}
        return predicted

    def score(self, branch: dict, predicted: dict) -> float:
        branch["rows"] = self.rows
        others = [self.entropy(row) for q, row in self.rows.items() if q != self.pivot]
        mean = sum(others) / len(others) if others else 0.0
        score = -mean + dict(self.p.own)["pivot_weight"] * math.log(branch.get("probability", 1.0))
        return self.p.creation_weight * branch["creation"] + (1 - self.p.creation_weight) * score

    def entropy(self, row: torch.Tensor) -> float:
        return -float((row * row.log()).sum())

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        winner = scores.index(max(scores))
        if any(other != scores[winner] and scores[winner] - other < 1e-4 for other in scores):
            self.near(0)  # the engine rounds to a grid of 2^-16
        return winner

    def own_tokens(self, winner: dict, predicted: dict, filled: set[int]) -> list[tuple[int, int, float]]:
        for name in ("draft", "probability"):
            winner.pop(name, None)
        rows, k, least = winner.pop("rows"), self.p.num_branches, dict(self.p.own)["pivot_mass"]
        block = next((block for block in winner["blocks"] if self.masks(winner, block)), None)
        entropies, best = {}, {}
        for q, row in rows.items():
            if block is None or q in filled or not block["start"] <= q < block["end"]:
                continue
            allowed = row.clone()
            allowed[self.mask] = 0
            best[q] = allowed.sort(descending=True)
            mass = float(best[q].values[:k].sum())
            self.near(mass - least)
            if mass >= least:
                entropies[q] = self.entropy(row)
        self.pivot = max(entropies, key=lambda q: entropies[q], default=None)
        if self.pivot is None:
            return []
        for q in entropies.keys() - {self.pivot}:
            self.near(entropies[self.pivot] - entropies[q])
        probs, tokens = best[self.pivot]
        for first, second in zip(probs[:k].tolist(), probs[1 : k + 1].tolist(), strict=True):
            self.near(first - second)
        found = []
        for rank, (token, prob) in enumerate(zip(tokens[:k].tolist(), probs[:k].tolist(), strict=True)):
            if rank == 0 or token not in self.eos:
                found.append((self.pivot, token, prob if self.p.confidence == "max_prob" else -entropies[self.pivot]))
        return found

    def spawn(self, winner: dict, predicted: dict, fills: list[tuple[int, int]]) -> list[dict]:
        branches = super().spawn(winner, predicted, fills)
        if len(branches) == 1:
            self.pivot = None
        for branch in branches[:-1]:
            branch["probability"] = float(self.won[branch["draft"][0]][branch["draft"][1]])
        return branches

    def fill(self, branch: dict, predicted: dict) -> list[tuple[int, int]]:
        self.won = branch["rows"]
        return super().fill(branch, predicted)


def random_request(rng: random.Random, decoding: str, **changes: Any) -> tuple[list[int], DecodingParams]:
    prompt = [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127]))]
    return prompt, random_params(rng).changed(branch_score="mean", decoding=decoding, eos_token_id=EOS, **changes)


def compare(folder: Path, seed: int, definition: type[reference.Reference], request: Any, vocab_size: int = 60) -> None:
    """The engine and a plain definition decode one request, on a random model."""
    prompt, params = request
    write_dream(folder, seed=seed, vocab_size=vocab_size, layers=2)
    llm = LLM(folder, enable_prefix_caching=False)
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    expected = definition(reference.load(folder), prompt, params, llm.config.mask_token_id, {EOS}).run()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens


@pytest.mark.parametrize("seed", slow_but(range(100, 112), range(100, 106)))
def test_acceptance_rules(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    branches = {"num_branches": rng.choice([0, 2, 5])}
    if seed % 2:
        bound = ("acceptance_gamma", rng.choice([0.01, 0.5, 3.0, 9.0]))
        request = random_request(rng, "entropy_bound", own=(bound,), confidence="neg_entropy", **branches)
        compare(tmp_path, seed, EntropyBound, request)
    else:
        bound = ("acceptance_delta", rng.choice([0.0, 0.25, 0.6]))
        confidence = rng.choice(["max_prob", "margin"])
        request = random_request(rng, "frechet", own=(bound,), confidence=confidence, **branches)
        compare(tmp_path, seed, Frechet, request)


@pytest.mark.parametrize("decoding", ["expected_score", "entropy_score"])
@pytest.mark.parametrize("seed", slow_but(range(500, 510), range(500, 502)))
def test_branch_scores(seed: int, decoding: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    confidence, branches = rng.choice(["max_prob", "neg_entropy"]), rng.choice([2, 4, 7])
    request = random_request(rng, decoding, confidence=confidence, num_branches=branches, creation_weight=0.0)
    compare(tmp_path, seed, OtherScores, request)


def over_tokens(rng: random.Random) -> tuple[list[int], DecodingParams]:
    branches = rng.choice([1, 2, 4, 7])
    own = (("pivot_mass", rng.choice([0.0, 0.2, 0.4])), ("pivot_weight", rng.choice([0.0, 0.01, 0.05])))
    confidence = rng.choice(["max_prob", "neg_entropy"])
    return random_request(rng, "pivot", num_branches=branches, top_logprobs=branches, own=own, confidence=confidence)


@pytest.mark.parametrize("seed", slow_but(range(700, 716), range(701, 705)))
def test_branches_over_tokens(seed: int, tmp_path: Path) -> None:
    compare(tmp_path, seed, Pivot, over_tokens(random.Random(seed)), vocab_size=40)


# ---- in the engine ---------------------------------------------------------------------------------------------------


def test_tokens_are_the_same_alone_and_among_others(tmp_path: Path) -> None:
    model = str(write_dream(tmp_path / "model", eos_token_id=EOS, hidden=64, heads=4, kv_heads=2))
    rng = random.Random(0)
    own = [over_tokens(rng) for _ in range(4)]
    own += [random_request(rng, name, num_branches=2, confidence="max_prob") for name in ("entropy_bound", "frechet")]
    asked = [pair for pairs in zip(own, batching.requests(5, 6), strict=True) for pair in pairs]
    engine = Engine(EngineConfig(model=model, enable_prefix_caching=False))
    alone = [decisions(run(engine, [one])[0]) for one in asked]
    outputs = run(engine, asked, [rng.randrange(6) for _ in asked])
    assert [decisions(output) for output in outputs] == alone
    records = [record for output in outputs[:8:2] for record in output.trace or ()]
    assert any(len(record.branches) > 2 for record in records)
    assert any(record.winner < len(record.branches) - 1 for record in records)


def test_an_installed_package_is_served(tmp_path: Path) -> None:
    """No process registers its decodings: the server and the engine find the entry points, and the fields."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(research.EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=120)
    model = write_dream(tmp_path / "model", eos_token_id=EOS, vocab_size=60)
    fields = {"num_branches": 3, "block_size": 8, "max_new_tokens": 24, "tau_conf": 0.4, "ignore_eos": True}
    variants: list[dict[str, Any]] = [
        {"decoding": "entropy_bound", "acceptance_gamma": 9.0},
        {"decoding": "frechet", "acceptance_delta": 0.0},
        {"decoding": "expected_score"},
        {"decoding": "entropy_score"},
        {"decoding": "pivot", "pivot_mass": 0.0, "pivot_weight": 0.01, "top_logprobs": 3},
    ]
    assert [variant["decoding"] for variant in variants] == list(research.entry_points())
    llm = LLM(model)
    with running("--model", str(model), env={"PYTHONPATH": os.pathsep.join(map(str, (ROOT, site)))}) as server:
        for variant in variants:
            expected = llm.generate([[5, 6, 7]], llm.params(**fields, **variant), quiet=True)[0]
            body = {"prompt": [5, 6, 7], "return_token_ids": True, **fields, **variant}
            if "top_logprobs" in body:
                body["logprobs"] = body.pop("top_logprobs")
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == list(expected.token_ids), variant
        wrong = server.http.post("/v1/completions", json={"prompt": [5], "acceptance_gamma": 1.0})
        assert wrong.status_code == 400
        message = 'does not go with decoding "lopa"; use decoding "entropy_bound"'
        assert wrong.json()["error"]["param"] == "acceptance_gamma"
        assert message in wrong.json()["error"]["message"]
        schema = server.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
        assert "in nats" in schema["properties"]["acceptance_gamma"]["description"]
