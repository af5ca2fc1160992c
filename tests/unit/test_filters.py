"""What may not be filled in: words, whatever the order in which positions are filled, and early ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.filters import BadWords, EarlyEnds, filters_for

MASK, NUM_TOKENS = 9, 4
words = st.lists(st.lists(st.integers(0, NUM_TOKENS - 2), min_size=1, max_size=3), min_size=1, max_size=4)


def contains(answer: list[int], word: list[int]) -> bool:
    return any(answer[i : i + len(word)] == word for i in range(len(answer)))


@given(words, st.permutations(range(8)), st.data())
def test_no_order_of_fills_and_no_number_of_them_at_once_makes_a_word(
    bad: list[list[int]], order: list[int], data: st.DataObject
) -> None:
    answer = [MASK] * 8
    while order:
        places, order = order[: (count := data.draw(st.integers(1, len(order))))], order[count:]
        banned = BadWords(bad, MASK).banned(answer, first := min(places))
        for place in places:
            allowed = [token for token in range(NUM_TOKENS) if token not in banned[place - first]]
            answer[place] = data.draw(st.sampled_from(allowed))
        assert not any(contains(answer, word) for word in bad)


def test_the_last_token_is_free_where_another_token_stands_before_it() -> None:
    words = BadWords([[1, 2, 3]], MASK)
    assert words.banned([1, 2, MASK], 2) == [{3}]
    assert words.banned([MASK, 2, MASK], 2) == [{3}]
    assert words.banned([1, 1, MASK], 2) == [set()]
    assert words.banned([1, MASK, MASK], 1) == [set(), {3}], "a word of three cannot end at place 1"
    assert BadWords([[3]], MASK).banned([MASK], 0) == [{3}]


@given(words, st.lists(st.sampled_from([*range(NUM_TOKENS), MASK]), min_size=1, max_size=8), st.data())
def test_a_token_is_banned_where_it_could_end_a_word(
    bad: list[list[int]], answer: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(answer) - 1))
    wanted = []
    for place in range(first, len(answer)):
        before = {len(word): answer[max(0, place - len(word) + 1) : place] for word in bad}
        fits = [
            word
            for word in bad
            if len(before[len(word)]) == len(word) - 1
            and all(held in (token, MASK) for token, held in zip(word, before[len(word)], strict=False))
        ]
        wanted.append({word[-1] for word in fits})
    assert BadWords(bad, MASK).banned(answer, first) == wanted


def test_ends_wait_for_as_many_tokens_as_an_answer_must_have() -> None:
    assert EarlyEnds([7, 5], 3).banned([1, MASK, MASK, MASK, MASK], 1) == [{5, 7}, {5, 7}, set(), set()]


def test_a_request_has_the_filters_that_it_asks_for() -> None:
    asked = DecodingParams(bad_words=((1, 2), (3,)), min_new_tokens=2)
    assert filters_for(DecodingParams(), MASK, [5]) == ()
    assert [filter_.banned([1, MASK, MASK], 1) for filter_ in filters_for(asked, MASK, [5])] == [
        [{2, 3}, {2, 3}],
        [{5}, set()],
    ]
