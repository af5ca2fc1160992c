"""Word problems for the bundled model: seeded questions, and worked answers that end in "#### N".

    python -m scripts.demo_problems                        prints three problems
    python -m scripts.demo_problems --count 100 --json     a hundred, one JSON object a line

A problem is a story that is put together sentence by sentence, a text from one template (parts, comparisons, groups,
shares, prices, small stories), or a plain sum. It has one to four steps, seldom five, and numbers from 0 to 999. Every
sentence has many wordings, which multiply with hundreds of names and objects; scripts/problems/ has them. Some
problems stand after a system prompt or earlier turns, go on from an earlier answer, or are typed carelessly; some
questions are no problems, and have a short honest answer.

The answer states each operation, works it out in links that are easy (24+18=34+8=42), and repeats the result. An
answer has one of four styles, whose sentences have equally many words, and the question does not say which one: that is
an uncertainty that lookahead branches resolve.

Training and held-out problems are disjoint by construction: a hash of the question decides on which side it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.demo import HANDWRITTEN, INDEPENDENT
from scripts.arguments import number_from
from scripts.problems import chats
from scripts.problems.sums import make_practice
from scripts.problems.telling import Narrative, tell, tell_next
from scripts.problems.working import answer

HELD_OUT_BUCKETS = 64
"""Questions fall into so many buckets, of which one is held out."""
SYSTEM_SHARE, SECOND_TURN_SHARE, SMALL_TALK_SHARE = 0.14, 0.2, 0.03
"""Shares of the conversations with a system prompt, with a second turn, and without a problem."""

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """A conversation that ends with a question, and the answer to it."""

    messages: list[Message]
    """With "role" and "content"; the last one is the question."""
    answer: str
    """Worked out, and ending in "#### N"; or a sentence, where the question is no problem."""
    result: int | None
    """N; None where the question is no problem."""
    kind: str
    """For tables: "add", "two steps", "plain sum"... """
    held_out: bool
    """Whether the model must not be trained on it."""
    template: str | None = None
    """The template that tells the question, if one tells all of it."""

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]


def normalised(question: str) -> str:
    """What two spellings of a question have in common: its letters, digits and signs, in lower case."""
    return re.sub(r"[^a-z0-9+*/-]", "", question.lower())


def is_held_out(question: str) -> bool:
    """Whether a question is on the held-out side."""
    return zlib.crc32(normalised(question).encode()) % HELD_OUT_BUCKETS == 0


def _worded_by_others() -> frozenset[str]:
    """Questions that measure the model and are not the generator's, normalised; no problem may be one of them."""
    lines = [line for path in (HANDWRITTEN, INDEPENDENT) for line in path.read_text(encoding="utf-8").splitlines()]
    return frozenset(normalised(json.loads(line)["question"]) for line in lines)


WORDED_BY_OTHERS = _worded_by_others()


def _tell_own(rng: random.Random, *, other_nouns: bool) -> Narrative:
    """A random problem that is not one of those worded by others."""
    while True:
        narrative = tell(rng, other_nouns=other_nouns)
        if normalised(narrative.question) not in WORDED_BY_OTHERS:
            return narrative


def plain_problem(rng: random.Random, *, other_nouns: bool = False) -> Problem:
    """A random problem of either side in one clean message."""
    narrative = _tell_own(rng, other_nouns=other_nouns)
    messages = [{"role": "user", "content": narrative.question}]
    text = answer(rng, narrative.steps, narrative.unit)
    return Problem(
        messages,
        text,
        narrative.steps[-1].result,
        narrative.kind,
        is_held_out(narrative.question),
        narrative.template,
    )


def practice(seed: int) -> Iterator[Problem]:
    """An endless stream of unrelated sums to work out one after the other, for training alone.

    An answer has some five calculations, where that of a problem has one to four, so arithmetic is learned in fewer
    steps.
    """
    rng = random.Random(seed)
    while True:
        question, steps = make_practice(rng)
        messages = [{"role": "user", "content": question}]
        yield Problem(messages, answer(rng, steps, ""), steps[-1].result, "practice", held_out=False)


def make_problem(rng: random.Random, *, other_nouns: bool = False) -> Problem:
    """A random conversation of either side, typed as people type."""
    chosen = rng.random()
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": chats.system_prompt(rng)})
    if chosen < SMALL_TALK_SHARE:
        question, text = chats.small_talk(rng)
        messages.append({"role": "user", "content": chats.typed(rng, question)})
        return Problem(messages, text, None, "no problem", is_held_out(question))
    narrative = _tell_own(rng, other_nouns=other_nouns)
    held_out = is_held_out(narrative.question)
    if chosen < SMALL_TALK_SHARE + SECOND_TURN_SHARE:
        messages += _earlier_turn(rng, narrative)
        following = tell_next(rng, narrative) if rng.random() < 0.5 else None
        narrative = following or _tell_own(rng, other_nouns=other_nouns)
        held_out = held_out or (following is None and is_held_out(narrative.question))
    messages.append({"role": "user", "content": chats.typed(rng, narrative.question)})
    return Problem(
        messages,
        answer(rng, narrative.steps, narrative.unit),
        narrative.steps[-1].result,
        narrative.kind,
        held_out,
        narrative.template,
    )


def _earlier_turn(rng: random.Random, narrative: Narrative) -> list[Message]:
    """A question and its answer, worked out or brief; sometimes small talk before them."""
    text = answer(rng, narrative.steps, narrative.unit)
    if rng.random() < 0.15:
        result = narrative.steps[-1].result
        text = rng.choice(
            (f"{result}", f"The answer is {result}.", f"#### {result}", f"{result} {narrative.unit}".strip())
        )
    turn = [{"role": "user", "content": chats.typed(rng, narrative.question)}, {"role": "assistant", "content": text}]
    if rng.random() < 0.08:
        question, reply = chats.small_talk(rng)
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}, *turn]
    return turn


def problems(seed: int, held_out: bool, *, plain: bool = False, other_nouns: bool = False) -> Iterator[Problem]:
    """An endless stream of problems.

    Args:
        seed: of the stream.
        held_out: which side the problems are from.
        plain: problems in one clean message each, not whole conversations.
        other_nouns: exchange rare nouns of templates, for training.
    """
    rng = random.Random(seed)
    make = plain_problem if plain else make_problem
    while True:
        problem = make(rng, other_nouns=other_nouns)
        if problem.held_out == held_out:
            yield problem


def parse_result(text: str) -> int | None:
    """The number after the last "####"; None if there is none."""
    words = text.rpartition("####")[2].split()
    return int(words[0]) if "####" in text and words and words[0].isdecimal() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo_problems",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--count", type=number_from(1), default=3, metavar="N", help="number of problems (default: 3)")
    parser.add_argument("--seed", type=number_from(0), default=0, help="seed of the problems (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="held-out problems, not those for training")
    parser.add_argument("--json", action="store_true", help="one JSON object with messages and answer a line")
    args = parser.parse_args()
    for problem in itertools.islice(problems(args.seed, args.held_out), args.count):
        if args.json:
            print(json.dumps({"messages": problem.messages, "answer": problem.answer, "kind": problem.kind}))
        else:
            for message in problem.messages:
                print(f"{message['role']}: {message['content']}")
            print(f"answer: {problem.answer}\n")


if __name__ == "__main__":
    main()
