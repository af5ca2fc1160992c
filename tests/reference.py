"""D2F and LoPA restated plainly from SPEC sections 1 to 8, to hold the engine to on random models and settings.

Nothing of the engine is used: a dense model without pages (transformers' Qwen2, one branch at a time, a list of cached
keys and values), blocks as dicts, a softmax over the vocabulary. Slow and short on purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache


@dataclass
class Outcome:
    tokens: list[int]
    rounds: list[tuple[int, int, int, list[tuple[int, int]]]]  # cache length, committed, winner, fills
    margin: float  # the smallest distance to any decision boundary


def load(path: Any) -> Qwen2ForCausalLM:
    """A Dream directory as transformers' Qwen2 (the same architecture). Biases that it does not have are 0."""
    import json

    from safetensors.torch import load_file

    values = json.loads((path / "config.json").read_text())
    keep = {k: v for k, v in values.items() if k not in ("architectures", "model_type", "torch_dtype", "golden_init")}
    model = Qwen2ForCausalLM(Qwen2Config(**keep))
    state = load_file(path / "model.safetensors")
    if values.get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for name, tensor in model.state_dict().items():
        if name.endswith(".bias") and name not in state:
            state[name] = torch.zeros_like(tensor)
    model.load_state_dict(state)
    return model.eval()


