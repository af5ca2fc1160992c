"""The evaluation's prompts and scores, and the sandbox that runs generated programs."""

import argparse
import json
import sys
import time
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.presets import find_preset
from scripts.eval import latex, sandbox, scoring, tasks
from scripts.eval.command import Loader
from scripts.eval.files import DATA, TaskFileError, check_runnable, read_examples, read_problems
from scripts.eval.metrics import AnswerCounts
from scripts.eval.prompts import CHAT, PLAIN, PromptMaker, find_format
from scripts.eval.sanitize import sanitize_dream
from scripts.eval.sweep import Way
from scripts.eval.task_kinds import TASKS
from scripts.eval.tasks import Foreign
from tests import published_scoring
from tests.tiers import examples
from tests.tiny import tiny_tokenizer

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
needs_latex = pytest.mark.skipif(latex.missing_package() is not None, reason=f"{latex.ANTLR} 4.11 is not installed")

# ---- sandbox ---------------------------------------------------------------------------------------------------------


@linux
def test_a_program_passes_when_it_and_its_test_run_to_their_end():
    assert sandbox.run("def add(a, b): return a + b", test="assert add(1, 2) == 3").passed
    wrong = sandbox.run("def add(a, b): return a - b", test="assert add(1, 2) == 3, 'no sum'")
    assert (wrong.passed, wrong.reason) == (False, "AssertionError: no sum")
    assert "SyntaxError" in sandbox.run("def f(:").reason


def test_programs_run_as_in_the_published_evaluations():
    forgotten_import = sandbox.run(
        "def total(xs: List[int]) -> int:\n    return sum(xs)", test="assert total([1]) == 1"
    )
    assert forgotten_import.reason == "NameError: name 'List' is not defined"
    assert sandbox.run("if __name__ == '__main__':\n    raise ValueError").passed
    assert sandbox.run("import sys\nassert not sys.flags.hash_randomization").passed
    for odd in ("import os" + ".path" * 250, "import tkinter.__main__", "import unittest.__main__"):
        assert not sandbox.run(odd).passed  # and it is no error of the sandbox


@linux
@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd')",
        "open('mine', 'w')",
        "import os; os.listdir('/')",
        "import os; os.remove('{path}')",
        "import pathlib; pathlib.Path('{path}').write_text('x')",
        "import shutil; shutil.rmtree('{folder}')",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=print).start()",
    ],
)
def test_files_network_and_processes_are_refused_by_the_kernel(program: str, tmp_path: Path):
    victim = tmp_path / "kept"
    victim.write_text("x")
    outcome = sandbox.run(program.format(path=victim, folder=tmp_path))
    assert not outcome.passed
    assert "not permitted" in outcome.reason or "can't start new thread" in outcome.reason
    assert victim.read_text() == "x"


@linux
def test_native_code_is_held_as_well(tmp_path: Path):
    sandbox.run(f"import ctypes\nctypes.CDLL(None).system(b'touch {tmp_path}/made')")
    assert not list(tmp_path.iterdir())


@linux
def test_time_and_memory_are_limited():
    for program in ("while True: pass", "import time; time.sleep(60)"):
        assert sandbox.run(program, timeout=1).reason == "timeout"
    assert sandbox.run("x = bytearray(1 << 30)", memory=1 << 28).reason.startswith("MemoryError")


@linux
def test_a_program_that_ends_early_has_not_passed():
    for program in (
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "print('passed')\nexit(0)",
    ):
        assert not sandbox.run(program, test="assert False").passed


@linux
def test_the_standard_library_can_be_imported_and_no_other():

    program = (
        "import heapq as hq\nfrom collections import deque\nimport datetime\ndatetime.datetime.strptime('20', '%y')"
    )
    assert sandbox.run(program).passed
    assert not sandbox.run("import lopa_ascend").passed
    assert not sandbox.run("import latex").passed, "the folder of the sandbox is not on the path"
    assert sandbox.run("import os\nassert not [name for name in os.environ if 'PATH' in name]").passed


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch):
    sandbox.check_machine.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    try:
        with pytest.raises(TaskFileError, match="mbpp: generated programs run on Linux on x86_64 or aarch64 alone"):
            check_runnable([TASKS["mbpp"]])
    finally:
        sandbox.check_machine.cache_clear()


