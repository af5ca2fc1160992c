"""The sets of problems that judge the bundled model, and the tables of `scripts.eval_demo` that come from them."""

from __future__ import annotations

import re

import pytest

from lopa_ascend.demo import HANDWRITTEN, HELD_OUT, INDEPENDENT
from scripts import eval_demo
from scripts.demo_problems import is_held_out
from scripts.demo_sets import NEW_NAMES, Question, going_on, other_held_out, read_set, typed_ways, unseen
from scripts.eval_demo import print_groups, steps_class
from scripts.problems import lexicon
from scripts.problems.relations import RELATIONS


def test_each_file_is_read_with_results_and_kinds() -> None:
    for path, count in ((HELD_OUT, 500), (HANDWRITTEN, 200), (INDEPENDENT, 150)):
        questions = read_set(path, 1000)
        assert len(questions) == count
        assert all(question.result is not None and question.kind for question in questions)
        assert all(bool(question.worked_answer) == (path == HELD_OUT) for question in questions)
    assert all(question.worked_answer.endswith(f"#### {question.result}") for question in read_set(HELD_OUT, 1000))


def test_unseen_problems_differ_and_are_the_same_each_time() -> None:
    texts = [question.text for question in unseen(100)]
    assert len(set(texts)) == 100
    assert texts == [question.text for question in unseen(100)]


def test_other_held_out_problems_are_not_in_the_file() -> None:
    in_file = {question.text for question in read_set(HELD_OUT)}
    others = other_held_out(20)
    assert len(others) == 20
    assert all(is_held_out(question.text) and question.text not in in_file for question in others)


def test_ways_of_typing_keep_the_problem() -> None:
    ways, results = typed_ways(40)
    plain = [conversation[-1]["content"] for conversation in ways["plain"]]
    assert len(results) == 40
    for conversations in ways.values():
        numbers = [re.findall(r"\d+", conversation[-1]["content"]) for conversation in conversations]
        assert numbers == [re.findall(r"\d+", text) for text in plain]
    for earlier, question in zip(ways["in a second turn"], plain, strict=True):
        assert [message["role"] for message in earlier] == ["user", "assistant", "user"]
        assert earlier[0]["content"] != question


def test_new_names_replace_those_of_the_training() -> None:
    ways, _ = typed_ways(100)
    texts = [conversation[0]["content"] for conversation in ways["with new names"]]
    old_names = re.compile(rf"\b({'|'.join((*lexicon.WOMEN, *lexicon.MEN))})\b")
    assert not any(old_names.search(text) for text in texts)
    assert any(name in text for text in texts for name in NEW_NAMES)
    templates = " ".join(relation.template for relation in RELATIONS)
    assert not [name for name in NEW_NAMES if re.search(rf"\b{name}\b", templates)]


def test_conversations_that_go_on_begin_with_a_held_out_problem() -> None:
    conversations, results = going_on(5)
    assert len(conversations) == len(results) == 5
    assert all(is_held_out(conversation[0]["content"]) for conversation in conversations)


def test_table_counts_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    exact = {("a", 0): [True, False, True], ("a", 7): [True, True, True], ("b", 0): [False], ("b", 7): [True]}
    print_groups("steps", {"a": ["one step", "one step", "two steps"], "b": ["two steps"]}, exact)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "| one step | 2 | 50% | 100% | 0 |  |  |",
        "| two steps | 1 | 100% | 100% | 1 | 0% | 100% |",
        "| all | 3 | 67% | 100% | 1 | 0% | 100% |",
    ]


def test_steps_are_counted_in_the_worked_answer_or_by_the_kind() -> None:
    questions = [
        Question("What is 18 + 155 + 491 + 7?", 671, "plain sum", "We add: 18+155=173. We add: 173+491=664. ..."),
        Question("What is 18 + 155 - 7?", 166, "plain sum"),
        Question("What is half of 8?", 4, "plain sum"),
        Question("...", 1, "share"),
        Question("...", 1, "four steps"),
    ]
    assert [question.num_steps for question in questions] == [2, 2, 1, 1, 4]
    assert [steps_class(count) for count in range(1, 6)] == ["one step", "two steps", *["more steps"] * 3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("kinds --block-size 16", "--block-size and --plot go with table, not with kinds"),
        ("targets --limit 501", "--limit of targets is at most 500, the number of held-out problems"),
        ("typed --limit 500", "--limit of typed is at most 499"),
    ],
)
def test_options_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["eval_demo", *argv.split()])
    with pytest.raises(SystemExit):
        eval_demo.main()
    assert message in capsys.readouterr().err
