"""What a request may ask of a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from lopa_ascend.config.combinations import listed
from lopa_ascend.config.decoding import DecodingParams, banned_ids
from lopa_ascend.config.decodings import all_decodings, variants_of
from lopa_ascend.config.engine import check_window_attention
from lopa_ascend.config.errors import ContextLengthError, ParameterError, context_length
from lopa_ascend.kv.pages import slots_for, worst_case
from lopa_ascend.types import DREAM, GappedText, ModelProperties


def check_decoding(params: DecodingParams, properties: ModelProperties) -> None:
    """Raises ParameterError for a decoding that a model was not trained for; the message lists those that fit."""
    what = "which attends to all positions"
    if properties.is_block_causal:
        what = f"which is block-causal and predicts {'the next' if properties.logit_shift else 'each'} position"
        if params.window_attention == "full" and params.is_pipelined:
            message = f'"{params.window_attention}" does not go with this model, {what}; use "block_causal"'
            raise ParameterError("window_attention", message)
    elif properties.is_causal:
        what = "which is causal"
    if params.strategy.fits(properties):
        return
    fitting = [strategy for strategy in variants_of(params.decoding) if strategy.fits(properties)]
    name, value = _chosen_by(params) if fitting else ("decoding", params.decoding)
    choices = dict.fromkeys(strategy.base for strategy in fitting)
    if not fitting:
        choices = dict.fromkeys(other for other, variants in all_decodings() if variants[0].fits(properties))
    raise ParameterError(name, f'"{value}" does not go with this model, {what}; use {listed(tuple(choices))}')


def _chosen_by(params: DecodingParams) -> tuple[str, str]:
    """The parameter that chooses how positions are filled, and its value."""
    return ("base", params.base) if len(variants_of(params.decoding)) > 1 else ("decoding", params.decoding)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a running engine's model, memory and configuration."""

    vocab_size: int
    mask_token_id: int
    max_model_len: int
    """Most tokens of prompt and answer together."""
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Most tokens computed in one step, unless one request's anchor alone has more."""
    max_num_branches: int
    """Most lookahead branches of a request."""
    max_top_k: int | None = None
    branch_parallel_size: int = 1
    graph_mode: str = "eager"
    num_token_ids: int | None = None
    """The tokenizer has no ids from this one on, so they are never generated; None: it has all."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's, for requests that set none."""
    properties: ModelProperties = DREAM

    def num_slots(self, params: DecodingParams) -> int:
        """Slots of a request in each branch-parallel group."""
        return slots_for(params.most_rows, self.branch_parallel_size)

    def max_branches(self, window: int) -> int:
        """Most branches, anchor included, of one request in one step, if the longest has ``window`` positions: no rank
        computes more than ``max_num_batched_tokens`` tokens. Other requests do not count, so they change no token."""
        return max(1, self.max_num_batched_tokens // window * self.branch_parallel_size)

    def maxima(self) -> dict[str, int]:
        """The largest value of each decoding parameter that this engine limits."""
        longest = self.max_model_len - 1  # a prompt has one token at least
        maxima = {"max_new_tokens": longest, "min_new_tokens": longest, "num_branches": self.max_num_branches}
        if self.max_top_k is not None:
            maxima["top_k"] = self.max_top_k
        return maxima

    def check(self, prompt_tokens: int, params: DecodingParams) -> None:
        """Raises ParameterError for a request that this engine could never run; ``param`` names the field."""
        check_decoding(params, self.properties)
        self._check_length(prompt_tokens, params)
        if params.lookaheads > self.max_num_branches:
            message = f"{params.lookaheads} exceeds this server's max_num_branches {self.max_num_branches}"
            raise ParameterError("num_branches", message)
        self._check_first_step(prompt_tokens, params)
        if params.is_pipelined:
            check_window_attention(params.window_attention, self.branch_parallel_size, self.graph_mode)
        if params.top_k is not None and self.max_top_k is not None and params.top_k > self.max_top_k:
            raise ParameterError("top_k", f"{params.top_k} exceeds this server's limit of {self.max_top_k}")
        self._check_pages(prompt_tokens, params)
        self._check_branches(prompt_tokens, params)
        self.check_token_ids(params)

    def check_continuations(
        self, prompt_tokens: int, params: DecodingParams, continuations: Sequence[Sequence[int]]
    ) -> None:
        """Raises ParameterError for continuations that one pass cannot score, or token ids that do not exist. A causal
        model computes the prompt before that pass."""
        if self.properties.is_causal:
            prompt_tokens = 0
        if prompt_tokens + params.max_new_tokens > self.max_num_batched_tokens:
            message = (
                f"a prompt of {prompt_tokens} tokens and a continuation of {params.max_new_tokens} exceed "
                f"max_num_batched_tokens {self.max_num_batched_tokens}"
            )
            raise ParameterError("continuations", message)
        for token in chain.from_iterable(continuations):
            if not 0 <= token < self.vocab_size or token == self.mask_token_id:
                raise ParameterError("continuations", f"token id {token} is the mask, or does not exist")

    def check_gaps(self, params: DecodingParams, text: GappedText) -> None:
        """Raises ParameterError for a text with gaps that the decoding cannot fill. ``check`` looks at its length."""
        if self.properties.has_blocks:
            attention = self.properties.attention.replace("_", "-")
            message = f"needs a model that attends to all positions, such as Dream or LLaDA; this one is {attention}"
            raise ParameterError("gaps", message)
        if not params.strategy.fills_gaps:
            choices = tuple(name for name, variants in all_decodings() if variants[0].fills_gaps)
            bases = dict.fromkeys(strategy.base for strategy in variants_of("lopa") if strategy.fills_gaps)
            name = f'decoding "{params.decoding}"' + (f' over "{params.base}"' if params.decoding == "lopa" else "")
            message = (
                f"does not go with {name}, which sees nothing behind a gap; use "
                f'decoding {listed(choices)}, or decoding "lopa" with base {listed(tuple(bases))}'
            )
            raise ParameterError("gaps", message)
        if params.structured_outputs is not None:
            what = "which describes a whole answer"
            raise ParameterError("gaps", lambda spelt: f"cannot be combined with {spelt('structured_outputs')}, {what}")
        gaps = [is_gap for is_gap, _ in groupby(token == self.mask_token_id for token in text.tokens) if is_gap]
        if not gaps or len(text.tokens) != params.max_new_tokens:
            raise ParameterError("gaps", f"must have max_new_tokens {params.max_new_tokens} tokens, and a gap")
        if params.min_new_tokens and len(gaps) > 1:
            message = f"has {len(gaps)} gaps, and min_new_tokens goes with one"
            raise ParameterError("gaps", message)
        for token in text.tokens:
            if not 0 <= token < self.vocab_size:
                raise ParameterError("gaps", f"token id {token} does not exist")

    def room(self, prompt_tokens: int, block_size: int) -> int:
        return self.properties.room(self.max_model_len, prompt_tokens, block_size)

    def _check_length(self, prompt_tokens: int, params: DecodingParams) -> None:
        """Prompt and answer together have at most ``max_model_len`` tokens."""
        if prompt_tokens < 1:
            raise ParameterError("prompt", "must not be empty")
        room = self.room(prompt_tokens, params.block_size)
        if room < 1:
            raise ContextLengthError("prompt", f"has {prompt_tokens} tokens; {context_length(self.max_model_len)}")
        if params.max_new_tokens > room:
            message = (
                f"{params.max_new_tokens} does not fit: the prompt has {prompt_tokens} tokens, and "
                f"{context_length(self.max_model_len)}, which leaves {room}"
            )
            raise ContextLengthError("max_new_tokens", message)

    def _check_first_step(self, prompt_tokens: int, params: DecodingParams) -> None:
        """The first step computes the prompt, and the first block or the whole canvas: at most
        ``max_num_batched_tokens`` tokens. A causal model's prompt comes in pieces, before its first block."""
        if self.properties.is_causal:
            prompt_tokens = 0
        if params.is_pipelined:
            name, what, num_opened = "block_size", "first block", self._first_window(params)
        else:
            chosen_by, value = _chosen_by(params)
            what, num_opened = f'canvas that {chosen_by} "{value}" computes whole', params.max_new_tokens
            name = "max_new_tokens"
        if prompt_tokens + num_opened > self.max_num_batched_tokens:
            message = (
                f"a prompt of {prompt_tokens} tokens and the {what} of {num_opened} exceed max_num_batched_tokens "
                f"{self.max_num_batched_tokens}"
            )
            raise ParameterError("prompt" if num_opened < self.max_num_batched_tokens else name, message)

    def _first_window(self, params: DecodingParams) -> int:
        """Most generated positions of the first block."""
        size = params.row_length
        return self.properties.limit(0, min(size, params.max_new_tokens), size)

    def _check_branches(self, prompt_tokens: int, params: DecodingParams) -> None:
        """One step must be able to compute all branches while windows are smallest. As windows grow, ``max_branches``
        limits the branches of a step."""
        if params.is_auto:
            return
        sizes, window = f"block_size {params.block_size}", self._first_window(params)
        if params.strategy.computes_whole_branches:
            sizes = f"a prompt of {prompt_tokens} tokens and max_new_tokens {params.max_new_tokens}"
            window = prompt_tokens + params.max_new_tokens
        if params.lookaheads and 1 + params.lookaheads > self.max_branches(window):
            num_tokens = self.num_slots(params) * window
            message = (
                f"{params.lookaheads} with {sizes} need {num_tokens} tokens in one pass; max_num_batched_tokens is "
                f"{self.max_num_batched_tokens}: ask for fewer branches, or for less of the other"
            )
            raise ParameterError("num_branches", message)

    def _check_pages(self, prompt_tokens: int, params: DecodingParams) -> None:
        size, longest = params.block_size, params.max_new_tokens
        num_shared_positions = self.properties.origin(prompt_tokens, size) if params.is_pipelined else 0
        limit = self.properties.limit(prompt_tokens, longest, size)
        pages = worst_case(limit, self.num_slots(params), num_shared_positions, params.max_window)
        if pages > self.num_pages:
            message = (
                f"{1 + params.lookaheads} branches of {prompt_tokens} + {params.max_new_tokens} positions can need "
                f"{pages} KV pages, but this server has {self.num_pages} (kv_cache_memory); ask for fewer branches or "
                "tokens"
            )
            raise ParameterError("num_branches" if params.lookaheads else "max_new_tokens", message)

    def check_token_ids(self, params: DecodingParams) -> None:
        """Checks the token ids that a request names. Texts in ``bad_words`` are left out: ``Prompts.for_engine`` makes
        token ids of them.

        Raises:
            ParameterError: the model has no such id; the mask would end every answer; an id with a bias is never
                generated; or a position would have no token left.
        """
        token_ids = {
            "eos_token_id": params.eos_ids_or(()),
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [token for token, _ in params.logit_bias],
            "bad_words": list(chain.from_iterable(banned_ids(params))),
        }
        for name, tokens in token_ids.items():
            for token in tokens:
                if token >= self.vocab_size:
                    raise ParameterError(name, f"{token} is not below the vocabulary size {self.vocab_size}")
                if token == self.mask_token_id and name in ("eos_token_id", "stop_token_ids"):
                    raise ParameterError(name, f"{token} is the mask, which would end every answer")
                is_never_generated = token == self.mask_token_id or token >= self._num_token_ids
                if name == "logit_bias" and is_never_generated:
                    # A bias would change its share of the softmax's denominator, and with it every probability.
                    found = "the mask" if token == self.mask_token_id else "no token of the tokenizer"
                    raise ParameterError(name, f"{token} is {found}, which is never generated")
        self._check_choice(params)

    def _check_choice(self, params: DecodingParams) -> None:
        """Every position must have a token left."""
        eos = params.eos_ids_or(self.eos_token_ids)
        # The last token of a longer word is banned wherever the word's beginning may still be filled in.
        never = {self.mask_token_id, *(word[-1] for word in banned_ids(params))}
        if self._are_all_ids(never):
            raise ParameterError("bad_words", "would ban every token: all are the last one of a word")
        if params.min_new_tokens and self._are_all_ids({*never, *eos, *params.stop_token_ids}):
            message = f"{params.min_new_tokens} leaves no token: eos_token_id, stop_token_ids and bad_words hold all"
            raise ParameterError("min_new_tokens", message)

    def _are_all_ids(self, tokens: set[int]) -> bool:
        """Whether ``tokens``, the mask among them, are all ids that can be generated."""
        return sum(token < self._num_token_ids for token in tokens) == self._num_token_ids

    @property
    def _num_token_ids(self) -> int:
        """Ids that can be generated, and the mask's."""
        return self.vocab_size if self.num_token_ids is None else self.num_token_ids
