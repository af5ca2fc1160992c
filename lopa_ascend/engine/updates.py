"""Reports what a step did to a request."""

from __future__ import annotations

from lopa_ascend.sequence import Sequence
from lopa_ascend.types import Alternatives, SequenceResult, Update, winner_rank


def make_update(sequence: Sequence, result: SequenceResult) -> Update:
    """The update for one result, with the tokens that have become final since the sequence's last update. Counts them
    as reported, so an update that is lost cannot be made again.

    Args:
        sequence: as the step left it.
        result: what the step did to it.
    """
    strategy, record, params = sequence.strategy, result.record, sequence.request.params
    final = strategy.final_tokens()
    new = slice(sequence.num_reported, len(final))
    sequence.num_reported = len(final)
    finish_reason, stop_token_id = None, None
    if result.error is not None:
        finish_reason = "error"
    elif sequence.demand is None:
        stop_token_id = strategy.end_reached()
        finish_reason = "length" if stop_token_id is None else "stop"
    return Update(
        request_id=result.request_id,
        token_ids=tuple(final[new]),
        max_probs=tuple(strategy.winner.probs[new]),
        num_forwards=strategy.num_forwards,
        num_positions=strategy.num_opened,
        model_tokens=sequence.model_tokens,
        winner=None if record is None else winner_rank(record),
        cached_tokens=sequence.num_cached,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        error=result.error,
        seed=params.seed if params.is_random else None,
        record=record if sequence.request.trace else None,
        alternatives=_alternatives(sequence, range(new.start, new.stop)),
        canvas_positions=sequence.canvas_positions,
    )


def _alternatives(sequence: Sequence, places: range) -> tuple[Alternatives, ...]:
    """The most probable tokens of some places of the answer, if the request asked for them."""
    if not sequence.request.params.top_logprobs:
        return ()
    first = len(sequence.request.prompt)
    return tuple(sequence.strategy.alternatives.get(first + place, ()) for place in places)
