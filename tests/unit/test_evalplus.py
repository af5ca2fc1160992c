"""HumanEval+ and MBPP+: which program evalplus takes from an answer, and how it is scored. The answers are by hand."""

import sys

import pytest

from scripts.eval import scoring
from scripts.eval.sanitize import sanitize_dream, sanitize_evalplus
from scripts.eval.task_kinds import TASKS

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "CONST = 'A'\ndef helper(s):\n    return s\ndef f(s):\n    return helper(s).count(CONST.lower())\n",
            "CONST = 'A'\ndef helper(s):\n    return s\ndef f(s):\n    return helper(s).count(CONST.lower())",
            id="names under attributes are needed",
        ),
        pytest.param(
            "class Tool:\n    def g(x):\n        return x\ndef f(x):\n    return Tool.g(x)\n",
            "class Tool:\n    def g(x):\n        return x\ndef f(x):\n    return Tool.g(x)",
            id="a class under an attribute is needed",
        ),
        pytest.param(
            "def f(x):\n    return 1\ndef f(x):\n    return 2\n",
            "def f(x):\n    return 1",
            id="the first of two definitions",
        ),
        pytest.param(
            'def f(x):\n    """To be completed."""\ndef f(x):\n    return 2\n',
            "def f(x):\n    return 2",
            id="a function without a return is no definition",
        ),
        pytest.param(
            "LIMIT: int = 3\nother: str\ndef f(x):\n    return x + LIMIT\n",
            "LIMIT: int = 3\ndef f(x):\n    return x + LIMIT",
            id="annotated assignments",
        ),
        pytest.param(
            "@cache\ndef g(x):\n    return x\n@dataclass\nclass A:\n    y: int\ndef f(x):\n    return g(A(x))\n",
            "def f(x):\n    return g(A(x))",
            id="decorated functions and classes are left out",
        ),
        pytest.param(
            "async def g(x):\n    return x\ndef f(x):\n    return run(g(x))\n",
            "async def g(x):\n    return x\ndef f(x):\n    return run(g(x))",
            id="async functions",
        ),
        pytest.param(
            "from __future__ import annotations\nimport math\nif True:\n    y = 1\ndef f(x):\n    return math.pi\n",
            "import math\ndef f(x):\n    return math.pi",
            id="no future imports, and nothing below the top level",
        ),
        pytest.param(
            "def f(x):\n    # the answer\n\treturn   x\n",
            "def f(x):\n    # the answer\n\treturn   x",
            id="comments, blanks and tabs stay",
        ),
        pytest.param(
            "def g(x):\n    return x\nh = g\na.b = h\ndef f(x, key=h):\n    return f'{x}'\n",
            "def g(x):\n    return x\nh = g\ndef f(x, key=h):\n    return f'{x}'",
            id="an attribute that is set to a name does not replace it",
        ),
        pytest.param(
            "def size(x):\n    return 1\ndef f(x):\n    return x.size\n",
            "def size(x):\n    return 1\ndef f(x):\n    return x.size",
            id="names of attributes are needed as well",
        ),
        pytest.param("Sure!\ndef f(x): return x", "", id="a part has two lines at least"),
        pytest.param("def f(x): return x", "def f(x): return x", id="unless it is the first line"),
        pytest.param("f(x) = 1", "", id="nothing is valid"),
    ],
)
def test_evalplus_takes_the_first_definitions_that_the_entry_point_needs(text: str, expected: str):
    assert sanitize_evalplus(text, "f") == expected


def test_evalplus_looks_at_all_lines():
    text = "".join(f"def g{i}(x):\n    return {i}\n" for i in range(60)) + "def f(x):\n    return g59(x)\n"
    assert sanitize_evalplus(text, "f") == "def g59(x):\n    return 59\ndef f(x):\n    return g59(x)"
    assert sanitize_dream(text, "f") == "", "Dream's code looks at 100 lines"


def test_without_an_entry_point_all_definitions_are_kept():
    assert sanitize_evalplus("a, b = 1, 2\nc = 3\nprint(c)\n") == "a, b = 1, 2\nc = 3"
    assert sanitize_evalplus("a, b = 1, 2\nc = 3\n", "c") == "c = 3"


@linux
def test_an_answer_that_evalplus_accepts_passes_both_plus_tasks():
    """Of Dream's rules ``low`` would not be needed, because it stands under an attribute."""
    answer = "def low(s):\n    return s.lower()\ndef f(s):\n    return low(s).count('a')\n```\nThat is it."
    test = "def check(f):\n    assert f('aA') == 2"
    problem = {"prompt": 'def f(s):\n    """Counts."""\n', "entry_point": "f", "test": test}
    assert scoring.score_humaneval_plus(problem, answer) == {"pass_at_1": 1.0}
    tests = {"code": "def f(s):\n    return 0", "test_list": ["assert f('aA') == 2"], "test": "assert f('aA') == 2"}
    assert scoring.score_mbpp_plus({"prompt": "Count.", **tests}, answer) == {"pass_at_1": 1.0}


@linux
def test_the_docstring_of_an_mbpp_plus_prompt_is_a_part_of_the_program():
    """It has more lines than the function, which a line that is no Python parts from it."""
    problem = {"prompt": "Give 1.\nAlways.", "code": "def f():\n    return 1", "test_list": ["assert f() == 1"]}
    problem["test"] = problem["test_list"][0]
    assert scoring.score_mbpp_plus(problem, "def f():\n    return 1\n") == {"pass_at_1": 1.0}
    assert scoring.score_mbpp_plus(problem, "So be it\ndef f():\n    return 1\n") == {"pass_at_1": 0.0}


@pytest.mark.parametrize("name", ["humaneval_plus", "mbpp_plus"])
def test_answers_to_plus_tasks_end_at_the_first_fence_wherever_it_stands(name: str):
    assert TASKS[name].stop == ("```",)
    assert TASKS[name].cut("    return 1```\nand more") == "    return 1"