# ---- scores ----------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("name", ["mbpp", "humaneval", "humaneval_plus", "mbpp_plus"])
def test_the_right_program_of_a_local_problem_passes_and_a_wrong_one_fails(name: str):
    task = TASKS[name]
    for _, problem in read_problems(DATA / f"{name}.jsonl", name).problems[:3]:
        right = task.example_answer(problem)
        if name == "humaneval_plus":
            right = f"{problem['prompt']}{right}\n```\nThat is it."
        elif name == "humaneval":
            right = f"Here it is:\n```python\n{problem['prompt']}{right}```\nThat is it."
        assert task.score(problem, task.cut(right)) == {"pass_at_1": 1.0}
        assert task.score(problem, task.cut(right.replace("return", "return not"))) == {"pass_at_1": 0.0}


@linux
def test_an_answer_to_humaneval_plus_may_use_what_its_prompt_imports_and_defines():
    prompt = 'from math import sqrt\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n    """Half of the root of x."""\n'
    problem = {"prompt": prompt, "entry_point": "f", "test": "def check(f):\n    assert f(4) == 1"}
    for answer in ("def f(x):\n    return half(sqrt(x))```", "    return half(sqrt(x))\n```\nand more"):
        assert scoring.score_humaneval_plus(problem, answer) == {"pass_at_1": 1.0}


def test_answers_are_cut_at_stop_strings_or_only_where_the_published_code_always_cuts():
    text = "#### 3\nQuestion: next [DONE] more"
    assert TASKS["gsm8k"].cut(text) == "#### 3\n"
    assert TASKS["gsm8k"].cut(text, at_stop=False) == text
    assert TASKS["mbpp"].cut(text, at_stop=False) == "#### 3\nQuestion: next "


@given(
    st.lists(st.sampled_from(["#### ", "12", "1,2", "-", "$", ".", "3.", "a", "\n", " ", "####", "0"]), max_size=12),
    st.sampled_from(["so\n#### 12", "#### 1,2", "#### -3", "#### 0"]),
)
@settings(max_examples=examples(300))
def test_gsm8k_scores_are_the_published_ones(parts: list[str], answer: str):
    text = "".join(parts)
    assert scoring.score_gsm8k({"answer": answer}, text) == published_scoring.gsm8k(answer, text)


@given(
    st.lists(
        st.sampled_from(
            [
                "import math",
                "def f(x):",
                "    return g(x)",
                "def g(x):",
                "    return 1",
                "x = f",
                "class A:",
                "    y = 2",
                "",
                "text here",
                "  bad",
                "def h(): return A",
                "print(f(1))",
                "\tz = 1",
                "a.b = 3",
                "import os as o",
            ]
        ),  # fmt: skip
        max_size=9,
    )
)
@settings(max_examples=examples(300))
def test_sanitize_is_the_published_one(lines: list[str]):
    text = "\n".join(lines)
    assert sanitize_dream(text, "f") == published_scoring.sanitize(text, "f")


@pytest.mark.parametrize("expression", ["n" + ".next" * 400, "not " * 450 + "n"])
def test_a_program_that_is_nested_too_deeply_is_no_answer(expression: str):
    assert sanitize_dream(f"def f(n):\n    return {expression}\n", "f") in ("", f"def f(n):\n    return {expression}")


def test_final_answers_are_brought_into_one_form():
    assert latex.boxed(r"so $\boxed{\frac{1}{2}}$ it is") == r"\frac{1}{2}"
    assert latex.boxed(r"$\boxed 7$") == "7"
    assert latex.boxed("nothing") == ""
    assert latex.final_answer("Final Answer: The final answer is $7$. I hope it is correct.") == "$7$"
    assert latex.final_answer("7") == latex.NO_ANSWER
    assert latex.normalize("$1,024$") == "1024"
    assert latex.normalize(r"x = $\frac12$ cm") == r"\frac{1}{2}"
    assert latex.normalize(r"90^\circ") == "90"


