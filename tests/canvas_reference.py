"""Decoding on a whole canvas, restated plainly on transformers' Qwen2 to hold the engine to.

Nothing of the engine decides: the whole sequence is one dense forward pass with attention in both directions, the
output at q - 1 predicts q (with ``shift`` 0 the output at q), and a softmax over the vocabulary gives probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache

from lopa_ascend.score.noise import gumbel_noise  # the one thing of the engine that is used: the source of its draws
from tests.reference import Reference, layers

Prediction = tuple[int, float, float]
"""Token id, its probability, what positions are ranked by."""


@dataclass
class Decoded:
    tokens: list[int]
    passes: list[list[tuple[int, int]]] = field(default_factory=list)
    """The fills of each forward pass: positions and tokens."""
    margin: float = 1.0
    """The smallest distance to any decision boundary."""
    winners: list[int] = field(default_factory=list)
    """Of each pass, where there are several branches."""


class CanvasReference(Reference):
    """What the decodings of a whole canvas have in common; the acceptance rules are those of ``Reference``."""

    def __init__(self, model: Qwen2ForCausalLM, prompt: list[int], params: Any, mask: int):
        super().__init__(model, prompt, params, mask, set())
        self.x = prompt + [mask] * params.max_new_tokens
        self.passes: list[list[tuple[int, int]]] = []
        self.winners: list[int] = []

    def dense(self, ids: list[int], start: int, past: Any = ()) -> tuple[torch.Tensor, Any]:
        """(logits of ``ids`` at the positions from ``start`` on, keys and values by layer); the ids attend to one
        another and to all of ``past``, keys and values by layer."""
        cache = DynamicCache()
        for layer, (k, v) in enumerate(past):
            cache.update(k, v, layer)
        num_past = past[0][0].shape[2] if past else 0
        with torch.no_grad():
            out = self.model(
                torch.tensor([ids]),
                attention_mask=torch.zeros(1, 1, len(ids), num_past + len(ids)),
                position_ids=torch.arange(start, start + len(ids))[None],
                past_key_values=cache,
                use_cache=True,
            )
        return out.logits[0], layers(cache)

    def masked(self, start: int, end: int) -> list[int]:
        return [q for q in range(start, end) if self.x[q] == self.mask]

    def predictions(self, logits: torch.Tensor, start: int, positions: list[int]) -> dict[int, Prediction]:
        """What ``logits``, those of the positions from ``start`` on, predict for some positions."""
        return {q: self.prediction(logits[q - self.shift - start], q) for q in positions}

    def prediction(self, row: torch.Tensor, position: int) -> Prediction:
        """With a temperature a draw of this pass; the mask is never drawn, but keeps its probability."""
        p = self.p
        row = row / (p.temperature or 1)
        allowed = row.clone()
        allowed[self.mask] = -torch.inf
        if p.temperature and p.top_p is not None:
            values, order = allowed.softmax(-1).sort(descending=True)
            before = values.cumsum(-1) - values
            self.near(float((before - p.top_p).abs().min()))
            allowed[order[before >= p.top_p]] = -torch.inf
            row = torch.where(allowed.isfinite() | (torch.arange(len(row)) == self.mask), row, -torch.inf)
        probs = row.softmax(-1)
        scores = allowed.softmax(-1)
        if p.temperature:
            ids = torch.arange(len(row))
            scores = allowed + gumbel_noise(p.seed, torch.tensor([position]), len(self.passes), ids)[0]
        token = int(scores.argmax())
        two = scores.topk(2).values
        self.near(float(two[0] - two[1]))
        top = float(probs[token])
        others = probs.clone()
        others[token] = 0
        entropy = -float((probs * (probs + 1e-10).log()).sum())
        ranked = {"max_prob": top, "margin": top - float(others.max()), "neg_entropy": -entropy}
        return token, top, ranked[self.confidence]

    @property
    def confidence(self) -> str:
        confidence: str = self.p.confidence
        return confidence

    def put(self, positions: list[int], predicted: dict[int, Prediction]) -> None:
        """One forward pass fills some positions."""
        fills = [(q, predicted[q][0]) for q in sorted(positions)]
        for q, token in fills:
            self.x[q] = token
        self.passes.append(fills)

    def accept_or_best(self, predicted: dict[int, Prediction]) -> list[int]:
        """What the acceptance rule lets through, or else the most confident position."""
        accepted = self.accepted(list(predicted), predicted)
        if not self.shift and self.p.acceptance == "factor" and max(1, len(accepted)) == len(predicted) - 1:
            return list(predicted)  # Fast-dLLM for LLaDA stops before the first that fails, but for the last one
        if accepted:
            return accepted
        ranked = sorted(predicted, key=lambda q: -predicted[q][2])
        if len(ranked) > 1:
            self.near(predicted[ranked[0]][2] - predicted[ranked[1]][2])
        return ranked[:1]

    def blocks(self) -> list[tuple[int, int]]:
        starts = range(self.prompt_length, self.limit, self.p.block_size)
        return [(start, min(start + self.p.block_size, self.limit)) for start in starts]

    def decode(self) -> Decoded:
        """Decodes the whole canvas."""
        raise NotImplementedError

    def decoded(self) -> Decoded:
        return Decoded(self.x[self.prompt_length :], self.passes, self.margin, self.winners)


class ParallelReference(CanvasReference):
    """No cache: every pass computes everything."""

    def decode(self) -> Decoded:
        for start, end in self.blocks():
            while self.masked(start, end):
                logits, _ = self.dense(self.x, 0)
                predicted = self.predictions(logits, 0, self.masked(start, end))
                self.put(self.accept_or_best(predicted), predicted)
        return self.decoded()


class VanillaReference(CanvasReference):
    """Dream's `diffusion_generate`: for each of its steps the whole sequence, and then some of the masked positions.

    Here too a step that fills nothing is no pass. What Dream draws from torch's generator is drawn from the engine's.
    """

    EPS = 1e-3

    @property
    def confidence(self) -> str:
        return {"maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "neg_entropy"}.get(
            self.p.alg, "max_prob"
        )

    def decode(self) -> Decoded:
        steps = self.p.steps or self.p.max_new_tokens
        times = torch.linspace(1, self.EPS, steps + 1, dtype=torch.float64)
        for step in range(steps):
            masked = self.masked(self.prompt_length, self.limit)
            share = 1 - float(times[step + 1] / times[step]) if step < steps - 1 else 1.0
            drawn = {q: self.uniform(q, step) for q in masked}
            if self.p.alg == "origin":
                for q in masked:
                    self.near(drawn[q] - share)
                wanted, number = [q for q in masked if drawn[q] < share], len(masked)
            else:
                wanted, number = masked, int(len(masked) * share)
            if not wanted or not number:
                continue
            predicted = self.predictions(self.dense(self.x, 0)[0], 0, wanted)
            self.put(self.best(predicted, drawn, number), predicted)
        return self.decoded()

    def best(self, predicted: dict[int, Prediction], drawn: dict[int, float], number: int) -> list[int]:
        """The positions of the ``number`` highest confidences; with alg_temp T so many draws without replacement by the
        weights exp(confidence / T), made by adding Gumbel noise."""
        if self.p.alg == "origin":
            return list(predicted)
        values = {q: conf for q, (_, _, conf) in predicted.items()}
        if self.p.alg_temp:
            for q in values:
                values[q] = values[q] / self.p.alg_temp - math.log(-math.log(drawn[q]))
        ranked = sorted(values, key=lambda q: -values[q])
        if number < len(ranked):
            self.near(values[ranked[number - 1]] - values[ranked[number]])
        return ranked[:number]

    def uniform(self, position: int, step: int) -> float:
        """The uniform number behind the Gumbel noise of the token id -1."""
        if self.p.seed is None:
            return 0.5
        noise = gumbel_noise(self.p.seed, torch.tensor([position]), step, torch.tensor([-1]))
        return math.exp(-math.exp(-float(noise)))


class FastDllmReference(CanvasReference):
    """Keys and values of the first pass of each block stand for the positions that later passes do not compute."""

    def decode(self) -> Decoded:
        for start, end in self.blocks():
            logits, cache = self.dense(self.x, 0)
            predicted = self.first_pass(logits, start, end)
            last = end if self.p.block_cache == "dual" else self.limit
            kept = [tuple(torch.cat([x[:, :, :start], x[:, :, last:]], 2) for x in layer) for layer in cache]
            while self.masked(start, end):
                logits, _ = self.dense(self.x[start:last], start, kept)
                predicted = self.predictions(logits, start, self.masked(start, end))
                self.put(self.accept_or_best(predicted), predicted)
        return self.decoded()

    def first_pass(self, logits: torch.Tensor, start: int, end: int) -> dict[int, Prediction]:
        """Fills the block's first position, the only one that later passes do not predict; without a shift there is
        none, and all are predicted. What was predicted."""
        predicted = self.predictions(logits, 0, [start] if self.shift else self.masked(start, end))
        self.put([start] if self.shift else self.accept_or_best(predicted), predicted)
        return predicted


class LopaParallelReference(CanvasReference):
    """LoPA over parallel decoding: all branches from the same predictions, the best by the mean confidence of the first
    block in which it has masks."""

    def decode(self) -> Decoded:
        branches = [self.x]
        while self.mask in branches[-1]:
            seen = []
            for self.x in branches:
                here = next((q for q in self.blocks() if self.masked(*q)), (self.limit, self.limit))
                predicted = self.predictions(self.dense(self.x, 0)[0], 0, self.masked(*here))
                seen.append((self.score({"creation": 1.0}, predicted), predicted))
            winner = self.choose_winner([], [], [score for score, _ in seen])
            self.x, predicted = branches[winner], seen[winner][1]
            self.winners.append(winner)
            self.put(self.accept_or_best(predicted) if predicted else [], predicted)
            left = sorted((q for q in predicted if self.x[q] == self.mask), key=lambda q: -predicted[q][2])
            for a, b in zip(left, left[1 : self.p.num_branches + 1], strict=False):
                self.near(predicted[a][2] - predicted[b][2])
            drafts = [[predicted[q][0] if i == q else t for i, t in enumerate(self.x)] for q in left]
            branches = [*drafts[: self.p.num_branches], self.x]
        return self.decoded()


class LopaFastDllmReference(FastDllmReference):
    """LoPA over Fast-dLLM: after a block's first pass, which is the anchor's alone, all branches from the keys and
    values of that pass. A branch holds one more token of the block than the anchor, and never its last one."""

    def decode(self) -> Decoded:
        for start, end in self.blocks():
            logits, cache = self.dense(self.x, 0)
            predicted = self.first_pass(logits, start, end)
            self.winners.append(0)
            last = end if self.p.block_cache == "dual" else self.limit
            kept = [tuple(torch.cat([x[:, :, :start], x[:, :, last:]], 2) for x in layer) for layer in cache]
            branches = [*self.drafts(predicted), self.x]
            while self.mask in branches[-1][start:end]:
                seen = []
                for self.x in branches:
                    logits, _ = self.dense(self.x[start:last], start, kept)
                    predicted = self.predictions(logits, start, self.masked(start, end))
                    seen.append((self.score({"creation": 1.0}, predicted), predicted))
                winner = self.choose_winner([], [], [score for score, _ in seen])
                self.x, predicted = branches[winner], seen[winner][1]
                self.winners.append(winner)
                self.put(self.accept_or_best(predicted), predicted)
                branches = [*self.drafts(predicted), self.x]
        return self.decoded()

    def drafts(self, predicted: dict[int, Prediction]) -> list[list[int]]:
        """The canvas with one more of the positions that are left, in the order of their confidences."""
        left = sorted((q for q in predicted if self.x[q] == self.mask), key=lambda q: -predicted[q][2])
        for a, b in zip(left, left[1 : self.p.num_branches + 1], strict=False):
            self.near(predicted[a][2] - predicted[b][2])
        if len(left) == 1:
            return []
        return [[predicted[q][0] if i == q else t for i, t in enumerate(self.x)] for q in left[: self.p.num_branches]]
