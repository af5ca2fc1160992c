"""Word problems of the bundled model: seeded questions and worked answers that end in ``#### N``.

A problem is a start amount and one to three changes (more, fewer, times), every number from 1 to 99. The question is
worded by one of twelve story templates, each with its own verbs. The answer restates the facts, breaks each change
into tens and ones, and repeats the result. Its sentences are drawn from several phrasings of different length that
the question does not determine: an honest source of uncertainty, which is what lookahead branches resolve.

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
    """One wording of a question; ``more``, ``fewer`` and ``times`` hold the sentences for each kind of change."""

    things: tuple[str, ...]
    start: str
    more: tuple[str, ...]
    fewer: tuple[str, ...]
    times: tuple[str, ...]
    ask: str


STORIES = (
    Story(
        ("apples", "pears", "plums"),
        "{name} has {n} {thing}.",
        ("{name} buys {n} more.", "A friend gives {name} {n} more."),
        ("{name} eats {n}.", "{name} gives away {n}."),
        ("Then {name} gets {n} times as many.",),
        "How many {thing} does {name} have now?",
    ),
    Story(
        ("books", "comics"),
        "There are {n} {thing} on the shelf of {name}.",
        ("{name} puts {n} more on it.",),
        ("{name} takes {n} from it.", "{name} sells {n}."),
        ("A bigger shelf holds {n} times as many.",),
        "How many {thing} are on the shelf in the end?",
    ),
    Story(
        ("fish", "frogs"),
        "{name} counts {n} {thing} in the pond.",
        ("Then {n} more come.",),
        ("Then {n} leave.",),
        ("By summer there are {n} times as many.",),
        "How many {thing} are in the pond now?",
    ),
    Story(
        ("coins", "stamps", "cards"),
        "{name} collects {thing} and owns {n} of them.",
        ("{name} finds {n} more.", "{name} wins {n} more."),
        ("{name} loses {n}.", "{name} trades {n} away."),
        ("Then the collection becomes {n} times as big.",),
        "How many {thing} does {name} own at last?",
    ),
    Story(
        ("cakes", "cookies"),
        "The bakery of {name} makes {n} {thing} in the morning.",
        ("At noon it makes {n} more.",),
        ("It sells {n}.", "{n} are eaten."),
        ("For a party it needs {n} times as many.",),
        "How many {thing} does that make?",
    ),
    Story(
        ("dollars",),
        "{name} saved {n} {thing}.",
        ("{name} earns {n} more.", "Grandma adds {n}."),
        ("{name} spends {n}.", "A toy costs {name} {n}."),
        ("After a year {name} has {n} times as much.",),
        "How many {thing} does {name} have in the end?",
    ),
    Story(
        ("people",),
        "{name} drives a bus with {n} {thing}.",
        ("At a stop {n} get on.",),
        ("At a stop {n} get off.",),
        ("A train takes {n} times as many.",),
        "How many {thing} ride at the end?",
    ),
    Story(
        ("eggs",),
        "The hens of {name} lay {n} {thing} on Monday.",
        ("They lay {n} more on Tuesday.",),
        ("{name} cooks {n}.", "{n} break."),
        ("In a month there are {n} times as many.",),
        "How many {thing} are there then?",
    ),
    Story(
        ("points",),
        "In a game {name} scores {n} {thing}.",
        ("In the next round {name} scores {n} more.",),
        ("A mistake costs {n}.",),
        ("A bonus makes it {n} times as many.",),
        "What is the number of {thing} of {name}?",
    ),
    Story(
        ("flowers", "trees"),
        "{name} plants {n} {thing} in the garden.",
        ("In spring {name} plants {n} more.",),
        ("In winter {n} die.", "The wind breaks {n}."),
        ("The next garden has {n} times as many.",),
        "How many {thing} is that?",
    ),
    Story(
        ("pages",),
        "{name} reads {n} {thing} of a book.",
        ("In the evening {name} reads {n} more.",),
        ("But {n} of them do not count.",),
        ("In a week {name} reads {n} times as many.",),
        "How many {thing} are counted?",
    ),
    Story(
        ("boxes", "bags"),
        "A truck of {name} carries {n} {thing}.",
        ("It loads {n} more.", "{name} adds {n}."),
        ("It drops off {n}.", "{name} unloads {n}."),
        ("A ship carries {n} times as many.",),
        "How many {thing} are carried in the end?",
    ),
)

OPENINGS = (
    "We start with {n} {thing}.",
    "At first there are {n} {thing}.",
    "The story begins with {n}.",
    "Let us see: {n} {thing} to begin with.",
)
STEPS = {
    "+": (
        "Then {n} more come: {work}.",
        "Adding {n} to that: {work}.",
        "It grows by {n}, so {work}.",
        "Now add {n}: {work}.",
    ),
    "-": (
        "Then {n} go away: {work}.",
        "Taking {n} from that: {work}.",
        "It falls by {n}, so {work}.",
        "Now subtract {n}: {work}.",
    ),
    "*": (
        "Then we need {n} times that: {work}.",
        "Taking it {n} times: {work}.",
        "It becomes {n} times as big, so {work}.",
        "Now multiply by {n}: {work}.",
    ),
}
RESULTS = (
    "That makes {n} {thing}.",
    "So there are {n} now.",
    "We have {n} {thing} after this.",
    "The result here is {n}.",
)
ENDINGS = (
    "In the end {name} counts {n} {thing}.",
    "So the answer is {n}.",
    "Nothing else changes, the answer is {n} {thing}.",
    "Therefore it is {n} for {name}.",
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
    """The calculation of ``a op b`` by tens and ones, and its result.

    >>> worked(37, "+", 45)
    ('37+40=77, 77+5=82', 82)
    >>> worked(14, "*", 3)
    ('10*3=30, 4*3=12, 30+12=42', 42)
    """
    if op == "*":
        tens, ones = a - a % 10, a % 10
        if tens and ones:
            return f"{tens}*{b}={tens * b}, {ones}*{b}={ones * b}, {tens * b}+{ones * b}={a * b}", a * b
        return f"{a}*{b}={a * b}", a * b
    sign = 1 if op == "+" else -1
    tens, ones = b - b % 10, b % 10
    if tens and ones:
        middle = a + sign * tens
        return f"{a}{op}{tens}={middle}, {middle}{op}{ones}={middle + sign * ones}", a + sign * b
    return f"{a}{op}{b}={a + sign * b}", a + sign * b


def changes(rng: random.Random) -> tuple[int, list[tuple[str, int]]]:
    """A start amount and one to three changes whose results all stay within 1 to 99."""
    start = value = rng.randint(2, 99)
    wanted = rng.choice((1, 2, 2, 3, 3))
    out: list[tuple[str, int]] = []
    while len(out) < wanted:
        op = rng.choice("++--*")
        if op == "+" and value < 99:
            n = rng.randint(1, 99 - value)
            value += n
        elif op == "-" and value > 1:
            n = rng.randint(1, value - 1)
            value -= n
        elif op == "*" and value <= 49:
            n = rng.randint(2, min(9, 99 // value))
            value *= n
        else:
            continue
        out.append((op, n))
    return start, out


def make_problem(rng: random.Random) -> Problem:
    story, name = rng.choice(STORIES), rng.choice(NAMES)
    thing = rng.choice(story.things)
    start, steps = changes(rng)
    kinds = {"+": story.more, "-": story.fewer, "*": story.times}

    def say(phrasings: tuple[str, ...], n: int, work: str = "") -> str:
        return rng.choice(phrasings).format(name=name, thing=thing, n=n, work=work)

    question = [story.start.format(name=name, thing=thing, n=start)]
    answer = [say(OPENINGS, start)]
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