@needs_latex
def test_equal_expressions_are_equivalent(monkeypatch: pytest.MonkeyPatch):
    assert latex.is_equivalent(r"\frac{1}{2}", "0.5")
    assert latex.is_equivalent("(0,1)", "(0,1)")
    assert not latex.is_equivalent(r"\frac{1}{2}", r"\frac{1}{3}")
    assert not latex.is_equivalent(latex.NO_ANSWER, latex.NO_ANSWER)
    with monkeypatch.context() as patch:
        patch.setattr(latex, "TIMEOUT", 1.0)
        start = time.monotonic()
        assert not latex.is_equivalent("10^{10^{10}}", "5")
        assert time.monotonic() - start < 20
    problem = {"problem": "", "solution": r"It is $\boxed{\sqrt{2}}$."}
    answer = r"Final Answer: The final answer is $\sqrt2$. I hope it is correct."
    assert scoring.score_math(problem, answer) == {"exact_match": 1.0}


@pytest.mark.skipif(latex.missing_package() is None, reason="the package is there")
def test_math_is_refused_without_its_parser_before_anything_is_generated():
    with pytest.raises(
        TaskFileError, match=r"minerva_math needs antlr4-python3-runtime 4.11, and .* is installed: pip"
    ):
        check_runnable([TASKS["minerva_math"]])


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_made_in_the_format_of_each_model():
    gsm8k, problem = TASKS["gsm8k"], {"question": "1 + {x}?", "answer": "#### 2"}
    tokenizer = copy(tiny_tokenizer())
    examples = [{"question": "2 + 2?", "answer": "#### 4"}]
    plain = "Question: 2 + 2?\nAnswer: #### 4\n\nQuestion: 1 + {x}?\nAnswer:"
    assert PromptMaker(PLAIN, tokenizer).text(gsm8k, problem, examples) == plain
    instruct = PromptMaker(find_format("dream-instruct"), tokenizer).messages(gsm8k, problem, examples)
    assert instruct == [
        {"role": "user", "content": "Question: 2 + 2?\nAnswer:"},
        {"role": "assistant", "content": "#### 4"},
        {"role": "user", "content": "Question: 1 + {x}?\nAnswer:"},
    ]
    assert PromptMaker(CHAT, tokenizer).text(TASKS["problems"], problem) == (
        "<|im_start|>user\n1 + {x}?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer.special = {**tokenizer.special, "bos_token": "<|endoftext|>"}
    based = PromptMaker(find_format("dream-base"), tokenizer).text(gsm8k, problem, examples)
    assert based == f"<|endoftext|>{plain}"


def test_diffucoder_is_asked_as_its_script_asks():
    _, problem = read_problems(DATA / "humaneval_plus.jsonl", "humaneval_plus").problems[0]
    text = PromptMaker(find_format("diffucoder-instruct"), tiny_tokenizer()).text(TASKS["humaneval_plus"], problem)
    assert text == (
        "<|im_start|>system\nYou are an intelligent programming assistant to produce Python algorithmic solutions"
        "<|im_end|>\n<|im_start|>user\nCan you complete the following Python function?\n```python\n"
        f"{problem['prompt'].strip()}\n```\n<|im_end|>\n<|im_start|>assistant\n```python\n"
    )


def test_formats_that_a_model_cannot_make_are_refused():
    tokenizer = copy(tiny_tokenizer())
    tokenizer.special = {}
    with pytest.raises(ParameterError, match="prompt: dream-base begins with a BOS token"):
        PromptMaker(find_format("dream-base"), tokenizer).check()
    tokenizer.chat_template = None
    with pytest.raises(ParameterError, match="prompt: chat needs a chat template"):
        PromptMaker(CHAT, tokenizer).check()
    with pytest.raises(ParameterError, match="unknown value 'qwen'; choose one of chat, plain, dream-base"):
        find_format("qwen")


def test_mbpp_and_math_have_their_usual_examples():
    mbpp = (
        "Write a function to find the similar elements",
        "Write a python function to identify non-prime numbers",
        "Write a function to find the largest integers",
    )
    math = ("Find the domain of the expression", "If $\\det", "Terrell usually lifts", "If the system of equations")
    for name, field, beginnings in (("mbpp", "text", mbpp), ("minerva_math", "problem", math)):
        found = read_examples(TASKS[name], None, len(beginnings))
        for example, text in zip(found, beginnings, strict=True):
            assert example[field].startswith(text)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        tasks.main(["gsm8k", "--limit", "1"])
    assert "this command needs lm-eval, which is not installed: pip install -e '.[eval]'" in capsys.readouterr().err


def test_the_task_of_a_preset_may_be_one_of_lm_eval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks, "_check_installed", lambda: None)
    asked: list[Any] = []
    monkeypatch.setattr(tasks, "_check_foreign", asked.extend)
    monkeypatch.setattr(Loader, "load", lambda *_: sys.exit("evaluated"))
    with pytest.raises(SystemExit, match="evaluated"):
        tasks.main(["--preset", "d2f-gsm8k"])
    with pytest.raises(SystemExit, match="evaluated"):
        tasks.main(["lm_eval:arc_easy"])
    with pytest.raises(SystemExit, match="evaluated"):
        tasks.main(["lm_eval:arc_easy", "--examples", "3"])
    num_examples = find_preset("d2f-gsm8k").tasks["gsm8k_cot"]
    assert asked == [Foreign("gsm8k_cot", num_examples), Foreign("arc_easy", None), Foreign("arc_easy", 3)]


