"""The engine as a model of lm-eval."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lopa_ascend import LLM
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.types import GenerationOutput
from scripts.eval.likelihood import MaskedLikelihood
from scripts.eval.metrics import AnswerCounts

logger = logging.getLogger(__name__)

GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
"""What a task may ask for in ``generation_kwargs``."""
NUM_SAMPLES = 128
"""Draws of a log-likelihood, as in the published scripts."""
ALWAYS_CUT = "[DONE]"
"""A stop string of MBPP at which published scripts cut answers even where they cut at no others."""


class LopaLM(TemplateLM):
    """A model that decodes as this project does.

    Args:
        llm: the loaded model.
        params: how it decodes.
        has_own_length: answers have the length of ``params``, whatever a task asks for.
        add_bos: a BOS token stands in front of each prompt.
        escape_until: answers are not cut at a task's stop strings, as some published scripts have it.
        batch_size: answers that are made together, and draws of a log-likelihood in one forward pass. With 1 the time
            of answers is measured.
        mc_num: draws of a log-likelihood; 0: one pass with masks in place of all texts after a context, see
            ``LLM.score``.

    Raises:
        ParameterError: the model cannot tokenize text, or has no BOS token.
    """

    def __init__(
        self,
        llm: LLM,
        params: DecodingParams,
        *,
        has_own_length: bool = False,
        add_bos: bool = False,
        escape_until: bool = False,
        batch_size: int = 8,
        mc_num: int = NUM_SAMPLES,
    ) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise ParameterError("model", "has no tokenizer files, and prompts are texts")
        if add_bos and not llm.tokenizer.special.get("bos_token"):
            raise ParameterError("prompt", "begins with a BOS token, and the tokenizer names none")
        self.llm, self.tokenizer, self.params = llm, llm.tokenizer, params
        self.add_bos, self.escape_until, self.batch_size = add_bos, escape_until, batch_size
        self._has_own_length, self._mc_num = has_own_length, mc_num
        self.counts: dict[str, list[AnswerCounts]] = {}
        """By the task's name in lm-eval: of each of its answers."""

    # ---- text ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.llm.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Token id that stands in place of the context of a text without one."""
        bos = self.tokenizer.special.get("bos_token")
        found = self.tokenizer.id_of(bos) if bos else None
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        return self.llm.engine.model_name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(self._with_bos(string))

    def _with_bos(self, text: str) -> str:
        return f"{self.tokenizer.special['bos_token']}{text}" if self.add_bos else text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Without a generation prompt its last message is the beginning of the answer."""
        if add_generation_prompt:
            return self.tokenizer.render([dict(message) for message in chat_history])
        *before, begun = chat_history
        return self.tokenizer.render([dict(message) for message in before]) + begun["content"]

    # ---- answers ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """An answer to each request, up to the first of its stop strings."""
        answers: list[str] = []
        if self.batch_size == 1 and requests:  # nothing is measured of a first answer, which warms caches up
            params = self.request_params(requests[0].args[1])
            self._timed(self._prompt(requests[0].args[0], params), params)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="answers") as bar:
            while len(answers) < len(requests):
                batch = self._next_batch(requests[len(answers) :])
                params = self.request_params(batch[0].args[1])
                prompts = [self._prompt(request.args[0], params) for request in batch]
                for request, (output, seconds) in zip(batch, self._outputs(prompts, params), strict=True):
                    text = output.text or ""
                    answers.append(
                        text.split(ALWAYS_CUT)[0] if ALWAYS_CUT in request.args[1].get("until", ()) else text
                    )
                    visible = num_visible(output, params, self.llm.config.eos_token_ids)
                    counts = AnswerCounts(visible, output.num_positions, output.num_forwards, seconds)
                    self.counts.setdefault(request.task_name, []).append(counts)
                    self.cache_hook.add_partial("generate_until", request.args, answers[-1])
                bar.update(len(batch))
        return answers

    def _outputs(self, prompts: list[list[int]], params: DecodingParams) -> list[tuple[GenerationOutput, float | None]]:
        """The outputs of prompts, with their seconds if they are decoded one at a time."""
        if self.batch_size == 1:
            return [self._timed(prompt, params) for prompt in prompts]
        return [(output, None) for output in self.llm.generate(prompts, params, quiet=True)]

    def _timed(self, prompt: list[int], params: DecodingParams) -> tuple[GenerationOutput, float]:
        """The output of a prompt, and the seconds of its decoding after the first forward pass."""
        first = output = None
        for progress in self.llm.stream(prompt, params):
            first = first or time.perf_counter()
            output = progress.output
        assert first is not None
        assert output is not None
        return output, time.perf_counter() - first

    def _next_batch(self, requests: Sequence[Instance]) -> list[Instance]:
        """The first requests, as long as they ask for the same."""
        batch = []
        for request in requests[: self.batch_size]:
            if request.args[1] != requests[0].args[1]:
                break
            batch.append(request)
        return batch

    def request_params(self, asked: Mapping[str, Any]) -> DecodingParams:
        """The parameters for what a task asks for. The length of answers is the model's own, if it was given one.

        An answer ends at the model's own stop strings as well as at the task's.

        Raises:
            ParameterError: a task asks for something unknown.
        """
        for name in asked:
            if name not in GENERATION:
                raise ParameterError("generation_kwargs", f"unknown {name!r}; known are {', '.join(GENERATION)}")
        changes: dict[str, Any] = {}
        if "max_gen_toks" in asked and not self._has_own_length:
            changes["max_new_tokens"] = int(asked["max_gen_toks"])
        if asked.get("do_sample"):
            changes |= {name: asked[name] for name in ("temperature", "top_p", "top_k") if name in asked}
        until = asked.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        if not self.escape_until:
            changes["stop"] = tuple(dict.fromkeys((*self.params.stop, *filter(None, stop))))
        return replace(self.params, **changes)

    def _prompt(self, text: str, params: DecodingParams) -> list[int]:
        """The token ids of a prompt. Too long ones lose their beginning, as in the published scripts."""
        ids = self.tok_encode(text)
        room = self.llm.engine.limits.max_model_len - params.max_new_tokens
        if len(ids) > room > 0:
            logger.warning("a prompt of %d tokens is cut on the left to %d", len(ids), room)
            ids = ids[-room:]
        return ids

    # ---- log-likelihoods -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Estimates by Monte-Carlo masking. Whether decoding would give the text is not looked at, as published."""
        if not self._mc_num:
            return self._masked_likelihoods(requests)
        likelihood = MaskedLikelihood(self.llm.engine, num_samples=self._mc_num, batch_size=self.batch_size)
        results = []
        for texts, context, target in tqdm(requests, disable=disable_tqdm, desc="log-likelihoods"):
            max_model_len = self.llm.engine.limits.max_model_len
            room = max_model_len - len(target) - 1
            if room < 1:
                message = f"{max_model_len} leaves no room for a question before an answer of {len(target)} tokens"
                raise ParameterError("max_model_len", message)
            found = likelihood.estimate(context[-room:], [*target, self.eot_token_id])
            results.append((found, False))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _masked_likelihoods(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        """Sums of log probabilities over masks: the choices of one question share a pass."""
        targets: dict[tuple[int, ...], list[list[int]]] = {}
        for _, context, target in requests:
            targets.setdefault(tuple(context), []).append(target)
        scores: dict[tuple[int, ...], Iterator[tuple[float, ...]]] = {}
        for question, choices in targets.items():
            room = self.llm.engine.limits.max_model_len - max(map(len, choices))
            scores[question] = iter(self.llm.score(question[-max(1, room) :], choices, self.params))
        return [(sum(next(scores[tuple(context)])), False) for _, context, _ in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the longest context, each scored after the one before it."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="rolling log-likelihoods"):
            windows = get_rolling_token_windows(
                token_list=self.tokenizer.encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.llm.engine.limits.max_model_len - 2,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found


def num_visible(output: GenerationOutput, params: DecodingParams, eos: Sequence[int]) -> int:
    """Tokens of an answer before the first one that ends it. Without ``finish_at_eos`` the output goes on after it.

    Args:
        output: the answer.
        params: how it was decoded.
        eos: the model's EOS ids.
    """
    ends = params.ends(params.eos_ids_or(tuple(eos)))
    return next((place for place, token in enumerate(output.token_ids) if token in ends), len(output.token_ids))
