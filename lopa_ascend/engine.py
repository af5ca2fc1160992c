"""The engine: requests in, tokens out."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lopa_ascend import checkpoint
from lopa_ascend.backend import load_ops
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.kv import KVPool
from lopa_ascend.model.dream import Dream
from lopa_ascend.pages import pages_for
from lopa_ascend.runner import Runner, SequenceState
from lopa_ascend.score import Scoring
from lopa_ascend.tokenizer import TextStream, load_tokenizer
from lopa_ascend.types import GenerationOutput, Progress, StepRecord

DEMO_MODEL = Path(__file__).parent / "demo" / "model"


class LLM:
    """A model ready to generate.

    Args:
        model: a Hugging Face directory with a Dream checkpoint; None for the bundled model.
        lora: a PEFT LoRA adapter directory, merged at load.
        device: "cpu".
        dtype: "float32", "bfloat16", or "auto" for the checkpoint's own.
        max_model_len: positions of prompt and answer together; default: the model's max_position_embeddings.
        kv_cache_memory: bytes that the KV pages of a request may take; default: half of the machine's memory.
        seed: seed of requests that give none.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the directory cannot be served; nothing was loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        lora: str | Path | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        max_model_len: int | None = None,
        kv_cache_memory: int | None = None,
        seed: int = 0,
    ):
        path = DEMO_MODEL if model is None else Path(model)
        self.model_name = "demo" if model is None else path.resolve().name
        self.seed = seed
        ops = load_ops(device)
        source = checkpoint.open_checkpoint(path)
        self.tokenizer = load_tokenizer(path, source.config.vocab_size)
        limit = source.config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= limit:
            raise ParameterError(
                "max_model_len", f"must be from 1 to the model's {limit} positions, got {max_model_len}"
            )
        self.config, weights = checkpoint.load(path, lora=lora, dtype=dtype, device=device)
        self._model = Dream(self.config, weights, ops)
        self._pool = KVPool(self.config, 0, self._model.head.dtype, device)
        self._ops, self._device = ops, device
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.kv_cache_memory = memory // 2 if kv_cache_memory is None else kv_cache_memory

    # ---- requests --------------------------------------------------------------------------------------------------

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ParameterError: it is empty, holds ids that the model does not have, or is text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ParameterError("prompt", f"{self.model_name} has no tokenizer files; give token ids")
            try:
                ids = self.tokenizer.encode(prompt)
            except UnicodeEncodeError as error:
                raise ParameterError("prompt", f"is not text: {error.reason} at character {error.start}") from error
        else:
            ids = list(prompt)
        if not ids:
            raise ParameterError("prompt", "must not be empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.config.vocab_size:
                raise ParameterError(
                    "prompt", f"token id {token!r} is not an integer from 0 to {self.config.vocab_size - 1}"
                )
            if token == self.config.mask_token_id:
                raise ParameterError("prompt", f"holds the mask token (id {token}), which only the engine may place")
        return ids

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, through the chat template.

        Raises:
            ParameterError: there is no template, or it refuses the messages.
        """
        if self.tokenizer is None:
            raise ParameterError("messages", f"{self.model_name} has no tokenizer files, so no chat template")
        try:
            ids = self.tokenizer.chat([dict(message) for message in messages])
        except ValueError as error:
            raise ParameterError("messages", str(error)) from error
        return self.tokenize(ids)

    def check(self, prompt_token_ids: Sequence[int], params: DecodingParams) -> None:
        """Refuses what this model can never run.

        Raises:
            ParameterError: the request does not fit, or asks for stop strings without a tokenizer.
        """
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1:
            raise ParameterError("prompt", f"has {len(prompt_token_ids)} tokens; max_model_len is {self.max_model_len}")
        if params.max_new_tokens > room:
            raise ParameterError(
                "max_new_tokens",
                f"{params.max_new_tokens} does not fit: the prompt has {len(prompt_token_ids)} tokens and "
                f"max_model_len is {self.max_model_len}, which leaves {room}",
            )
        slots = 1 + params.lookaheads
        needed = self._pages(len(prompt_token_ids) + params.max_new_tokens, slots) * self._page_bytes
        if needed > self.kv_cache_memory:
            raise ParameterError(
                "num_branches",
                f"{slots} branches of {len(prompt_token_ids)} + {params.max_new_tokens} positions need {needed} bytes "
                f"of KV pages; kv_cache_memory is {self.kv_cache_memory}",
            )
        if params.stop and self.tokenizer is None:
            raise ParameterError("stop", f"needs a tokenizer, and {self.model_name} has no tokenizer files")
        for token in self._eos(params):
            if token >= self.config.vocab_size:
                raise ParameterError(
                    "eos_token_id", f"{token} is not below the vocabulary size {self.config.vocab_size}"
                )

    def stream(
        self, prompt_token_ids: Sequence[int], params: DecodingParams, *, trace: bool = False
    ) -> Generator[Progress, None, None]:
        """What is final after each forward pass; the last item carries the output. One request at a time.

        Closing the iterator ends the request and gives its pages back, as does any error.

        Raises:
            ParameterError: see ``check``.
            NonFiniteError: the model's logits are not finite.
        """
        self.check(prompt_token_ids, params)
        strategy = begin(prompt_token_ids, params, self.config.mask_token_id, frozenset(self._eos(params)))
        runner = self._runner(len(prompt_token_ids) + params.max_new_tokens, strategy.num_slots)
        state = runner.open(strategy.num_slots, self._scoring(len(prompt_token_ids), params))
        try:
            yield from _Request(self, strategy, params, trace).run(runner, state)
        finally:
            runner.close(state)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: DecodingParams | None = None,
        *,
        trace: bool = False,
        quiet: bool = False,
    ) -> list[GenerationOutput]:
        """One output a prompt, in order; prompts are texts or lists of token ids.

        Raises:
            ParameterError: a prompt or parameter cannot be served; nothing was generated.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        return self._all([self.tokenize(prompt) for prompt in several], params, trace, quiet)

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: DecodingParams | None = None,
        *,
        trace: bool = False,
        quiet: bool = False,
    ) -> list[GenerationOutput]:
        """One output a conversation (a list of messages with role and content), through the chat template.

        Raises:
            ParameterError: see ``generate`` and ``tokenize_chat``.
        """
        return self._all([self.tokenize_chat(messages) for messages in conversations], params, trace, quiet)

    def _all(
        self, prompts: list[list[int]], params: DecodingParams | None, trace: bool, quiet: bool
    ) -> list[GenerationOutput]:
        params = params or DecodingParams()
        for prompt in prompts:
            self.check(prompt, params)
        outputs = []
        with tqdm(total=len(prompts), desc="prompts", disable=True if quiet else None) as bar:
            for prompt in prompts:
                *_, last = self.stream(prompt, params, trace=trace)
                assert last.output is not None
                outputs.append(last.output)
                bar.set_postfix(tpf=f"{last.output.tokens_per_forward:.1f}")
                bar.update()
        return outputs

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _eos(self, params: DecodingParams) -> tuple[int, ...]:
        eos = params.eos_token_id
        if eos is None:
            return self.config.eos_token_ids
        return (eos,) if isinstance(eos, int) else eos

    def _scoring(self, prompt_length: int, params: DecodingParams) -> Scoring:
        return Scoring(
            confidence=params.confidence,
            mask=self.config.mask_token_id,
            num_tokens=self.tokenizer.size if self.tokenizer else self.config.vocab_size,
            eos=self._eos(params),
            min_position=prompt_length + params.min_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=self.seed if params.seed is None else params.seed,
        )

    @property
    def _page_bytes(self) -> int:
        return KVPool.page_bytes(self.config, self._model.head.dtype)

    @staticmethod
    def _pages(positions: int, num_slots: int) -> int:
        """Pages of a sequence in the worst case, when its slots share none."""
        return pages_for(positions) * num_slots

    def _runner(self, positions: int, num_slots: int) -> Runner:
        """A runner whose pool holds at least one such sequence; with one request at a time the pool may be replaced."""
        pages = self._pages(positions, num_slots)
        if pages > self._pool.num_pages:
            self._pool = KVPool(self.config, pages, self._model.head.dtype, self._device)
        return Runner(self._model, self._pool, self._ops)


