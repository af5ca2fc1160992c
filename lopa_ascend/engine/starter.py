"""Makes the sequences of admitted requests, with their grammars."""

from __future__ import annotations

from lopa_ascend.config import ModelConfig
from lopa_ascend.core import Request, Sequence
from lopa_ascend.decode import begin
from lopa_ascend.decode.constraint import Constraint, Matcher
from lopa_ascend.decode.filters import filters_for
from lopa_ascend.decode.masked import begin_masked
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.decode.thinking import FreeAnswer, ThinkingMatcher
from lopa_ascend.kv.pages import PageTables
from lopa_ascend.kv.prefix_cache import Prefix
from lopa_ascend.runner.runner import Runner
from lopa_ascend.text.grammars import CompiledGrammar, Grammars
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Scoring


class Starter:
    """Makes sequences; does not refer to the engine.

    Attributes:
        compiler: of grammars, in threads; None without a tokenizer.
        grammars: by request id; compiled before ``begin``, which removes them.

    Args:
        num_token_ids: token ids from this one on do not exist in the tokenizer.
    """

    def __init__(self, runner: Runner, model: ModelConfig, tokenizer: Tokenizer | None, num_token_ids: int) -> None:
        self.grammars: dict[str, CompiledGrammar] = {}
        self._runner, self._model, self._num_token_ids = runner, model, num_token_ids
        self.compiler = None if tokenizer is None else Grammars(tokenizer)

    def begin(self, request: Request, page_tables: PageTables, entry: Prefix | None) -> Sequence:
        """Makes the sequence of an admitted request, with its first ``plan``. The pages already hold keys and values of
        the positions in ``entry``, the cached part of the prompt."""
        params, mask = request.params, self._model.mask_token_id
        eos = params.eos_ids_or(self._model.eos_token_ids)
        num_cached = 0 if entry is None else len(entry.tokens)
        start = SequenceStart(
            prompt=request.prompt,
            params=params,
            mask=mask,
            eos=frozenset(eos),
            num_committed=num_cached,
            properties=request.properties,
            vocab_size=self._model.vocab_size,
            constraint=self._constraint(request, eos),
            gapped=request.gapped,
        )
        sequence = Sequence(
            request=request,
            strategy=begin_masked(start, request.continuations) if request.continuations else begin(start),
            scoring=self._scoring(request),
            page_tables=page_tables,
            filters=filters_for(params, mask, (*eos, *params.stop_token_ids)),
            num_cached=num_cached,
            last_hidden=None if entry is None else entry.last_hidden,
        )
        self._runner.start(sequence)
        return sequence

    def _constraint(self, request: Request, eos: tuple[int, ...]) -> Constraint | None:
        """The request's grammar at its beginning; it is compiled by now."""
        if (asked := request.params.structured_outputs) is None:
            return None
        ends = [token for token in (*eos, *request.params.stop_token_ids) if token < self._num_token_ids]
        compiled = self.grammars.pop(request.request_id, None)
        thinking, number = asked.thinking, self._num_token_ids
        close = () if thinking is None else thinking.close
        matcher: Matcher = FreeAnswer(close, number) if compiled is None else compiled.matcher(ends)
        if thinking is not None:
            matcher = ThinkingMatcher(matcher, thinking, number)
        return Constraint(matcher, ends)

    def _scoring(self, request: Request) -> Scoring:
        """How a request's logits are scored. Fields without effect keep their defaults, so that more requests share a
        batch."""
        params = request.params
        assert params.seed is not None or not params.temperature, "the engine draws a seed where a request has none"
        return Scoring(
            confidence=params.ranking,
            mask=self._model.mask_token_id,
            num_token_ids=self._num_token_ids,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed or 0 if params.temperature else 0,
        )