class Reference:
    shift = 1  # 0: the output at a position predicts the position itself

    def __init__(self, model: Qwen2ForCausalLM, prompt: list[int], params: Any, mask: int, eos: set[int]):
        self.model, self.p, self.mask = model, params, mask
        self.eos = set() if params.ignore_eos else eos
        self.limit = len(prompt) + params.max_new_tokens
        self.x = list(prompt)
        self.prompt_length = len(prompt)
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.length = 0
        self.last: torch.Tensor | None = None
        self.margin = 1.0

    # ---- the model, densely ----

    def forward(self, x: list[int], blocks: list[dict]) -> tuple[torch.Tensor, Any]:
        start = self.length
        ids = torch.tensor([x[start:]])
        n = ids.shape[1]
        owner = torch.zeros(start + n, dtype=torch.long)
        for i, block in enumerate(blocks):
            owner[block["start"] : block["end"]] = i
        if self.p.window_attention == "full":
            sees = torch.ones(n, start + n, dtype=torch.bool)
        else:
            sees = owner[start:, None] >= owner[None, :]
        bias = torch.zeros(1, 1, n, start + n).masked_fill(~sees, torch.finfo(torch.float32).min)
        cache = DynamicCache()
        for layer, (k, v) in enumerate(self.cache or []):
            cache.update(k, v, layer)
        with torch.no_grad():
            out = self.model(
                ids,
                attention_mask=bias,
                position_ids=torch.arange(start, start + n)[None],
                past_key_values=cache,
                use_cache=True,
            )
        return out.logits[0], cache

    # ---- the policy, plainly ----

    def predict(self, logits: torch.Tensor, x: list[int]) -> dict[int, tuple[int, float, float]]:
        start = self.length
        out = {}
        for q in range(start, len(x)):
            if x[q] != self.mask:
                continue
            row = self.last if q - self.shift < start else logits[q - self.shift - start]
            assert row is not None
            probs = row.softmax(-1)
            allowed = row.clone()
            allowed[self.mask] = -torch.inf
            token = int(allowed.argmax())
            top = float(probs[token])
            others = probs.clone()
            others[token] = 0
            conf = {
                "max_prob": top,
                "margin": top - float(others.max()),
                "neg_entropy": float((probs * (probs + 1e-10).log()).sum()),
            }[self.p.confidence]
            two = allowed.softmax(-1).topk(2).values
            self.near(float(two[0] - two[1]))
            out[q] = (token, top, conf)
        return out

    def near(self, distance: float) -> None:
        self.margin = min(self.margin, abs(distance))

    def score(self, branch: dict, predicted: dict) -> float:
        values = [conf for _, _, conf in predicted.values()]
        if not values:
            mean = 1.0
        elif self.p.branch_score == "tail":
            values = sorted(values)[: max(1, int(len(values) * self.p.tail_fraction))]
            mean = float(np.mean(values))
        elif self.p.branch_score == "window" and len(values) > self.p.score_window:
            w = self.p.score_window
            mean = min(float(np.mean(values[i : i + w])) for i in range(len(values) - w + 1))
        else:
            mean = float(np.mean(values))
        alpha = self.p.creation_weight
        return alpha * branch["creation"] + (1 - alpha) * mean

    def masks(self, branch: dict, block: dict) -> int:
        return branch["x"][block["start"] : block["end"]].count(self.mask)

    def run(self) -> Outcome:
        prompt_block = {"start": 0, "end": self.prompt_length, "state": "to_cache", "full": True}
        branches: list[dict[str, Any]] = [{"x": self.x, "blocks": [prompt_block], "eos": False, "creation": 1.0}]
        rounds: list[tuple[int, int, int, list[tuple[int, int]]]] = []
        while True:
            for branch in branches:
                self.open_and_activate(branch)
            anchor = branches[-1]
            if self.mask not in anchor["x"] and all(b["state"] != "active" for b in anchor["blocks"]):
                return Outcome(anchor["x"][self.prompt_length :], rounds, self.margin)
            committing = [b for b in anchor["blocks"] if b["state"] == "to_cache"]
            commit = committing[-1]["end"] - self.length if committing else 0
            seen = []
            for branch in branches:
                logits, cache = self.forward(branch["x"], branch["blocks"])
                predicted = self.predict(logits, branch["x"])
                seen.append((self.score(branch, predicted), logits, cache, predicted))
            scores = [s[0] for s in seen]
            winner = self.choose_winner(branches, [s[3] for s in seen], scores)
            _, logits, cache, predicted = seen[winner]
            chosen = branches[winner]
            fills = self.fill(chosen, predicted)
            rounds.append((self.length, commit, winner, fills))
            if commit:
                keep = self.length + commit
                self.cache = [(k[:, :, :keep].clone(), v[:, :, :keep].clone()) for k, v in layers(cache)]
                self.last = logits[commit - 1]
                self.length = keep
            branches = self.spawn(chosen, predicted, fills)

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        winner = scores.index(max(scores))
        for i, other in enumerate(scores):
            if i != winner:
                self.near(scores[winner] - other)
        return winner

    def open_and_activate(self, branch: dict) -> None:
        p, blocks = self.p, branch["blocks"]
        last = blocks[-1]
        size = last["end"] - last["start"]
        if not branch["eos"] and last["end"] < self.limit and (size - self.masks(branch, last)) / size >= p.tau_add:
            n = min(p.block_size, self.limit - last["end"])
            blocks.append({"start": last["end"], "end": last["end"] + n, "state": "active", "full": False})
            branch["x"] = branch["x"] + [self.mask] * n
        for before, block in zip(blocks, blocks[1:], strict=False):
            size = before["end"] - before["start"]
            if (size - self.masks(branch, before)) / size >= p.tau_act:
                block["full"] = True

    def fill(self, branch: dict, predicted: dict) -> list[tuple[int, int]]:
        fills = self.choice(branch, predicted)
        for q, token in fills:
            branch["x"][q] = token
            branch["eos"] |= token in self.eos
        return fills

    def choice(self, branch: dict, predicted: dict) -> list[tuple[int, int]]:
        fills = []
        for block in branch["blocks"]:
            if block["state"] != "active":
                continue
            here = [q for q in predicted if block["start"] <= q < block["end"]]
            take = self.accepted(here, predicted)
            if not take and here and block["full"]:
                ranked = sorted(here, key=lambda q: -predicted[q][2])
                take = ranked[:1]
                if len(ranked) > 1:
                    self.near(predicted[ranked[0]][2] - predicted[ranked[1]][2])
            fills += [(q, predicted[q][0]) for q in take]
        return fills

    def accepted(self, here: list[int], predicted: dict) -> list[int]:
        """The positions of one block that the acceptance rule lets through: the most that are allowed together."""
        p = self.p
        if p.acceptance == "threshold":
            for q in here:
                self.near(predicted[q][1] - p.tau_conf)
            return [q for q in here if predicted[q][1] > p.tau_conf]
        return self.most(here, predicted, lambda c: p.acceptance_factor - (len(c) + 1) * (1 - c[-1]))

    def most(self, here: list[int], predicted: dict, room: Callable[[list[float]], float]) -> list[int]:
        """The positions with the highest probabilities, as many as leave room to a bound."""
        ranked = sorted(here, key=lambda q: -predicted[q][1])
        most = 0
        for n in range(1, len(ranked) + 1):
            left = room([predicted[q][1] for q in ranked[:n]])
            self.near(left)
            if left > 0:
                most = n
        if 0 < most < len(ranked):
            self.near(predicted[ranked[most - 1]][1] - predicted[ranked[most]][1])
        return sorted(ranked[:most])

    def spawn(self, winner: dict, predicted: dict, fills: list[tuple[int, int]]) -> list[dict]:
        filled = {q for q, _ in fills}
        finished = {b["start"] for b in winner["blocks"] if b["state"] == "active" and not self.masks(winner, b)}
        branches = []
        for q, token, creation in self.own_tokens(winner, predicted, filled):
            branch = copy.deepcopy(winner)
            branch["x"][q] = token
            branch["eos"] |= token in self.eos
            branch["creation"] = creation
            branch["draft"] = (q, token)
            branches.append(branch)
        winner["creation"] = 1.0
        branches.append(winner)
        for branch in branches:
            waiting = False
            for block in branch["blocks"]:
                if block["state"] == "to_cache":
                    block["state"] = "in_cache"
                elif block["state"] == "active":
                    if not waiting and block["start"] in finished and not self.masks(branch, block):
                        block["state"] = "to_cache"
                    else:
                        waiting = True
        return branches

    def own_tokens(self, winner: dict, predicted: dict, filled: set[int]) -> list[tuple[int, int, float]]:
        """The own position and token of each lookahead branch, and the confidence of that."""
        ranked = sorted((q for q in predicted if q not in filled), key=lambda q: -predicted[q][2])
        for a, b in zip(ranked, ranked[1 : self.p.num_branches + 1], strict=False):
            self.near(predicted[a][2] - predicted[b][2])
        return [(q, predicted[q][0], predicted[q][2]) for q in ranked[: self.p.num_branches]]


def layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))  # transformers 4
