"""The templates and sentences of which the bundled model's training problems are made."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo_problems import normalised
from scripts.problems import wordings
from scripts.problems.exchange import ALL_NOUNS, KEPT, NOUNS, PAIRED, with_other_nouns
from scripts.problems.language import Actor, Scene, conjugate, words
from scripts.problems.lexicon import MEN, WOMEN
from scripts.problems.relations import RELATIONS, UNSEEN, Relation, relations_of
from scripts.problems.stories import SECTIONS
from scripts.problems.telling import FILLERS, tell_next, tell_relation, with_other_names
from scripts.problems.working import NUMBERS, draw_numbers

ROOT = Path(__file__).parents[2]
ASKS = re.compile(
    r"\?|\b(Find|Work out|Calculate|Compute|Determine|Convert|Express|Tell|tell|Say|Give|Count|Add up|Help)\b"
)
"""A question, or a sentence that begins with a command."""


def test_every_relation_has_numbers_and_asks() -> None:
    rng = random.Random(0)
    for relation in RELATIONS + UNSEEN:
        numbers, steps = draw_numbers(rng, relation.expression)
        assert steps
        assert all(f"{{{name}}}" in relation.template for name in numbers), relation
        assert relation.template.count("[") == relation.template.count("]")
        assert ASKS.search(relation.template), relation


def test_expressions_follow_the_order_in_which_a_template_mentions_its_numbers() -> None:
    ordered = re.compile(rf"(?<![-*/])([{NUMBERS}])(?:\*|\+(?!.[*/]))([{NUMBERS}])")
    sum_subtracted = re.compile(rf"-\([{NUMBERS}]\+[{NUMBERS}]\)")
    for relation in RELATIONS + UNSEEN:
        for first, second in ordered.findall(relation.expression):
            assert relation.template.index(f"{{{first}}}") <= relation.template.index(f"{{{second}}}"), relation
        assert not sum_subtracted.search(relation.expression), relation


def test_a_half_that_is_left_is_worked_out_in_one_way() -> None:
    assert not [relation for relation in RELATIONS if re.match(r"\(?n-n/2", relation.expression)]


def test_a_compared_amount_is_worked_out_before_the_total() -> None:
    compared = re.compile(r"{m} ([a-z]+ )?(more|fewer|less|older|younger|cheaper|longer|shorter) than ")
    found = [relation for relation in RELATIONS if re.match(r"n\+n[+-]m", relation.expression)]
    assert found
    assert not [relation for relation in found if compared.search(relation.template)]


def test_names_of_a_template_become_others_of_the_same_gender() -> None:
    rng = random.Random(3)
    template = "[Anna's|Tom's] dog saw Anna and Annabel in June. Will Tom come?"
    for _ in range(50):
        found = re.fullmatch(
            r"\[(\w+)'s\|(\w+)'s\] dog saw \1 and Annabel in June. Will \2 come\?", with_other_names(rng, template)
        )
        assert found
        assert found[1] in set(WOMEN) - {"Anna"}
        assert found[2] in set(MEN) - {"Tom"}


def test_rare_nouns_of_a_template_become_others_in_the_unit_as_well() -> None:
    rng = random.Random(4)
    singular, plural = "abbey", "conkers"
    assert singular in NOUNS[False]
    assert plural in NOUNS[True]
    relation = Relation(
        "n-m", plural, "Under the abbey lay {n} conkers. Tom lost {m} [conkers|of these conkers]. How many are left?"
    )
    exchanged = [with_other_nouns(rng, relation) for _ in range(400)]
    for other in exchanged:
        found = re.fullmatch(
            r"Under the (\w+) lay {n} (\w+). Tom lost {m} \[\2\|of these \2\]. How many are left\?", other.template
        )
        assert found
        assert found[1] in NOUNS[False]
        assert found[2] in NOUNS[True]
        assert other.unit == found[2]
        assert other.expression == "n-m"
    # Half of the templates have exchanged nouns, and half of the rare nouns of these are exchanged: 100 of 400 units.
    assert 80 < sum(other.unit != plural for other in exchanged) < 120
    assert not ALL_NOUNS & KEPT


def test_singular_and_plural_of_a_noun_stay_a_pair_and_articles_fit() -> None:
    rng = random.Random(8)
    singular = next(noun for noun in PAIRED if noun[0] in "aeio")
    relation = Relation(
        "n-m", f"{singular}s", f"Of {{n}} {singular}s {{m}} are gone, and an {singular} is new. How many?"
    )
    for _ in range(300):
        other = with_other_nouns(rng, relation)
        found = re.fullmatch(r"Of {n} (\w+)s {m} are gone, and (an?) \1 is new. How many\?", other.template)
        assert found
        assert other.unit == f"{found[1]}s"
        # Scene.say makes "an" of "a" before a vowel.
        assert found[2] == "a" or re.match("[aeiou]|hour|hono|heir|x", found[1])


def test_every_process_exchanges_the_same_nouns() -> None:
    program = "from scripts.problems.exchange import NOUNS; print(NOUNS)"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_templates_with_constants_keep_their_nouns() -> None:
    relation = Relation("n*8", "legs", "A farmer finds {n} spiders in the shed. How many legs do they have?")
    assert all(with_other_nouns(random.Random(seed), relation) == relation for seed in range(20))


def test_unseen_wordings_are_never_trained_on() -> None:
    templates = {normalised(relation.template) for relation in RELATIONS}
    assert len(UNSEEN) > 300
    assert not [relation for relation in UNSEEN if normalised(relation.template) in templates]


def test_a_file_of_wordings_with_a_mistake_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wordings, "FOLDER", tmp_path)
    (tmp_path / "mine.txt").write_text("# no section\nn+m :: apples :: How many are {n} and {m}?\n")
    with pytest.raises(ValueError, match=r"mine\.txt, line 2: begin a section before it, with '== title'"):
        relations_of("mine")
    (tmp_path / "mine.txt").write_text("== sums\nn+m :: How many are {n} and {m}?\n")
    with pytest.raises(ValueError, match=r"mine\.txt: write a line as 'expression :: unit :: template', not 'n\+m"):
        relations_of("mine")
    (tmp_path / "mine.txt").write_text("== sums\nn+m :: apples :: How many are {n} and {m}?\n")
    assert relations_of("mine") == [Relation("n+m", "apples", "How many are {n} and {m}?")]


def test_every_story_template_has_its_number() -> None:
    for title, lines in SECTIONS.items():
        if title.endswith(("start", "more", "fewer")):
            assert all("{n}" in line for line in lines), title


def test_sentences_that_do_not_matter_have_one_number_or_none() -> None:
    assert all(not re.search(r"\d|{[ns]}", line) for line in FILLERS["fillers"])
    assert all(len(re.findall(r"\d|{[ns]}", line)) == 1 for line in FILLERS["needless"])
    assert all(line.endswith((".", "!")) for lines in FILLERS.values() for line in lines)


def test_a_filler_does_not_part_a_title_from_its_name() -> None:
    relation = Relation("n-m", "eggs", "Mr. Bell has {n} eggs. Dr. Ho takes {m} from Mrs. Bell. How many are there?")
    for seed in range(300):
        question = tell_relation(random.Random(seed), relation).question
        assert len(re.findall(r"(?:Mr|Mrs|Dr)\. (?:[A-Z]\w+) (?:has|takes)|Mrs\. [A-Z]\w+\.", question)) == 3, question


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "Take a egg. A owl sees Class A in a one-way street.",
            "Take an egg. An owl sees Class A in a one-way street.",
        ),
        ("Twenty-one {o} and one {o}, a euro each", "Twenty-one eggs and one egg, a euro each"),
    ],
)
def test_articles_and_single_things(template: str, said: str) -> None:
    actors = {"A": Actor("Ann", "f")}
    scene = Scene(random.Random(0), False, 0.0, actors, {"o": "eggs", "o1": "egg"}, {})
    assert scene.say(template) == said


def test_a_next_question_is_about_whom_and_what_was_told() -> None:
    rng = random.Random(9)
    relation = Relation("n*m", "cards", "Each of my {n} albums has room for {m} cards. How many cards fit in?")
    for _ in range(300):
        narrative = tell_relation(rng, relation)
        scene = narrative.scene
        assert scene
        mentioned = scene.said & {"A", "o"}  # a sentence that does not matter may name a person
        tell_next(rng, narrative)
        assert scene.said & {"A", "o"} == mentioned


def test_verbs_pronouns_and_numbers() -> None:
    assert [conjugate("carry", person, past) for person, past in (("f", False), ("1", False), ("m", True))] == [
        "carries", "carry", "carried",
    ]  # fmt: skip
    assert [conjugate("be", person, False) for person in "1fp"] == ["am", "is", "are"]
    assert [words(n) for n in (0, 13, 40, 87)] == ["zero", "thirteen", "forty", "eighty-seven"]
    scene = Scene(random.Random(0), False, 0.0, {"A": Actor("Ann", "f"), "B": Actor("", "1")}, {"o": "eggs"})
    assert scene.say("{A} <have> {n} {o} , {B} <have@B> {m}", n=5, m=6) == "Ann has 5 eggs, I have 6"
    scene.names_only = True
    assert scene.say("{A} [<go>|<go>] with {A's} eggs") == "Ann goes with Ann's eggs"