def test_tasks_of_lm_eval_with_as_many_examples_share_a_call():
    ours = {"task": "lopa_gsm8k"}
    foreign = [Foreign("a", 3), Foreign("b", None), Foreign("c", 3), Foreign("d", 0)]
    assert tasks.calls([ours], foreign) == [(None, [ours, "b"]), (3, ["a", "c"]), (0, ["d"])]
    assert tasks.calls([], [Foreign("a", 3)]) == [(3, ["a"])]


def test_results_of_a_tag_are_those_of_its_tasks(monkeypatch: pytest.MonkeyPatch, capsys):
    one = {"results": {"cola": {"mcc,none": 0.5}}, "samples": {"cola": [1]}}
    two = {"results": {"mnli": {"acc,none": 0.25}}, "samples": {"mnli": [2]}}
    counts = {"mnli": [AnswerCounts(6, 8, 2)]}
    monkeypatch.setattr(tasks, "describe_run", lambda _: {})
    monkeypatch.setattr(tasks.Run, "evaluated", lambda *_: (tasks.merged_results([one, two]), counts))
    run = tasks.Run(argparse.Namespace(), [], [Foreign("glue", None)], CHAT, cut=True)
    found = run.point(cast(Any, None), Way("", {}, DecodingParams()))
    assert found["lm_eval"] == {"cola": {"mcc,none": 0.5}, "mnli": {"acc,none": 0.25}}
    assert found["samples"] == {"cola": [1], "mnli": [2]}
    assert found["tpf"] == {"mnli": {"answers": 1, "summed_tpf": 3, "lopa_tpf": 8 / 3}}
    assert "mnli: {'acc,none': 0.25}; summed TPF 3.00" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_the_evaluation(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        tasks.main(["--out", str(tmp_path)])
    assert f"--out {tmp_path} is a directory, expected a file" in capsys.readouterr().err


def test_a_broken_task_file_is_refused_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mbpp.jsonl").write_text('{"text": "", "code": ""}\n')
    with pytest.raises(SystemExit):
        tasks.main(["mbpp", "--data", str(tmp_path), "--model", str(tmp_path / "absent")])
    assert 'mbpp.jsonl, line 1: has no "test_list"' in capsys.readouterr().err
    plus = {"prompt": "", "code": "def f(x:", "test_list": ["assert f(1)"], "test": ""}
    (tmp_path / "mbpp_plus.jsonl").write_text(json.dumps(plus) + "\n")
    with pytest.raises(SystemExit):
        tasks.main(["mbpp_plus", "--data", str(tmp_path), "--model", str(tmp_path / "absent")])
    assert 'mbpp_plus.jsonl, line 1: "code" is not Python' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tasks.main(["gsm9k"])
    assert "unknown task 'gsm9k'; choose from problems, gsm8k" in capsys.readouterr().err
