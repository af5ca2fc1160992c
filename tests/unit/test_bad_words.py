"""Words that an answer may not contain, whatever the order in which its positions are filled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.decode.bad_words import banned_tokens

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
        bans = {place: banned_tokens(bad, answer, place, MASK) for place in places}
        for place in places:
            allowed = [token for token in range(NUM_TOKENS) if token not in bans[place]]
            answer[place] = data.draw(st.sampled_from(allowed))
        assert not any(contains(answer, word) for word in bad)


def test_the_last_token_is_free_where_another_token_stands_before_it() -> None:
    word = [1, 2, 3]
    assert banned_tokens([word], [1, 2, MASK], 2, MASK) == [3]
    assert banned_tokens([word], [MASK, 2, MASK], 2, MASK) == [3]
    assert banned_tokens([word], [1, 1, MASK], 2, MASK) == []
    assert banned_tokens([word], [2, MASK, MASK], 1, MASK) == [], "the answer is too short for the word"
    assert banned_tokens([[3]], [MASK], 0, MASK) == [3]
