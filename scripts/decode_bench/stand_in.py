"""A stand-in of the published code's arithmetic, to measure the engine against.

It computes what docs/published-algorithm.md says of each forward pass, and shares no arithmetic with the engine:
transformers' Qwen2 with eager attention, one forward pass after the other for each branch, over all positions of the
branch's window, each of which goes through the LM head; then a softmax over the whole vocabulary in the model's dtype.
Keys and values of committed positions are cached. Which positions are filled and which branches come next is decided
by ``lopa_ascend.decode`` on both sides, and costs next to nothing.

The published code computes the softmax of a winner again for fills and for candidates, and collects garbage in each
contested round. The stand-in does neither, so it is a little faster.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.types import RowPlan, RowResult

NOT_QWEN2 = ("architectures", "model_type", "torch_dtype", "dtype", "golden_init")
"""Fields of a Dream's config.json that transformers' Qwen2 does not take from there."""
LOG_OFFSET = 1e-10
"""Added to probabilities before their logarithm (docs/published-algorithm.md)."""

Layers = list[tuple[Tensor, Tensor]]
"""For each layer keys and values [1, K, positions, D]."""


@dataclass(frozen=True)
class StandInOutput:
    """One decode."""

    token_ids: tuple[int, ...]
    """What was generated: all opened positions."""
    num_forwards: int
    """Forward passes, in each of which every branch runs once."""
    model_tokens: int
    """Positions computed, of all branches."""
    seconds: float
    """CPU seconds of this process."""


class StandIn:
    """A Dream directory as transformers' Qwen2.

    Args:
        path: the directory.
        dtype: of weights, activations and softmax.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        values = json.loads((path / "config.json").read_text())
        self.mask_token_id: int = values["mask_token_id"]
        config = Qwen2Config(**{name: value for name, value in values.items() if name not in NOT_QWEN2})
        config._attn_implementation = "eager"
        self.model = Qwen2ForCausalLM(config).to(dtype).eval()
        state = load_file(path / "model.safetensors")
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], params: DecodingParams, eos: frozenset[int] = frozenset()) -> StandInOutput:
        """Decodes a prompt with "d2f", or with "lopa" over it."""
        started = time.process_time()
        strategy = begin(prompt, params, self.mask_token_id, eos)
        cache: Layers = []
        last: Tensor | None = None  # logits of the last committed position, which predict the first one of the window
        model_tokens = 0
        while (plan := strategy.plan()) is not None:
            results: list[RowResult] = []
            passes: list[tuple[Tensor, Layers]] = []
            for row in plan.rows:
                logits, layers = self._forward(row, cache)
                results.append(self._predict(row, logits, last, params.confidence))
                passes.append((logits, layers))
                model_tokens += len(row.tokens)
            record = strategy.absorb(plan, results, model_tokens, model_tokens)
            if plan.num_new:
                logits, layers = passes[record.winner]
                last = logits[plan.num_new - 1].clone()
                end = plan.start + plan.num_new
                cache = [(k[:, :, :end].clone(), v[:, :, :end].clone()) for k, v in layers]
        return StandInOutput(
            tuple(strategy.winner.tokens), strategy.num_forwards, model_tokens, time.process_time() - started
        )

    def _forward(self, row: RowPlan, cache: Layers) -> tuple[Tensor, Layers]:
        """The logits [positions, vocabulary] of one branch, and its keys and values with those of the cache."""
        cached = DynamicCache()
        for layer, (key, value) in enumerate(cache):
            cached.update(key, value, layer)
        out = self.model(
            torch.tensor([row.tokens]),
            attention_mask={"full_attention": self._bias(row)},
            position_ids=torch.arange(row.start, row.end)[None],
            past_key_values=cached,
            use_cache=True,
        )
        return out.logits[0], _layers(cached)

    def _bias(self, row: RowPlan) -> Tensor | None:
        """What is added to the scores of attention [1, 1, positions, keys]; None where every position sees all."""
        if len(row.entry_ends) == 1:
            return None
        sees = torch.zeros(len(row.tokens), row.end, dtype=torch.bool)
        begin_at = row.start
        for end in row.entry_ends:
            sees[begin_at - row.start : end - row.start, :end] = True
            begin_at = end
        dtype = self.model.dtype
        return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)[None, None]

    def _predict(self, row: RowPlan, logits: Tensor, last: Tensor | None, confidence: str) -> RowResult:
        """The predictions of one branch for its masked positions, from the logits of the positions before them."""
        if not row.masked:
            return RowResult((), (), ())
        if row.masked[0] == row.start:
            assert last is not None, "the window begins after a committed position"
            logits = torch.cat([last[None], logits])
            offset = row.start
        else:
            offset = row.start + 1
        scored = logits[[position - offset for position in row.masked]]
        probs = scored.softmax(-1)
        allowed = probs.clone()
        allowed[:, self.mask_token_id] = -math.inf
        tops = allowed.topk(2).values if confidence == "margin" else None
        prob, token = allowed.max(-1)
        if confidence == "max_prob":
            conf = prob
        elif tops is not None:
            conf = tops[:, 0] - tops[:, 1]
        else:
            conf = (probs * (probs + LOG_OFFSET).log()).sum(-1)
        return RowResult(tuple(token.tolist()), tuple(prob.tolist()), tuple(conf.tolist()))


def _layers(cache: Any) -> Layers:
    """The keys and values in a cache of transformers, whose name differs between its versions."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))