class _Request:
    """One request on its way: the strategy's steps, and what of their text may be shown."""

    def __init__(self, llm: LLM, strategy: D2F, params: DecodingParams, trace: bool):
        self.strategy, self.params = strategy, params
        self.text = TextStream(llm.tokenizer, params.stop, params.min_new_tokens) if llm.tokenizer else None
        self.records: list[StepRecord] | None = [] if trace else None
        self.model_tokens = 0

    def run(self, runner: Runner, state: SequenceState) -> Iterator[Progress]:
        while (plan := self.strategy.plan()) is not None:
            result = runner.step(state, plan)
            record = self.strategy.absorb(plan, result.results, result.model_tokens, result.head_rows)
            runner.commit(state, plan, record.winner, result)
            self.model_tokens += result.model_tokens
            if self.records is not None:
                self.records.append(record)
            tokens = self.strategy.final_tokens()
            text = ""
            if self.text:
                text = self.text.push(tokens)
                if self.text.stopped is not None:
                    break
                tokens = tokens[: self.text.num_shown]
            yield Progress(tuple(tokens), text)
        yield self._finished()

    def _finished(self) -> Progress:
        tokens = self.strategy.final_tokens()
        text = self.text.finish(tokens) if self.text else ""
        stop_reason: int | str | None = self.strategy.eos_reached()
        if self.text and self.text.stopped is not None:
            stop_reason = self.text.stopped
            tokens = tokens[: self.text.num_tokens]
        output = GenerationOutput(
            prompt_token_ids=self.strategy.prompt,
            token_ids=tuple(tokens),
            text=text if self.text else None,
            finish_reason="length" if stop_reason is None else "stop",
            stop_reason=stop_reason,
            num_forwards=self.strategy.num_forwards,
            num_positions=len(self.strategy.winner.tokens),
            model_tokens=self.model_tokens,
            trace=None if self.records is None else tuple(self.records),
        )
        return Progress(tuple(tokens), text, output)
