"""Answers that an engine repeats before it serves: of which models and decodings, what is found, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lopa_ascend import LLM, ParameterError
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import GraphParams
from lopa_ascend.engine import answers
from lopa_ascend.graph import setup
from scripts.eval.__main__ import main
from tests.e2e.conftest import running
from tests.tiny import write_dream

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
PROMPTS = [[5, 9, 13, 21, 34], [60, 61, 62, 63, 64, 65, 66, 67]]
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "kv_cache_memory": 2**25}


def write(folder: Path, model: Path, *flags: str) -> Path:
    """The file that the command writes of a model without a tokenizer."""
    prompts, file = folder / "prompts.txt", folder / "answers.json"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    main(
        [
            "answers",
            str(file),
            "--model",
            str(model),
            "--prompts",
            str(prompts),
            "--max-new-tokens",
            "16",
            "--ignore-eos",
            *flags,
        ]
    )
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("answers") / "tiny", eos_token_id=3, hidden=64, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def file(model: Path) -> Path:
    return write(model.parent, model, "--num-branches", "3", "--block-size", "8")


DIFFERENT = r"check_answers: prompt \[.*\], decoded alone: token \d+ of the answer is \d+, and on a CPU it was \d+"


def with_a_wrong_weight(model: Path, folder: Path) -> Path:
    wrong = shutil.copytree(model, folder / "wrong")
    weights = load_file(wrong / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][:, ::2] *= -1
    save_file(weights, wrong / "model.safetensors")
    return wrong


def start(model: Path, file: Path, **options: Any) -> LLM:
    return LLM(model, check_answers=str(file), **OPTIONS, **options)


FAMILIES = {
    "nemotron": ("nemotron/model_a", ("--decoding", "linear_spec")),
    "pangu": ("pangu/model_a", ("--decoding", "causal_blocks", "--block-size", "8")),
    "sdar": ("sdar/model_a", ("--decoding", "s2d2",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_models_repeat_what_they_have_answered(name: str, tmp_path: Path) -> None:
    folder, flags = FAMILIES[name]
    file = write(tmp_path, GOLDEN / folder, *flags)
    with start(GOLDEN / folder, file) as llm:
        assert [len(answer.token_ids) for answer in llm.engine.answers] == [16, 16]
        assert any(answer.exact for answer in llm.engine.answers)


def test_compiled_steps_are_compared(model: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    graph_params = GraphParams(num_branches=3, block_size=8)
    with start(model, file, graph_mode="inductor", graph_params=graph_params) as llm:
        graphs = llm.engine.stats().graphs
        assert graphs is not None
        assert graphs.num_steps > 0
        assert not graphs.eager_steps


def test_a_wrong_weight_is_found(model: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=DIFFERENT):
        start(with_a_wrong_weight(model, tmp_path), file)


def test_a_server_that_answers_otherwise_does_not_start(model: Path, file: Path, tmp_path: Path) -> None:
    changed = rewritten(file, tmp_path, at(1, token_ids=[7], exact=1))
    with pytest.raises(AssertionError, match=r"answer is \d+, and on a CPU it was 7"):
        with running("--model", str(model), "--check-answers", str(changed)):
            pass


def test_what_comes_after_a_near_tie_is_not_compared(model: Path, file: Path, tmp_path: Path) -> None:
    tokens = json.loads(file.read_text())["answers"][0]["token_ids"]
    assert tokens[-1] != 7
    tokens[-1] = 7
    start(model, rewritten(file, tmp_path, at(0, token_ids=tokens, exact=15))).close()
    with pytest.raises(ParameterError, match="token 15 .* was 7"):
        start(model, rewritten(file, tmp_path, at(0, token_ids=tokens, exact=16)))


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ("[1, 2]", ("--max-new-tokens", "257"), "--max-new-tokens: must be at most 256 here, got 257"),
        ("[1, 2]", ("--decoding", "vanilla", "--alg", "origin"), "--decoding: depends on a seed"),
        ("[1, x]", (), "line 1: .*expected a JSON list of token ids"),
        ("", (), "has no prompt"),
        ("[1]\n" * 65, (), "has 65 prompts, expected at most 64"),
    ],
)
def test_what_no_file_is_written_of(
    line: str, flags: tuple[str, ...], expected: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text(line)
    command = ["answers", str(tmp_path / "out.json"), "--model", str(model), "--prompts", str(tmp_path / "prompts.txt")]
    with pytest.raises(SystemExit):
        main([*command, *flags])
    assert re.search(expected, capsys.readouterr().err)


def rewritten(file: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a file whose content was changed in place."""
    content = json.loads(file.read_text())
    change(content)
    copy = folder / "changed.json"
    copy.write_text(json.dumps(content))
    return copy


def at(index: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["answers"][index].update(fields)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (at(1, exact=17), r"answers\[1\]\.exact: is 17, and there are 16 token_ids"),
        (at(0, exact=-1), r"Expected `int` >= 0 - at `\$\.answers\[0\]\.exact`"),
        (at(0, token_ids=["a"]), r"at `\$\.answers\[0\]\.token_ids\[0\]`"),
        (at(0, prompt_token_ids=[10**6]), r"answers\[0\]\.prompt_token_ids\[0\]: 1000000 is no token"),
        (at(1, params={"blocks": 3}), r"answers\[1\]\.params\.blocks: is no decoding parameter"),
        (at(1, params={"block_size": 0}), r"answers\[1\]\.params\.block_size"),
        (at(0, params={"temperature": 0.5}), r"answers\[0\]\.params: the answer depends on a seed"),
        (at(0, params={"max_new_tokens": 10**5}), r"answers\[0\]\.params\.max_new_tokens: is 100000"),
        (at(0, surplus=1), "unknown field `surplus`"),
        (lambda content: content.update(answers=[]), r"at `\$\.answers`"),
        (lambda content: content.update(version=2), r"at `\$\.version`"),
        (lambda content: content["model"].update(config="0"), r"model\.config: is '0' in the file, which is of 'tiny'"),
        (lambda content: content["model"].update(quantization="w8a8"), r"model\.quantization: is 'w8a8' in the file"),
        (lambda content: [a.update(exact=0) for a in content["answers"]], "nothing would be compared"),
    ],
)
def test_a_wrong_file_is_refused_before_weights_are_read(
    change: Callable[[dict[str, Any]], object], expected: str, model: Path, file: Path, tmp_path: Path
) -> None:
    without_weights = tmp_path / "tiny"
    without_weights.mkdir()
    shutil.copy(model / "config.json", without_weights)
    (without_weights / "model.safetensors").symlink_to(model / "model.safetensors")
    with pytest.raises(ParameterError, match=expected) as refused:
        start(without_weights, rewritten(file, tmp_path, change))
    assert refused.value.param == "check_answers"


def test_a_missing_file_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="check_answers.*absent"):
        start(model, tmp_path / "absent.json")


def test_an_answer_that_takes_too_long_ends_the_start(model: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TIME_LIMIT", 0.0)
    with pytest.raises(ParameterError, match="took more than 0 seconds"):
        start(model, file)
