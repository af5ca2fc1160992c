"""Exchanges rare nouns of a template for others, so that the bundled model learns to read, not to recognise templates.

A template has words that no other template has ("conkers", "seedlings"). By them alone a model can tell which template
a problem comes from, and so which operations solve it, without reading the rest; then it fails where others chose
other words. In training a part of these nouns is therefore replaced at random.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from scripts.problems.language import IRREGULAR_PASTS, UNITS
from scripts.problems.relations import RELATIONS, Relation
from scripts.problems.working import ENDINGS, PHRASES

RARE = 12
"""A word that so many templates have, or fewer, is rare."""
TEMPLATE_SHARE, WORD_SHARE = 0.5, 0.5
"""Share of templates with exchanged words, and of the rare nouns that are exchanged in them."""
WORD = re.compile(r"(?<![{<@A-Za-z'-])[a-z]{3,}(?![A-Za-z}>'@-])")
"""A word in lower case that is no slot, verb or part of a longer word."""
KEPT = frozenset(
    """
    about above across actually against ages alike alone any anybody apart average back because become before behind
    below beside besides best better between bigger bottom both brighter change cheap cheaper cold colder colour cooler
    cost dearer debt deep deeper difference different discount double dozen dozens due each earlier eight eldest empty
    enough entire equal equally even everybody everyone everything expensive extra fair farther fast faster few fewer
    fifth first fortnight forward four fourth further gone greater half halfway halves hand heavier height her hers
    herself high higher him himself his hour how hotter identical instead into itself just larger last later least left
    length less lighter like long longer loss lot low lower many midnight minus missing most much narrower near nearer
    nearly neither never nine nobody none noon nor nothing now off older once one onto other others ours out outside own
    pair pairs part parts per perimeter plus poorer price quarter quicker quick quite ratio remainder rest same score
    second seven shallower share shorter side sides six slower small smaller somebody someone something sooner spare
    square stronger sum taller ten tenth than that their theirs them themselves then there thicker thinner third thirds
    this three till times together tomorrow tonight too top total towards triangle triple twice twin twins two under
    underneath until unused upper very warmer week weeks what when where which while who whole whose wide wider width
    with within without worth year years yesterday yet young younger youngest your yours zero
    """.split()
)
"""Words that may decide how a problem is solved; they stay."""


def _nouns() -> dict[bool, list[str]]:
    """Rare nouns and adjectives, the plural ones under True. Verbs stay, because they often decide the operation."""
    counts = Counter(word for relation in RELATIONS for word in set(WORD.findall(relation.template)))
    kept = KEPT | set(UNITS) | set(IRREGULAR_PASTS) | set(IRREGULAR_PASTS.values())
    phrases = itertools.chain(ENDINGS, *PHRASES.values())
    kept |= set(WORD.findall(" ".join(phrases).lower()))

    def is_verb(word: str) -> bool:
        if re.search("(ed|ing|ly)$", word):
            return True
        stems = {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("e")}
        return any(stem in kept or stem + "ed" in counts or stem + "ing" in counts for stem in stems)

    found: dict[bool, list[str]] = {False: [], True: []}
    for word, count in sorted(counts.items()):  # the order of sets differs between processes
        if count <= RARE and word not in kept and not is_verb(word):
            found[_is_plural(word)].append(word)
    return found


def _is_plural(word: str) -> bool:
    return word.endswith("s") and not word.endswith("ss")


NOUNS = _nouns()
"""Rare nouns of all templates: singular ones under False, plural ones under True."""
ALL_NOUNS = frozenset(NOUNS[False] + NOUNS[True])
PAIRED = [noun for noun in NOUNS[False] if noun + "s" in ALL_NOUNS]
"""Rare singular nouns whose plural is rare as well."""
WRONG_AN = re.compile(r"\b([Aa])n (?=[b-df-hj-np-tv-z])(?!hour|hono|heir|x)")
"""Before a consonant that is heard."""


def with_other_nouns(rng: random.Random, relation: Relation) -> Relation:
    """A relation, half of the time with half of its rare nouns exchanged, in its unit as well.

    Relations that count with constants stay as they are: a word may say which one (a spider has eight legs).
    """
    if re.search(r"\d", relation.expression) or rng.random() >= TEMPLATE_SHARE:
        return relation
    others = _others(rng, ALL_NOUNS.intersection(WORD.findall(relation.template)))

    def exchange(text: str) -> str:
        changed = WORD.sub(lambda found: others.get(found[0], found[0]), text)
        return WRONG_AN.sub(r"\1 ", changed)

    return replace(relation, unit=exchange(relation.unit), template=exchange(relation.template))


def _others(rng: random.Random, words: Set[str]) -> dict[str, str]:
    """By word, the noun that takes its place, a different one for each; singular and plural of a noun stay a pair."""
    others: dict[str, str] = {}

    def choose(nouns: Sequence[str]) -> str:
        while (noun := rng.choice(nouns)) in others.values():
            pass
        return noun

    for word in sorted(words):
        singular, plural = word.removesuffix("s"), word + "s"
        if singular in words and singular != word or rng.random() >= WORD_SHARE:
            continue
        others[word] = choose(PAIRED if plural in words else NOUNS[_is_plural(word)])
        if plural in words:
            others[plural] = others[word] + "s"
    return others
