"""Word problems for the bundled model: seeded questions, and worked answers that end in "#### N".

    python -m scripts.demo_problems                        prints three problems
    python -m scripts.demo_problems --count 100 --json     a hundred, one JSON object a line

A problem is a start amount and one to three changes (more, fewer, twice as many), with every number from 10 to 99. The
question is worded by one of twelve story templates, each with its own verbs. The answer restates the amounts, breaks
each change into tens and ones, and repeats the result. Each sentence of the answer has four phrasings, and the question
does not say which one is taken: that is the uncertainty that lookahead branches resolve. The phrasings of a sentence
have equally many tokens, with the numbers at the same places, so filling a later position never forces a length on an
earlier one.

Training and held-out problems are disjoint by construction: a hash of the question's text decides on which side it is.
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

NAMES = ("Tom", "Anna", "Ben", "Lily", "Max", "Eva", "Sam", "Mia", "Leo", "Zoe", "Dan", "Kim")
HELD_OUT_BUCKETS = 64
"""Questions fall into so many buckets, of which one is held out."""
ANSWER_TOKENS = range(60, 128)
"""Lengths of answers."""
TOKEN = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+\n*|\s")
"""What the tokenizer makes one token of."""


@dataclass(frozen=True)
class Story:
    """One wording of a question. Sentences hold {name} of a person, {n} for a number, and {thing}."""

    things: tuple[str, ...]
    """What may be counted."""
    start: str
    """Says the start amount."""
    more: tuple[str, ...]
    """Sentences for an addition of {n}."""
    fewer: tuple[str, ...]
    """Sentences for a subtraction of {n}."""
    twice: str
    """Says that the amount doubles."""
    ask: str
    """Asks for the result."""


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
    """A question with its answer."""

    question: str
    answer: str
    """Worked out, and ending in "#### N"."""
    result: int
    """N."""

    @property
    def held_out(self) -> bool:
        """Whether the model must not be trained on it."""
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
    middle = a + sign * (b - ones)
    result = a + sign * b
    return f"{a}{symbol}{b - ones}={middle}, {middle}{symbol}{ones}={result}", result


def changes(rng: random.Random) -> tuple[int, list[tuple[str, int]]]:
    """A start amount, and one to three changes whose results stay within 10 to 99.

    A change is ("+", n), ("-", n) or ("2", n), where the last one doubles the amount n.
    """
    start = value = rng.randint(10, 99)
    num_changes = rng.choice((1, 2, 2, 3, 3))
    found: list[tuple[str, int]] = []
    while len(found) < num_changes:
        op = rng.choice("++--2")
        n = value if op == "2" else rng.randint(11, 89)
        result = value - n if op == "-" else value + n
        if n % 10 and 10 <= result <= 99:
            found.append((op, n))
            value = result
    return start, found


def make_problem(rng: random.Random) -> Problem:
    """A random problem of either side, with an answer of any length."""
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
    """An endless stream of problems with answers of 60 to 127 tokens.

    Args:
        seed: of the stream.
        held_out: which side the problems are from.
    """
    rng = random.Random(seed)
    while True:
        problem = make_problem(rng)
        if problem.held_out == held_out and len(TOKEN.findall(problem.answer)) in ANSWER_TOKENS:
            yield problem


def parse_result(text: str) -> int | None:
    """The number behind the last "####"; None if there is none."""
    words = text.rpartition("####")[2].split()
    return int(words[0]) if "####" in text and words and words[0].isdigit() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo_problems",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=3, metavar="N", help="number of problems (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="held-out problems, not those for training")
    parser.add_argument("--json", action="store_true", help="one JSON object with question and answer a line")
    args = parser.parse_args()
    for problem in itertools.islice(problems(args.seed, args.held_out), args.count):
        if args.json:
            print(json.dumps({"question": problem.question, "answer": problem.answer}))
        else:
            print(f"{problem.question}\n\n{problem.answer}\n")


if __name__ == "__main__":
    main()
