"""Texts for calibration, and how large the inputs of a model's linear layers become on them.

Diffusion models see masks, and masked tokens have other activations than others. So each text is computed several
times, with masks at random places, whose shares are spread over 0 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.checkpoint.smooth import READERS

if TYPE_CHECKING:
    from torch import Tensor

    from lopa_ascend import LLM
    from lopa_ascend.backend import Ops

NUM_SHARES = 8
"""Shares of masks for each text."""


def read_texts(file: Path, limit: int) -> list[tuple[str, str]]:
    """The first texts of a file: prompt and answer, which is empty where there is none.

    A line is a prompt, or a JSON object with "prompt" or "question", and perhaps "answer".

    Raises:
        ValueError: a line is JSON without a prompt or with an answer that is no text, or the file holds no prompts.
    """
    texts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("{"):
            row = json.loads(line)
            prompt, answer = row.get("prompt", row.get("question")), row.get("answer", "")
            if not isinstance(prompt, str):
                raise ValueError(f'{file}: line {number}: expected "prompt" or "question"')
            if not isinstance(answer, str):
                raise ValueError(f'{file}: line {number}: expected text as "answer"')
            texts.append((prompt, answer))
        elif line.strip():
            texts.append((line, ""))
    if not texts:
        raise ValueError(f"{file}: holds no prompts")
    return texts[:limit]


class RecordingOps:
    """The ops of a model, which note the largest magnitudes of the inputs of its linear layers.

    Args:
        ops: the model's.
        weights: its weights by name.
    """

    def __init__(self, ops: Ops, weights: dict[str, Tensor]) -> None:
        self._ops = ops
        names = [name.removesuffix(".weight") for name in weights]
        kept = [name for name in names if name.rpartition(".")[2] in READERS]
        self._names = {id(weights[f"{name}.weight"]): name for name in kept}
        self.magnitudes: dict[str, Tensor] = {}
        """By name of the linear layer, the largest magnitude of each input channel, float32 [in]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self._names.get(id(weight))
        if name is not None and len(x):
            found = x.abs().amax(0).float()
            self.magnitudes[name] = found.maximum(self.magnitudes.get(name, found))
        return self._ops.linear(x, weight, bias)


def largest_inputs(llm: LLM, texts: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """The largest magnitude of each input channel of the linear layers of a model, float32 [in] by name.

    A prompt with an answer is a message of a conversation, and masks are in the answer; a prompt alone is a text that
    has masks after its first token.

    Args:
        llm: a Dream with float weights, on one rank.
        texts: prompts and answers.

    Raises:
        ParameterError: the model has no tokenizer or no chat template.
        ValueError: the model is not a Dream with float weights, or a text has no more than one token.
    """
    from scripts.evaluation.likelihood import MaskedLikelihood  # imports torch, which takes seconds

    model: Any = llm.engine.runner.model
    if any(name.endswith(".weight_scale") for name in model.weights) or "layers.0.qkv.weight" not in model.weights:
        raise ValueError("expected a Dream with float weights")
    masked = MaskedLikelihood(llm.engine, num_samples=NUM_SHARES, batch_size=NUM_SHARES)
    recording = RecordingOps(model.ops, dict(model.weights))
    model.ops = recording
    try:
        for prompt, answer in texts:
            context = llm.tokenize_chat([{"role": "user", "content": prompt}]) if answer else llm.tokenize(prompt)
            target = llm.tokenize(answer) if answer else context[1:]
            if not target:
                raise ValueError(f"{prompt!r}: has one token, expected two at least")
            masked.estimate(context if answer else context[:1], target)
    finally:
        model.ops = recording._ops
    return {name: magnitudes.clone() for name, magnitudes in recording.magnitudes.items()}
