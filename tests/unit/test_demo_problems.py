"""The bundled model's problems: right, disjoint, and of the promised form."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from scripts.demo_problems import Problem, is_held_out, normalised, parse_result, practice, problems
from scripts.demo_tokenizer import ASSISTANT, EOS, SYSTEM, USER, build, load
from scripts.problems import chats
from scripts.problems.language import words
from scripts.problems.relations import RELATIONS
from scripts.problems.working import ENDINGS, PHRASES, Step, steps_of, work
from scripts.training.batches import Batches
from scripts.training.focus import Focus, source_of
from scripts.training.noise import BLOCKS, LONGEST_BLOCK

DEMO = Path(__file__).parents[2] / "lopa_ascend" / "demo"
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def some(seed: int, count: int, *, held_out: bool = False, plain: bool = False) -> list[Problem]:
    return list(itertools.islice(problems(seed, held_out, plain=plain), count))


@functools.cache
def trained() -> list[Problem]:
    """5000 problems of the training, drawn once for all tests."""
    return some(2, 5000)


def value(term: str) -> int:
    """The value of "12", "12+3" or "60+15+4"."""
    numbers, operators = re.findall(r"\d+", term), re.findall(r"[-+*/]", term)
    total = int(numbers[0])
    for operator, number in zip(operators, numbers[1:], strict=True):
        total = OPERATORS[operator](total, int(number))
    return total


def test_sums_and_products_begin_with_the_result_of_the_step_before() -> None:
    steps = steps_of("2*(n+m*k)-j", {"n": 30, "m": 3, "k": 4, "j": 7})
    assert steps == [Step(3, "*", 4), Step(12, "+", 30), Step(42, "*", 2), Step(84, "-", 7)]


def test_every_calculation_is_right() -> None:
    for problem in [*trained()[:2000], *itertools.islice(practice(5), 200)]:
        if problem.result is None:
            assert "####" not in problem.answer
            continue
        *lines, ending, result = re.split(r"(?<=\.)\s", problem.answer)
        for line in lines:
            chain = line.rpartition(": ")[2].rstrip(".").split("=")
            assert len(chain) >= 2
            assert len({value(term) for term in chain}) == 1, problem.answer
        assert value(lines[-1].rpartition("=")[2].rstrip(".")) == problem.result
        assert re.search(rf"\b{problem.result}\b", ending)
        assert result == f"#### {problem.result}"
        assert 0 <= problem.result <= 999


def test_an_answer_takes_its_numbers_from_the_conversation() -> None:
    expressions = {relation.template: relation.expression for relation in RELATIONS}
    number_words = {word: n for n, word in enumerate(map(words, range(100)))}
    for problem in some(6, 1000, plain=True):
        question = problem.question.lower()
        numbers = {int(n) for n in re.findall(r"\d+", question)}
        said = re.findall(r"[a-z]+(?:-[a-z]+)?", question)
        numbers |= {number_words[word] for word in said if word in number_words}
        numbers |= {2, 12}  # half, a dozen
        constants = expressions[problem.template] if problem.template else ""
        numbers |= {int(n) for n in re.findall(r"\d+", constants)}  # 7 of "a week", 10 of "a tenth"
        for left, right in re.findall(r": (\d+)[-+*/](\d+)=", problem.answer):
            assert int(right) in numbers or f"={right}." in problem.answer
            assert int(left) in numbers or f"={left}." in problem.answer


def test_a_practice_asks_for_several_sums_that_fit_in_four_blocks() -> None:
    tokenizer = load(DEMO / "model")
    for problem in itertools.islice(practice(9), 300):
        asked = problem.question.split(", ")
        assert len(asked) >= 3
        assert re.findall(r": (\d+[-+*/]\d+)=", problem.answer) == asked
        assert len(tokenizer.encode(problem.answer).ids) < 4 * LONGEST_BLOCK


def test_an_answer_has_one_style() -> None:
    counts = [0] * len(ENDINGS)
    for problem in some(5, 1000, plain=True):
        style = next(i for i, ending in enumerate(ENDINGS) if ending in problem.answer)
        counts[style] += 1
        said = re.findall(r"([A-Z][a-z ]+): \d+([-+*/])", problem.answer)
        assert said
        assert all(phrase == PHRASES[op][style] for phrase, op in said), problem.answer
    assert 500 < counts[0] < 700
    assert min(counts) > 50


def test_templates_that_the_model_fails_at_are_kept_more_often() -> None:
    focus, rng = Focus(least_share=0.15), random.Random(0)
    for _ in range(20):
        focus.record(["easy", "hard"], [True, False])
    kept = {source: sum(focus.keeps(rng, source) for _ in range(1000)) / 1000 for source in ("easy", "hard", "new")}
    assert abs(kept["easy"] - focus.least_share) < 0.04
    assert kept["hard"] > 0.97
    assert kept["easy"] + 0.2 < kept["new"] < kept["hard"] - 0.2


def test_problems_of_one_template_have_one_source() -> None:
    sources = {source_of(problem) for problem in trained()}
    templates = {relation.template for relation in RELATIONS}
    assert sources - templates <= {
        "add", "subtract", "times", "share", "half", "two steps", "three steps", "four steps", "five steps",
        "plain sum", "no problem",
    }  # fmt: skip
    assert len(sources & templates) > 1000


def test_no_template_leaves_a_slot_or_a_choice() -> None:
    for problem in trained()[:3000]:
        for message in problem.messages:
            assert not re.search(r"[\[\]{}<>|]", message["content"]), message
        assert not re.search(r"  | [.,?]", problem.answer)


def test_held_out_questions_are_never_trained_on() -> None:
    held_out = {normalised(p.question) for p in some(1, 200, held_out=True, plain=True)}
    assert len(held_out) > 180
    assert not held_out & {normalised(p.question) for p in trained()}
    assert all(is_held_out(p.question) for p in some(3, 100, held_out=True, plain=True))
    assert is_held_out("What is 12 + 30?") == is_held_out("what is 12 +30")


def test_problems_of_the_held_out_file_are_on_the_held_out_side() -> None:
    """The file is older than today's generator, and the hash alone keeps its problems out of the training."""
    questions = [
        json.loads(line)["question"] for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(questions) == 500
    assert all(map(is_held_out, questions))


@pytest.mark.parametrize(("name", "count"), [("handwritten", 200), ("independent", 150)])
def test_questions_worded_by_others_are_never_trained_on(name: str, count: int) -> None:
    rows = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == count
    questions = {normalised(row["question"]) for row in rows}
    assert len(questions) == count
    assert all(0 <= row["answer"] <= 999 and row["kind"] for row in rows)
    assert not questions & {normalised(p.question) for p in trained()}


def test_problems_are_varied() -> None:
    found = trained()[:3000]
    kinds = {problem.kind for problem in found}
    assert kinds >= {"add", "subtract", "times", "share", "half", "two steps", "three steps", "four steps", "plain sum"}
    roles = ["".join(message["role"][0] for message in problem.messages) for problem in found]
    assert {"u", "su", "uau", "suau"} <= set(roles)
    assert len({problem.question for problem in found}) > 2800
    assert any(problem.question.endswith("\n") for problem in found)
    assert any(problem.question == problem.question.lower() for problem in found)
    assert {problem.answer for problem in found if problem.result is None} == {chats.HELLO_ANSWER, chats.BEYOND_ANSWER}


def test_the_same_seed_gives_the_same_problems() -> None:
    assert some(9, 50) == some(9, 50)
    assert some(9, 50) != some(10, 50)


@pytest.mark.parametrize(
    ("step", "chain"),
    [
        (Step(24, "+", 18), "24+18=34+8=42"),
        (Step(3, "+", 327), "3+327=330"),
        (Step(215, "+", 335), "215+335=515+35=545+5=550"),
        (Step(230, "+", 315), "230+315=515+30=545"),
        (Step(500, "-", 289), "500-289=300-89=220-9=211"),
        (Step(7, "*", 8), "7*8=56"),
        (Step(125, "*", 3), "125*3=300+60+15=360+15=370+5=375"),
        (Step(12, "*", 20), "12*20=200+40=240"),
        (Step(84, "/", 2), "84/2=40+2=42"),
        (Step(56, "/", 7), "56/7=8"),
    ],
)
def test_work(step: Step, chain: str) -> None:
    assert work(step) == chain


def test_steps_follow_the_order_of_operations() -> None:
    assert steps_of("k-n*m", {"k": 50, "n": 3, "m": 9}) == [Step(3, "*", 9), Step(50, "-", 27)]
    assert steps_of("n-m", {"n": 3, "m": 9}) is None
    assert steps_of("n/m", {"n": 10, "m": 3}) is None
    assert steps_of("n*m", {"n": 40, "m": 30}) is None


def test_parse_result() -> None:
    assert parse_result("12+3=15\n#### 15") == 15
    assert parse_result("#### 1 and #### 2") == 2
    assert parse_result("####") is None
    assert parse_result("no number") is None


def test_the_tokenizer_spells_any_word_and_digits_alone(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = build(tmp_path, corpus_size=300)
    text = f"{SYSTEM}Be nice.{USER}Zyx\n has 345  ü's!{ASSISTANT}"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert [token for token in encoding.tokens if token.strip("Ġ").isdigit()] == ["3", "4", "5"]
    assert load(tmp_path).encode(text).ids == encoding.ids
    auto = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Zyx\n has 345  ü's!"}]
    assert auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == encoding.ids
    assert auto.eos_token == EOS


def test_training_sees_the_chat_template_and_words_in_pieces(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, corpus_size=300)
    batches = Batches(tokenizer, 1, Focus(0.15), plain=False, whole_blocks=True)
    whole = 0
    for problem in some(11, 200):
        messages = "".join(
            f"<|{message['role']}|>{message['content']}" + (EOS if message["role"] == "assistant" else "")
            for message in problem.messages
        )
        ids = batches.prompt(problem)
        assert tokenizer.decode(ids, skip_special_tokens=False) == messages + ASSISTANT
        whole += ids == tokenizer.encode(messages + ASSISTANT).ids
    assert 100 < whole < 195


def test_a_batch_is_padded_left_of_prompts_and_right_of_answers(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, corpus_size=300)
    eos = tokenizer.get_vocab()[EOS]
    batches = Batches(tokenizer, 1, Focus(0.15), plain=False, whole_blocks=True)
    all_tokens = [batches.next(8) for _ in range(20)]
    assert {tokens.block for tokens in all_tokens} == set(BLOCKS)
    assert all(tokens.answer.shape[1] % tokens.block == 0 for tokens in all_tokens)
    tokens = all_tokens[0]
    for prompt, padding, answer in zip(tokens.prompt, tokens.padding, tokens.answer, strict=True):
        assert (prompt[:padding] == eos).all()
        assert int(prompt[padding]) in {tokenizer.get_vocab()[SYSTEM], tokenizer.get_vocab()[USER]}
        assert answer[-1] == eos
