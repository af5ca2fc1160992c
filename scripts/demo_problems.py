"""Word problems of the bundled model: seeded questions and worked answers that end in ``#### N``.

A problem is a start amount and one to three changes (more, fewer, twice as many), with every number from 10 to 99. The
question is worded by one of twelve story templates, each with its own verbs. The answer restates the amounts, breaks
each change into tens and ones, and repeats the result. Which of four phrasings each of its sentences takes, the
question does not say: an honest source of uncertainty, which is what lookahead branches resolve. The phrasings of a
sentence have equally many tokens, with the numbers at the same places: filling a later position never forces a length
on an earlier one.

Training and held-out problems are disjoint by construction: a question belongs to one side by a hash of its text.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = ("Tom", "Anna", "Ben", "Lily", "Max", "Eva", "Sam", "Mia", "Leo", "Zoe", "Dan", "Kim")
HELD_OUT_BUCKETS = 64  # one bucket of this many is held out
ANSWER_TOKENS = range(60, 128)
PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+\n*|\s")  # what the tokenizer makes one token of


@dataclass(frozen=True)
class Story:
    """One wording of a question; ``more``, ``fewer`` and ``twice`` hold the sentences for each kind of change."""

    things: tuple[str, ...]
    start: str
    more: tuple[str, ...]
    fewer: tuple[str, ...]
    twice: str
    ask: str


STORIES = (
    Story(
        ("apples", "pears", "plums"),
        "{name} has {n} {thing}.",
        ("{name} buys {n} more.", "A friend gives {name} {n} more."),
        ("{name} eats {n}.", "{name} gives away {n}."),
        "Then {name} gets twice as many.",
        "How many {thing} does {name} have now?",
    ),
    Story(
        ("books", "comics"),
        "There are {n} {thing} on the shelf of {name}.",
        ("{name} puts {n} more on it.",),
        ("{name} takes {n} from it.", "{name} sells {n}."),
        "A bigger shelf holds twice as many.",
        "How many {thing} are on the shelf in the end?",
    ),
    Story(
        ("fish", "frogs"),
        "{name} counts {n} {thing} in the pond.",
        ("Then {n} more come.",),
        ("Then {n} leave.",),
        "By summer there are twice as many.",
        "How many {thing} are in the pond now?",
    ),
    Story(
        ("coins", "stamps", "cards"),
        "{name} collects {thing} and owns {n} of them.",
        ("{name} finds {n} more.", "{name} wins {n} more."),
        ("{name} loses {n}.", "{name} trades {n} away."),
        "Then the collection becomes twice as big.",
        "How many {thing} does {name} own at last?",
    ),
    Story(
        ("cakes", "cookies"),
        "The bakery of {name} makes {n} {thing} in the morning.",
        ("At noon it makes {n} more.",),
        ("It sells {n}.", "{n} are eaten."),
        "For a party it needs twice as many.",
        "How many {thing} does that make?",
    ),
    Story(
        ("dollars",),
        "{name} saved {n} {thing}.",
        ("{name} earns {n} more.", "Grandma adds {n}."),
        ("{name} spends {n}.", "A toy costs {name} {n}."),
        "After a year {name} has twice as much.",
        "How many {thing} does {name} have in the end?",
    ),
    Story(
        ("people",),
        "{name} drives a bus with {n} {thing}.",
        ("At a stop {n} get on.",),
        ("At a stop {n} get off.",),
        "A train takes twice as many.",
        "How many {thing} ride at the end?",
    ),
    Story(
        ("eggs",),
        "The hens of {name} lay {n} {thing} on Monday.",
        ("They lay {n} more on Tuesday.",),
        ("{name} cooks {n}.", "{n} break."),
        "In a month there are twice as many.",
        "How many {thing} are there then?",
    ),
    Story(
        ("points",),
        "In a game {name} scores {n} {thing}.",
        ("In the next round {name} scores {n} more.",),
        ("A mistake costs {n}.",),
        "A bonus makes it twice as many.",
        "What is the number of {thing} of {name}?",
    ),
    Story(
        ("flowers", "trees"),
        "{name} plants {n} {thing} in the garden.",
        ("In spring {name} plants {n} more.",),
        ("In winter {n} die.", "The wind breaks {n}."),
        "The next garden has twice as many.",
        "How many {thing} is that?",
    ),
    Story(
        ("pages",),
        "{name} reads {n} {thing} of a book.",
        ("In the evening {name} reads {n} more.",),
        ("But {n} of them do not count.",),
        "In a week {name} reads twice as many.",
        "How many {thing} are counted?",
    ),
    Story(
        ("boxes", "bags"),
        "A truck of {name} carries {n} {thing}.",
        ("It loads {n} more.", "{name} adds {n}."),
        ("It drops off {n}.", "{name} unloads {n}."),
        "A ship carries twice as many.",
        "How many {thing} are carried in the end?",
    ),
)

OPENINGS = (
    "At first we have {n} {thing} here.",
    "The story begins with {n} {thing} now.",
    "We start this with {n} {thing} now.",
    "Let us now take {n} {thing} first.",
)
PLAN = "Let us work it out."
STEPS = {
    "+": (
        "Adding {n} gives: {work}.",
        "Plus {n} makes: {work}.",
        "Then {n} come: {work}.",
        "Another {n} join: {work}.",
    ),
    "-": (
        "Taking {n} leaves: {work}.",
        "Minus {n} makes: {work}.",
        "Then {n} go: {work}.",
        "Without {n} remain: {work}.",
    ),
    "2": (
        "Doubling {n} gives: {work}.",
        "Twice {n} makes: {work}.",
        "Then {n} again: {work}.",
        "Another {n} join: {work}.",
    ),
}
RESULTS = ("That makes {n} {thing}.", "We have {n} {thing}.", "There are {n} {thing}.", "This gives {n} {thing}.")
ENDINGS = (
    "So the answer is {n} {thing}.",
    "In the end remain {n} {thing}.",
    "Therefore {name} now counts {n} {thing}.",
    "The final count is {n} {thing}.",
)


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    result: int

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.question.encode()) % HELD_OUT_BUCKETS == 0


def worked(a: int, op: str, b: int) -> tuple[str, int]:
    """The calculation of a + b ("+", "2") or a - b ("-") by tens and ones, and its result.

    >>> worked(37, "+", 45)
    ('37+40=77, 77+5=82', 82)
    >>> worked(52, "-", 17)
    ('52-10=42, 42-7=35', 35)
    """
    sign, symbol = (-1, "-") if op == "-" else (1, "+")
    ones = b % 10
    middle, result = a + sign * (b - ones), a + sign * b
    return f"{a}{symbol}{b - ones}={middle}, {middle}{symbol}{ones}={result}", result


def changes(rng: random.Random) -> tuple[int, list[tuple[str, int]]]:
    """A start amount and one to three changes ("2" doubles), whose results all stay within 10 to 99."""
    start = value = rng.randint(10, 99)
    wanted = rng.choice((1, 2, 2, 3, 3))
    out: list[tuple[str, int]] = []
    while len(out) < wanted:
        op = rng.choice("++--2")
        n = value if op == "2" else rng.randint(11, 89)
        result = value - n if op == "-" else value + n
        if n % 10 and 10 <= result <= 99:
            out.append((op, n))
            value = result
    return start, out


def make_problem(rng: random.Random) -> Problem:
    story, name = rng.choice(STORIES), rng.choice(NAMES)
    thing = rng.choice(story.things)
    start, steps = changes(rng)
    kinds = {"+": story.more, "-": story.fewer, "2": (story.twice,)}

    def say(phrasings: tuple[str, ...], n: int, work: str = "") -> str:
        return rng.choice(phrasings).format(name=name, thing=thing, n=n, work=work)

    question = [story.start.format(name=name, thing=thing, n=start)]
    answer = [say(OPENINGS, start), PLAN]
    value = start
    for op, n in steps:
        question.append(say(kinds[op], n))
        work, value = worked(value, op, n)
        answer += [say(STEPS[op], n, work), say(RESULTS, value)]
    question.append(story.ask.format(name=name, thing=thing))
    answer.append(say(ENDINGS, value))
    return Problem(" ".join(question), " ".join(answer) + f"\n#### {value}", value)


def problems(seed: int, held_out: bool) -> Iterator[Problem]:
    """An endless stream of problems of one side of the split, with answers of 60 to 127 tokens."""
    rng = random.Random(seed)
    while True:
        problem = make_problem(rng)
        if problem.held_out == held_out and len(PIECE.findall(problem.answer)) in ANSWER_TOKENS:
            yield problem


def parse_result(text: str) -> int | None:
    """The number behind the last ``####``, or None."""
    tail = text.rpartition("####")[2].split()
    return int(tail[0]) if "####" in text and tail and tail[0].isdigit() else None
