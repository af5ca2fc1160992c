"""/v1/decisions: published requests, answers that are those of /score, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import refused

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_requests.json").read_text())["decisions"]
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"x": None, "y": {"is": "Why"}, "z": "Zed"}}
SCORE = {"type": "score", "instructions": "How much?", "criteria": ["none", "some", "all"]}
NOUL = {"type": "noul", "instructions": "Is it?"}


def decide(server: ServerProcess, questions: dict[str, Any], state: Any = "A state.") -> Any:
    answer = server.http.post("/v1/decisions", json={"state": state, "questions": questions})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published["source"])
def test_published_requests_are_answered(server: ServerProcess, published: dict[str, Any]):
    body = {**published["body"], "model": "tiny"}
    answer = server.http.post("/v1/systemone", json=body).json()
    assert answer.keys() == {"model", "answers", "usage"}
    assert answer["answers"].keys() == body["questions"].keys()
    assert answer["usage"]["input_tokens"] > 0 == answer["usage"]["output_tokens"]
    for name, question in body["questions"].items():
        found = answer["answers"][name]
        assert found["type"] == question["type"]
        if found["type"] == "noul":
            assert 0 < found["noul"] < 1
            continue
        probs = list(found["probabilities"].values())
        assert sum(probs) == pytest.approx(1)
        assert 0 <= found["confidence"] <= 1
        if found["type"] == "choice":
            assert [*found["probabilities"]] == [*question["criteria"]]
            assert found["probabilities"][found["choice"]] == max(probs)
        else:
            assert found["score"] == pytest.approx(sum(level * prob for level, prob in enumerate(probs)))
            assert found["legend"] == dict(zip("012", question["criteria"], strict=True))


def test_probabilities_are_those_of_the_labels_among_one_another(server: ServerProcess):
    prompt = 'A state.\n\nWhich?\nA: x\nB: y: {"is": "Why"}\nC: z: Zed\n\nAnswer with one of A, B, C and nothing else.'
    body = {"messages": [{"role": "user", "content": prompt}], "text_2": ["A", "B", "C"]}
    shares = [text["share"] for text in server.http.post("/score", json=body).json()["data"]]
    alone = decide(server, {"q": CHOICE})["answers"]["q"]
    assert [*alone["probabilities"].values()] == pytest.approx(shares)
    assert alone["confidence"] == pytest.approx((max(shares) - 1 / 3) / (1 - 1 / 3))
    together = decide(server, {"n": NOUL, "q": CHOICE, "s": SCORE})["answers"]
    assert [*together["q"]["probabilities"].values()] == pytest.approx(shares)  # the others change nothing
    probs = [*together["s"]["probabilities"].values()]
    mode = probs.index(max(probs))
    off = sum(prob * abs(level - mode) for level, prob in enumerate(probs))
    assert together["s"]["confidence"] == pytest.approx(max(0, 1 - off / (2 / 3)))


@pytest.mark.parametrize(
    ("question", "param", "message"),
    [
        (7, "questions.Big", "must be an object"),
        ({"type": "box"}, "questions.Big.type", "'noul' or 'choice' or 'score'"),
        ({"type": "noul"}, "questions.Big.instructions", "missing"),
        ({**NOUL, "criteria": {"yes": "x"}}, "questions.Big.criteria.yes", "unknown"),
        ({**SCORE, "criteria": ["none", 1]}, "questions.Big.criteria[1]", "must be a valid"),
        ({**SCORE, "criteria": ["x"] * 11}, "questions.Big.criteria", "at most 10"),
        ({**CHOICE, "criteria": {str(name): None for name in range(27)}}, "questions.Big.criteria", "at most 26"),
        ({**CHOICE, "criteria": None}, "questions.Big.criteria", "missing"),
        ({**CHOICE, "criterion": {}, "other": 1}, "questions.Big.other", "unknown"),
    ],
)
def test_a_wrong_question_is_named(server: ServerProcess, question: Any, param: str, message: str):
    answer = server.http.post("/v1/decisions", json={"state": "x", "questions": {"a": NOUL, "Big": question}})
    error = refused(answer, 400)
    assert (error["param"], message in error["message"]) == (param, True), error


def test_a_wrong_state_is_named(server: ServerProcess):
    for body, param in (
        ({"questions": {"a": NOUL}}, "state"),
        ({"state": 7, "questions": {"a": NOUL}}, "state"),
        ({"state": "x", "questions": {}}, "questions"),
        ({"state": "word " * 5000, "questions": {"a": NOUL}}, "state"),
        ({"state": "x", "questions": {"a": NOUL}, "images": ["x"]}, "images"),
        ({"input": "x", "questions": [{"type": "predicate", "instructions": "?"}]}, "input"),
    ):
        assert refused(server.http.post("/v1/decisions", json=body), 400)["param"] == param, body
