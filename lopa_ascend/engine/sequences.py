"""Makes the sequence of a request when the scheduler admits it."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config import ModelConfig
from lopa_ascend.config.decoding import banned_ids
from lopa_ascend.decode import begin
from lopa_ascend.decode.bad_words import BadWords
from lopa_ascend.kv.pages import PageTables
from lopa_ascend.kv.prefix_cache import PrefixEntry
from lopa_ascend.runner.runner import Runner
from lopa_ascend.sequence import Request, Sequence
from lopa_ascend.types import Scoring


@dataclass(frozen=True)
class SequenceFactory:
    """Makes the sequences of admitted requests; see ``scheduler.Begin``.

    It is apart from the engine so that the scheduler does not refer to the engine: an engine that is not used any more
    frees its pages at once.
    """

    runner: Runner
    model: ModelConfig
    num_token_ids: int
    """Token ids from this one on do not exist in the tokenizer."""

    def __call__(
        self, request: Request, page_tables: PageTables, num_cached: int, entry: PrefixEntry | None
    ) -> Sequence:
        eos = request.params.eos_token_ids
        if eos is None:
            eos = self.model.eos_token_ids
        sequence = Sequence(
            request=request,
            strategy=begin(request.prompt, request.params, self.model.mask_token_id, frozenset(eos), num_cached),
            scoring=self._scoring(request, eos),
            page_tables=page_tables,
            bad_words=self._bad_words(request),
            num_cached=num_cached,
            last_hidden=None if entry is None else entry.last_hidden,
        )
        self.runner.start(sequence)
        return sequence

    def _bad_words(self, request: Request) -> BadWords | None:
        words = banned_ids(request.params)
        assert len(words) == len(request.params.bad_words), "the engine knows no text"
        return BadWords(words, self.model.mask_token_id) if words else None

    def _scoring(self, request: Request, eos: tuple[int, ...]) -> Scoring:
        # Fields without effect keep their defaults, so that more requests are scored together.
        params = request.params
        bans_eos = params.min_new_tokens > 0
        seed = 0
        if params.temperature:
            assert params.seed is not None, "the engine draws a seed where a request has none"
            seed = params.seed
        return Scoring(
            confidence=params.ranking,
            mask=self.model.mask_token_id,
            num_token_ids=self.num_token_ids,
            eos=(*eos, *params.stop_token_ids) if bans_eos else (),
            min_position=len(request.prompt) + params.min_new_tokens if bans_eos else 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=seed,
        )
