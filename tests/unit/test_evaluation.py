"""Tasks in the prompt formats of published evaluations, the programs in answers, and what the command refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lopa_ascend.config.presets import find_preset, presets
from scripts.eval import tasks
from scripts.eval.data import functions
from scripts.eval.lm_tasks import CHAT, DATA, PLAIN, PUBLISHED, _adapt, prompt_formats, score, tasks_of

needs_evalplus = pytest.mark.skipif(importlib.util.find_spec("evalplus") is None, reason="evalplus is not installed")

# ---- tasks and prompts -----------------------------------------------------------------------------------------------


class OfLmEval:
    """A task as lm-eval has it, as far as a prompt format changes it."""

    def __init__(self, question: Any) -> None:
        self.config, self.fewshot_cfg = SimpleNamespace(doc_to_text=question), SimpleNamespace(doc_to_text=question)

    def set_config(self, name: str, value: object) -> None:
        setattr(self.config, name, value)


def test_diffucoder_is_asked_as_its_script_asks() -> None:
    prompt = find_preset("diffucoder-mbpp-plus").prompts[0]
    asked = "Can you complete the following Python function?\n```python\n{}\n```\n"
    for question in ("{{prompt.strip()}}", functions.mbpp_plus_prompt):
        task = OfLmEval(question)
        _adapt(task, prompt, 0)
        text = task.config.doc_to_text
        if callable(text):
            problem = {"prompt": "Add {x}.", "test_list": ["assert f(1)"]}
            assert text(problem) == asked.format('"""\nAdd {x}.\nassert f(1)\n"""')
        else:
            assert text == asked.format("{{prompt.strip()}}")
        assert task.fewshot_cfg.doc_to_text is text
        assert (task.config.gen_prefix, task.config.num_fewshot) == ("```python\n", 0)


def test_other_formats_leave_the_question_as_it_is() -> None:
    task = OfLmEval("Question: {{question}}\nAnswer:")
    _adapt(task, CHAT, None)
    assert vars(task.config) == {"doc_to_text": "Question: {{question}}\nAnswer:"}
    assert list(prompt_formats())[:3] == [CHAT.name, PLAIN.name, "dream-base"]


def test_presets_name_tasks_that_are_scored_as_their_authors_do() -> None:
    assert tasks_of(find_preset("dream-humaneval")) == {"dream_humaneval": 0}
    assert tasks_of(find_preset("S13")) == {"mbpp": 3, "gsm8k": 4}
    own = {path.stem for path in DATA.glob("*.yaml")}
    assert own == {*PUBLISHED.values(), tasks.DEFAULT_TASK}
    named = {name for preset in presets().values() for name in preset.tasks}
    assert named == {*PUBLISHED, "gsm8k", "gsm8k_cot", "mbpp", "minerva_math"}


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_task_has_the_name_of_its_file_and_functions_that_are_there(path: Path) -> None:
    names: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda _, node: names.append(node.value))
    assert yaml.load(path.read_text(), Loader)["task"] == path.stem
    assert names
    assert all(callable(getattr(functions, name.removeprefix("functions."))) for name in names)


def test_the_score_of_a_table_is_the_flexible_one_or_the_first() -> None:
    assert score({"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.5}) == 50
    assert score({"exact_match,none": 0.25, "math_verify,none": 0.5}) == 25


# ---- programs --------------------------------------------------------------------------------------------------------


def passes(program: str, test: str) -> bool:
    names: dict[str, Any] = {}
    exec(program, names)
    exec(test, names)
    return True


@needs_evalplus
def test_dreams_programs_are_the_prompt_and_the_first_fence() -> None:
    problem = {"prompt": "def f(x):\n", "entry_point": "f"}
    answers = ["Here:\n```python\ndef f(x):\n    return x + 1\n```\nThat is it.", "    return x + 1\n"]
    ((fenced, bare),) = functions.dream_programs([answers], [problem])
    assert passes(fenced, "assert f(1) == 2")
    assert passes(bare, "assert f(1) == 2")


@needs_evalplus
def test_an_answer_to_humaneval_plus_may_use_what_its_prompt_imports_and_defines() -> None:
    prompt = 'from math import sqrt\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n    """Half of the root of x."""\n'
    answers = ["def f(x):\n    return half(sqrt(x))```", "    return half(sqrt(x))\n```\nand more"]
    (programs,) = functions.humaneval_plus_programs([answers], [{"prompt": prompt, "entry_point": "f"}])
    assert all(passes(program, "assert f(4) == 1") for program in programs)


@needs_evalplus
def test_mbpp_plus_is_sanitised_for_the_function_that_its_test_calls() -> None:
    """Its docstring has more lines than the function, which a line that is no Python parts from it."""
    problem = {"prompt": "Give 1.\nAlways.", "code": "def f():\n    return 1", "test_list": ["assert f() == 1"]}
    answers = ["def f():\n    return 1\nprint(f())\n```\nend", "So be it\ndef f():\n    return 1\n"]
    ((right, lost),) = functions.mbpp_plus_programs([answers], [problem])
    assert right == "def f():\n    return 1"
    assert "def f" not in lost


# ---- the command -----------------------------------------------------------------------------------------------------


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        tasks.main(["gsm8k", "--limit", "1"])
    assert "this command needs lm-eval, which is not installed: pip install -e '.[eval]'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_evaluation(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        tasks.main(["--out", str(tmp_path)])
    assert f"--out {tmp_path} is a directory, expected a file" in capsys.readouterr().err
