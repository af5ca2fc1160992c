"""Texts for calibration, and how large the inputs of a model's linear layers become on them.

Diffusion models see masks, and masked tokens have other activations than others. So each text is computed several
times, with masks at random places, whose shares are spread over 0 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from lopa_ascend import LLM
    from lopa_ascend.backend.interface import Ops

NUM_SHARES = 8
"""Shares of masks for each text."""


def read_texts(file: Path, limit: int) -> list[tuple[str, str]]:
    """The first texts of a file: prompt and answer, which is empty where there is none.

    A line is a prompt, or a JSON object with "prompt" or "question", and perhaps "answer". Lines that are blank do not
    count, and those after the first ``limit`` texts are not read.

    Raises:
        ValueError: a line begins with "{" and is no JSON object, or is one without a prompt or with an answer that is
            no text, or the file holds no prompts.
    """
    texts: list[tuple[str, str]] = []
    with file.open(encoding="utf-8-sig") as lines:  # as some editors begin a file with a byte order mark
        for number, line in enumerate(lines, 1):
            if len(texts) == limit:
                break
            if line.strip():
                texts.append(_parse_text(line, f"{file}: line {number}"))
    if not texts:
        raise ValueError(f"{file}: holds no prompts")
    return texts


def _parse_text(line: str, where: str) -> tuple[str, str]:
    """Prompt and answer of one line of a file; ``where`` names the line in messages."""
    if not line.lstrip().startswith("{"):
        return line.rstrip("\n"), ""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f'{where}: begins with "{{" but is no JSON object: {error}') from error
    prompt, answer = row.get("prompt", row.get("question")), row.get("answer", "")
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: expected "prompt" or "question"')
    if not isinstance(answer, str):
        raise ValueError(f'{where}: expected text as "answer"')
    return prompt, answer


class RecordingOps:
    """The ops of a model, which note the largest magnitudes of the inputs of its linear layers.

    Args:
        ops: the model's.
        weights: those whose inputs are noted, by name.
    """

    def __init__(self, ops: Ops, weights: dict[str, Tensor]) -> None:
        self._ops = ops
        self._names = {id(weight): name.removesuffix(".weight") for name, weight in weights.items()}
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
    has masks after its first token. The last token, which is the EOS if the model has one, is never masked.

    Args:
        llm: a Dream with float weights, on one rank.
        texts: prompts and answers.

    Raises:
        ParameterError: the model has no tokenizer or no chat template.
        ValueError: the model is not a Dream with float weights, or a text has no more than one token or does not fit
            into the model's length.
    """
    import torch  # this and the next take seconds

    from scripts.eval.likelihood import MaskedLikelihood

    model: Any = llm.engine.runner.model
    if any(name.endswith(".weight_scale") for name in model.weights) or not llm.config.is_fused:
        raise ValueError("expected a Dream with float weights")
    specs = model.family.tensors(model.config).linears.values()
    weights = {spec.ours: model.weights[spec.ours] for spec in specs if spec.row.source is not None}
    split = [_split(llm, prompt, answer) for prompt, answer in texts]  # all are checked before the first is computed
    masked = MaskedLikelihood(llm.engine, num_samples=NUM_SHARES, batch_size=NUM_SHARES)
    ops = model.ops
    model.ops = recording = RecordingOps(ops, weights)
    try:
        with torch.inference_mode():
            for context, target in split:
                noisy, _ = masked.draw(torch.tensor(context + target), len(context), torch.Generator().manual_seed(0))
                masked.hidden_states(noisy, torch.arange(noisy.numel()))
    finally:
        model.ops = ops
    return {name: magnitudes.clone() for name, magnitudes in recording.magnitudes.items()}


def _split(llm: LLM, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """A text as the token ids that are never masked, and those of which some are. The latter end with an EOS if the
    model has one.

    Raises:
        ValueError: it has no tokens to mask, or more than the model takes.
    """
    if answer:
        context, target = llm.tokenize_chat([{"role": "user", "content": prompt}]), llm.tokenize(answer)
    else:
        tokens = llm.tokenize(prompt)
        context, target = tokens[:1], tokens[1:]
    if not target:
        raise ValueError(f"{prompt!r}: has one token, expected two at least")
    num_tokens, longest = len(context) + len(target) + 1, llm.engine.limits.max_model_len
    if num_tokens > longest:
        raise ValueError(f"{prompt[:60]!r}...: has {num_tokens} tokens with the EOS, expected {longest} at most")
    return context, [*target, *llm.config.eos_token_ids[:1]]
