"""Sentences from templates: choices, slots, verbs that agree with their subject, pronouns, and numbers in words."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from scripts.problems import lexicon
from scripts.problems.lexicon import MEN, WOMEN, WORDS

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
IRREGULAR_PASTS = dict(
    pair.split(":")
    for pair in (
        "buy:bought give:gave get:got find:found lose:lost sell:sold eat:ate take:took break:broke make:made "
        "bring:brought catch:caught win:won spend:spent put:put come:came go:went leave:left fly:flew swim:swam "
        "run:ran steal:stole throw:threw send:sent keep:kept read:read write:wrote grow:grew cut:cut see:saw pay:paid "
        "have:had do:did lend:lent drink:drank drive:drove ride:rode fall:fell die:died let:let hide:hid build:built "
        "draw:drew feed:fed hold:held think:thought know:knew shoot:shot teach:taught rise:rose sit:sat stand:stood "
        "begin:began tear:tore choose:chose drop:dropped swap:swapped hop:hopped plan:planned chop:chopped "
        "stop:stopped fit:fit cost:cost set:set hang:hung grab:grabbed tip:tipped ship:shipped knit:knitted "
        "step:stepped trim:trimmed melt:melted wrap:wrapped weigh:weighed wear:wore speak:spoke sleep:slept sing:sang "
        "feel:felt hum:hummed"
    ).split()
)
PRONOUNS = {
    "f": ("she", "her", "her"), "m": ("he", "him", "his"), "1": ("I", "me", "my"), "2": ("you", "you", "your"),
    "p": ("we", "us", "our"), "t": ("they", "them", "their"),
}  # fmt: skip
CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{([^{}]+)\}")
VERB = re.compile(r"<([a-z]+)(?:@([A-Za-z]))?>")
SENTENCE_START = re.compile(r"(^|[.?!:] |\n)([a-z])")
WRONG_ARTICLE = re.compile(r"((?:^|[.?!:;(\"] )A|\ba) (?=(?!eu|one\b|once\b)[aeioAEIO])")
"""An article before a vowel that is heard; not the label of "Class A is"."""
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)\. ")
"""Between two sentences; the point of "Mr. Bell" ends none."""


def words(n: int) -> str:
    """A number from 0 to 99 in words.

    >>> words(47)
    'forty-seven'
    """
    if n < 20:
        return UNITS[n]
    return TENS[n // 10] + ("-" + UNITS[n % 10] if n % 10 else "")


def conjugate(verb: str, person: str, past: bool) -> str:
    """A verb's form for a person (a key of PRONOUNS, "s" singular noun) in the present or past tense."""
    third = person in "fms"
    if verb == "be":
        if past:
            return "was" if third or person == "1" else "were"
        return "is" if third else "am" if person == "1" else "are"
    if past:
        if verb in IRREGULAR_PASTS:
            return IRREGULAR_PASTS[verb]
        if verb.endswith("e"):
            return verb + "d"
        return verb[:-1] + "ied" if re.search("[^aeiou]y$", verb) else verb + "ed"
    if not third:
        return verb
    if verb == "have":
        return "has"
    if re.search("(s|x|ch|sh|o)$", verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search("[^aeiou]y$", verb) else verb + "s"


@dataclass
class Actor:
    """Somebody in a problem."""

    name: str
    """As first mentioned."""
    person: str
    """A key of PRONOUNS."""
    mentioned: bool = False


@dataclass
class Scene:
    """Who and what a problem is about; fills templates.

    A template has choices "[a|b|]", which may be nested, slots "{o}", and verbs "<buy>" that agree with actor A, or
    "<buy@B>" with actor B, "<buy@p>" with a plural and "<buy@s>" with a singular. "{A}" is the name or pronoun, "{a}"
    the object form, "{A's}" the possessive; numbers are slots as well.
    """

    rng: random.Random
    past: bool
    word_rate: float
    """How often a number is in words."""
    actors: dict[str, Actor]
    slots: dict[str, str]
    numbers: dict[str, int] = field(default_factory=dict)
    names_only: bool = False
    """No pronouns, because there are two actors."""
    said: set[str] = field(default_factory=set)
    """Slots that were filled; an actor's slots count as its letter, in upper case."""

    def say(self, template: str, **numbers: int) -> str:
        """One sentence or more from a template, not capitalised, with these numbers."""
        self.numbers.update(numbers)
        text = template
        while CHOICE.search(text):
            text = CHOICE.sub(lambda found: self.rng.choice(found[1].split("|")), text, count=1)
        text = VERB.sub(self._verb, text)
        text = SLOT.sub(self._slot, text)
        text = re.sub(rf"(?<![\w-])(1|one) {re.escape(self.slots['o'])}\b", rf"\1 {self.slots.get('o1', '')}", text)
        text = re.sub(" +([,.?!;:])", r"\1", re.sub("  +", " ", text)).strip()
        return WRONG_ARTICLE.sub(r"\1n ", text)

    def number(self, n: int) -> str:
        """A number, in digits or in words."""
        if n == 12 and self.rng.random() < 0.05:
            return "a dozen"
        in_words = n <= 20 or (n < 100 and (n % 10 == 0 or self.rng.random() < 0.3))
        return words(n) if in_words and self.rng.random() < self.word_rate else str(n)

    def _verb(self, found: re.Match[str]) -> str:
        who = found[2] or "A"
        if who == "n":
            return conjugate(found[1], self.actors["A"].person, past=False)
        return conjugate(found[1], self.actors[who].person if who in self.actors else who, self.past)

    def _slot(self, found: re.Match[str]) -> str:
        key = found[1]
        if key in self.numbers:
            return self.number(self.numbers[key])
        if key in self.slots:
            self.said.add(key)
            return self.slots[key]
        self.said.add(key[0].upper())
        actor = self.actors[key[0].upper()]
        he, him, his = PRONOUNS[actor.person]
        is_pronoun = actor.person in "12p" or (actor.mentioned and not self.names_only and self.rng.random() < 0.6)
        actor.mentioned = True
        if key.endswith("'s"):
            ending = "'" if actor.person == "t" and actor.name.endswith("s") else "'s"
            return his if is_pronoun else actor.name + ending
        if key.islower():
            return him if is_pronoun else actor.name
        return he if is_pronoun else actor.name


def capitalise(text: str) -> str:
    """A text with a capital at the start of each sentence."""
    return SENTENCE_START.sub(lambda found: found[1] + found[2].upper(), text)


def invented_word(rng: random.Random) -> str:
    """Two or three syllables."""
    return "".join(rng.choice(WORDS["syllables"]) for _ in range(rng.choice((2, 2, 3))))


def random_actor(rng: random.Random, names: bool = False) -> Actor:
    """Somebody: mostly a name, which may be an invented one; with ``names`` never a pronoun."""
    kind = rng.random() * (0.8 if names else 1)
    gender = rng.choice("fm")
    if kind < 0.12:
        return Actor(invented_word(rng).capitalize(), gender)
    if kind < 0.62:
        return Actor(rng.choice(WOMEN if gender == "f" else MEN), gender)
    if kind < 0.66:
        return Actor(rng.choice(WORDS["groups of people"]), "t")
    if kind < 0.8:
        return Actor(rng.choice(WORDS["women roles" if gender == "f" else "men roles"]), gender)
    return Actor("", rng.choice("11112pp"))


def random_noun(rng: random.Random, entries: list[str]) -> tuple[str, str]:
    """Singular and plural of one of the entries, or now and then of an invented noun; it may have a color or size."""
    if rng.random() < 0.04:
        entry = invented_word(rng)
    else:
        entry = rng.choice(entries)
    one, many = lexicon.singular(entry), lexicon.plural(entry)
    if rng.random() < 0.1:
        color = rng.choice(WORDS["colors"])
        return f"{color} {one}", f"{color} {many}"
    return one, many


def random_scene(rng: random.Random, nouns: list[str] = WORDS["things"]) -> Scene:
    """A scene about one of these nouns, with two actors and slots for places, times and friends."""
    one, many = random_noun(rng, nouns)
    a, b = random_actor(rng), random_actor(rng, names=True)
    while b.name == a.name:
        b = random_actor(rng, names=True)
    container = rng.choice(WORDS["containers"])
    group = rng.choice(WORDS["groups"])
    c1, c2 = rng.choice(WORDS["pairs"]).split("/")
    day, month = rng.sample(WORDS["days"], 3), rng.sample(WORDS["months"], 3)
    slots = {
        "o": many, "o1": one, "c1": c1, "c2": c2,
        "box": lexicon.singular(container), "boxes": lexicon.plural(container),
        "group": lexicon.singular(group), "groups": lexicon.plural(group), "place": rng.choice(WORDS["places"]),
        "vehicle": rng.choice(WORDS["vehicles"]), "wild": rng.choice(WORDS["animal places"]),
        "friend": rng.choice(WORDS["friends"]) if rng.random() < 0.7 else rng.choice(WOMEN + MEN),
        "friends": rng.choice(WORDS["companions"]), "length": rng.choice(WORDS["lengths"]),
        "weight": rng.choice(WORDS["weights"]), "volume": rng.choice(WORDS["volumes"]),
        "time": rng.choice(WORDS["times"]),
        "coin": rng.choice(WORDS["money"]), "good": rng.choice(WORDS["goods"]), "good2": rng.choice(WORDS["goods"]),
        "day": day[0], "day2": day[1], "day3": day[2], "month": month[0], "month2": month[1], "month3": month[2],
    }  # fmt: skip
    word_rate = rng.choice((0.0, 0.0, 0.0, 0.15, 0.7))
    return Scene(rng, rng.random() < 0.5, word_rate, {"A": a, "B": b}, slots, names_only=False)
