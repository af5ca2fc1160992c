"""Tells problems: a question in words, the steps of its answer, and what the result counts."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from scripts.problems import stories
from scripts.problems.chats import CHATS
from scripts.problems.exchange import with_other_nouns
from scripts.problems.language import SENTENCE_END, Scene, capitalise, random_scene
from scripts.problems.lexicon import MEN, WOMEN, WORDS
from scripts.problems.relations import RELATIONS, Relation
from scripts.problems.stories import SECTIONS, STORIES, Story
from scripts.problems.sums import make_sum
from scripts.problems.wordings import read
from scripts.problems.working import LARGEST, NUMBERS, Step, draw_number, draw_numbers, draw_small, kind_of

ALSO_WORDS = frozenset({"Bill", "Jan", "June", "Mark", "Pat", "Penny", "Ray", "Will"})
"""Names that a template may have as something else."""
NAME = re.compile(rf"\b(?:{'|'.join(name for name in WOMEN + MEN if name not in ALSO_WORDS)})\b")
OTHER_NAMES_SHARE = 0.6
"""Share of the templates with names whose names become others."""
FILLER_SHARE, NEEDLESS_SHARE = 0.12, 0.5
"""Share of the problems with a sentence that does not matter, and of such sentences with a number."""
FILLERS = read("fillers")
"""Sentences that do not matter, by section: "fillers" have no number, "needless" have one."""
WHO_AND_WHAT = re.compile(r"{([Ao])}")
"""Slots for a person (A) and a thing (o). A next question may use one only if the question before mentioned it."""
SIGNS = {"dollars": "$", "euros": "€", "pounds": "£"}


@dataclass
class Narrative:
    """A question and how it is solved."""

    question: str
    steps: list[Step]
    unit: str
    """What the result counts; "" for nothing."""
    scene: Scene | None = None
    """Who and what it is about, for a next question; None for a plain sum."""
    template: str | None = None
    """The template that tells all of it, if there is one."""

    @property
    def kind(self) -> str:
        """The kind of problem, for tables."""
        return kind_of(self.steps) if self.scene else "plain sum"


def tell(rng: random.Random, *, other_nouns: bool = False) -> Narrative:
    """A random problem.

    Args:
        rng: of everything.
        other_nouns: exchange rare nouns of templates, for training.
    """
    chosen = rng.random()
    if chosen < 0.12:
        question, steps = make_sum(rng)
        return Narrative(question, steps, "")
    return tell_story(rng) if chosen < 0.32 else tell_relation(rng, rng.choice(RELATIONS), other_nouns=other_nouns)


def tell_relation(rng: random.Random, relation: Relation, *, other_nouns: bool = False) -> Narrative:
    """Makes a word problem from one template.

    Args:
        rng: of numbers, names and choices.
        relation: the template, and how its result is calculated.
        other_nouns: exchange rare nouns of the template, for training.
    """
    source = relation.template
    if other_nouns:
        relation = with_other_nouns(rng, relation)
    scene = random_scene(rng)
    scene.names_only = "{B}" in relation.template
    others = "".join(name for name in NUMBERS if f"{{{name}}}" in relation.template)
    numbers, steps = draw_numbers(rng, relation.expression, others)
    has_other_names = rng.random() < OTHER_NAMES_SHARE
    template = with_other_names(rng, relation.template) if has_other_names else relation.template
    sentences = scene.say(template, **numbers)
    if rng.random() < FILLER_SHARE:
        sentences = _with_filler(rng, scene, sentences)
    unit = scene.say(relation.unit)
    question = with_sign(rng, capitalise(sentences), scene.slots["coin"])
    return Narrative(question, steps, unit, scene, source)


def with_other_names(rng: random.Random, template: str) -> str:
    """A template whose own names have become others, of women for women and of men for men."""
    others: dict[str, str] = {}
    for name in NAME.findall(template):
        if name not in others:
            free = [other for other in (WOMEN if name in WOMEN else MEN) if other not in template]
            others[name] = rng.choice([other for other in free if other not in others.values()])
    return NAME.sub(lambda found: others[found[0]], template)


def with_sign(rng: random.Random, text: str, coin: str) -> str:
    """A text in which now and then "$5" stands for "5 dollars", as well with euros and pounds."""
    if coin not in SIGNS or rng.random() < 0.6:
        return text
    return re.sub(rf"(\d+) {coin}\b", rf"{SIGNS[coin]}\1", text)


def _with_filler(rng: random.Random, scene: Scene, text: str) -> str:
    """A text with a sentence somewhere that does not matter."""
    sentences = SENTENCE_END.split(text)
    sentences.insert(rng.randrange(len(sentences)), filler(rng, scene).rstrip("."))
    return ". ".join(sentences).replace("!. ", "! ")


def filler(rng: random.Random, scene: Scene) -> str:
    """A sentence that does not matter."""
    section = "needless" if rng.random() < NEEDLESS_SHARE else "fillers"
    return scene.say(rng.choice(FILLERS[section]), n=draw_number(rng), s=draw_small(rng))


@dataclass(frozen=True)
class Part:
    """A sentence of a story, or several that are joined."""

    text: str
    """Without its capital."""
    is_of_actor: bool
    """Whether it is one sentence that begins with "{A} <verb>", which a next one can be joined to."""


class Teller:
    """Tells a story of an amount that changes.

    Args:
        rng: of everything.
        story: the kind of story.
    """

    def __init__(self, rng: random.Random, story: Story):
        self.rng = rng
        self.story = story
        self.scene = random_scene(rng, story.nouns)
        if story is stories.MONEY:
            coin = rng.choice(WORDS["money"])
            self.scene.slots |= {"o": coin, "o1": coin.removesuffix("s")}
        self.steps: list[Step] = []
        self.parts: list[Part] = []
        self.value = 0

    def add(self, templates: list[str], **numbers: int) -> None:
        """Tells one of the templates."""
        template = self.rng.choice(templates)
        is_of_actor = template.startswith("{A} <")
        follows_actor = bool(self.parts) and self.parts[-1].is_of_actor
        is_joined = is_of_actor and follows_actor and self.rng.random() < 0.25
        text = self.scene.say(template.removeprefix("{A} ") if is_joined else template, **numbers)
        if is_joined:
            before = self.parts.pop().text.rstrip(".")
            text = f"{before}{self.rng.choice((' and', ' and', ' and then', ', then'))} {text}"
        self.parts.append(Part(text, is_of_actor and template.count(".") == 1))

    def step(self, op: str, right: int, left: int | None = None) -> None:
        """Makes a step of the answer, from the present amount or from ``left``."""
        self.steps.append(Step(self.value if left is None else left, op, right))
        self.value = self.steps[-1].result

    def begin(self) -> None:
        """Tells what there is at first."""
        chosen = self.rng.random()
        is_owned = self.story in (stories.OWNED, stories.SHOP)
        if is_owned and chosen < 0.16:
            numbers, steps = draw_numbers(self.rng, "n*m")
            self.add(SECTIONS["start groups"], **numbers)
        elif is_owned and chosen < 0.24:
            numbers, steps = draw_numbers(self.rng, "n+m")
            self.add(SECTIONS["start pairs"], **numbers)
        else:
            self.value = draw_number(self.rng)
            self.add(self.story.start, n=self.value)
            return
        self.steps = steps
        self.value = steps[-1].result

    def change(self) -> None:
        """Tells that something comes or goes; tells nothing if the numbers that were drawn do not fit."""
        is_more = self.rng.random() < (0.5 if self.value < 500 else 0.25)
        if self.value < 4:
            is_more = True
        in_groups = self.story is stories.OWNED and self.rng.random() < 0.12
        room = LARGEST - self.value if is_more else self.value
        if in_groups:
            numbers, steps = draw_numbers(self.rng, "n*m")
            if steps[-1].result > room:
                return
            before = self.value
            self.add(SECTIONS["more groups"] if is_more else SECTIONS["fewer groups"], **numbers)
            self.steps += steps
            self.step("+" if is_more else "-", steps[-1].result, before)
            return
        if self.rng.random() < 0.03 and self.value * 2 <= LARGEST:
            self.add(SECTIONS["doubles"])
            self.step("*", 2)
            return
        n = draw_number(self.rng)
        if n > room:
            n = self.rng.randint(1, max(1, room))
        if n > room or n < 1:
            return
        self.add(self.story.more if is_more else self.story.fewer, n=n)
        self.step("+" if is_more else "-", n)

    def end(self) -> str:
        """Tells how the story ends and returns the question, without its capital."""
        divisors = [d for d in range(2, 13) if self.value % d == 0 and self.value > d]
        may_share = self.story in (stories.OWNED, stories.SHOP) and len(self.steps) < 4
        if may_share and divisors and self.rng.random() < 0.16:
            n = self.rng.choice(divisors)
            is_half = self.value % 2 == 0 and self.rng.random() < 0.4
            template = self.rng.choice(SECTIONS["halves"] if is_half else SECTIONS["shares"])
            self.step("/", 2 if is_half else n)
            return self.scene.say(template, n=n)
        has_left = any(step.op == "-" for step in self.steps) and self.rng.random() < 0.75
        template = self.rng.choice(self.story.ask_left if has_left else self.story.ask)
        return self.scene.say(template)

    def text(self, question: str) -> str:
        """All of it."""
        rng = self.rng
        parts = [part.text for part in self.parts]
        if len(parts) <= 2 and rng.random() < 0.06 and question.endswith("?") and all(p.count(".") == 1 for p in parts):
            return capitalise(f"{question[:-1]} if {' and '.join(part.rstrip('.') for part in parts)}?")
        if rng.random() < FILLER_SHARE:
            parts.insert(rng.randint(0, len(parts)), filler(rng, self.scene))
        text = parts[0]
        for part in parts[1:]:
            if rng.random() < 0.1 and text.endswith("."):
                text = f"{text[:-1]}{rng.choice((', then', ' and', ', and', ', and then', ', but then', ';'))} {part}"
            else:
                text = f"{text} {part}"
        return capitalise(f"{text} {question}")


def tell_story(rng: random.Random) -> Narrative:
    """A problem from a story with one to five steps."""
    teller = Teller(rng, rng.choice(STORIES))
    teller.begin()
    least_steps = rng.choice((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4))
    while len(teller.steps) < least_steps:
        teller.change()
    text = teller.text(teller.end())
    if teller.story is stories.MONEY:
        text = with_sign(rng, text, teller.scene.slots["o"])
    return Narrative(text, teller.steps, teller.scene.slots["o"], teller.scene)


def tell_next(rng: random.Random, narrative: Narrative) -> Narrative | None:
    """A question that goes on from another one's result; None if none fits."""
    result = narrative.steps[-1].result
    scene = narrative.scene or random_scene(rng)
    chosen = rng.random()
    if chosen < 0.42:
        templates, step = CHATS["more"], Step(result, "+", draw_number(rng))
    elif chosen < 0.8:
        n = draw_number(rng)
        templates, step = CHATS["fewer"], Step(result, "-", n if n <= result else rng.randint(1, max(1, result)))
    elif chosen < 0.86:
        templates, step = CHATS["half"], Step(result, "/", 2)
    elif chosen < 0.9:
        templates, step = CHATS["double"], Step(result, "*", 2)
    elif chosen < 0.95:
        templates, step = CHATS["share"], Step(result, "/", draw_small(rng))
    else:
        templates, step = CHATS["times"], Step(result, "*", draw_small(rng))
    if not step.is_easy or step.left == 0:
        return None
    templates = [template for template in templates if set(WHO_AND_WHAT.findall(template)) <= scene.said]
    return Narrative(capitalise(scene.say(rng.choice(templates), n=step.right)), [step], narrative.unit, scene)
