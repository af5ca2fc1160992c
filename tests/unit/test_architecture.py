"""The import contracts are there and cover what they should; the folders beside lopa_ascend/ have one name each."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from lopa_ascend.backend import find_device
from lopa_ascend.config import GRAPH_MODES_BY_DEVICE

ROOT = Path(__file__).resolve().parents[2]
TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PYPROJECT: dict[str, Any] = TOML.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONTRACTS = {c["name"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
PURE: list[str] = CONTRACTS["policy is pure"]["source_modules"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds the checkout first."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def layers() -> list[set[str]]:
    """The rooms, from the top."""
    return [{name.strip(" ()") for name in layer.split("|")} for layer in CONTRACTS["imports point one way"]["layers"]]


def test_layers_are_as_designed():
    contract = CONTRACTS["imports point one way"]
    assert contract["type"] == "layers"
    assert contract["exhaustive"]
    assert layers() == [
        {"serve", "llm"},
        {"engine"},
        {"runner"},
        {"graph"},
        {"hub"},
        {"model", "score", "core", "admission"},
        {"parallel"},
        {"backend", "checkpoint", "text", "decode"},
        {"families"},
        {"config"},
        {"kv"},
        {"types", "demo", "probe", "process"},
    ]


def test_policy_contract_names_every_pure_module():
    names = (
        "types",
        "config",
        "families",
        "decode",
        "kv.pages",
        "kv.prefix_cache",
        "engine.scheduler",
        "engine.turns",
        "core",
        "admission",
        "text",
    )
    assert [f"lopa_ascend.{name}" for name in names] == PURE
    assert {"torch", "torch_npu"} <= set(CONTRACTS["policy is pure"]["forbidden_modules"])


def test_only_the_npu_backend_may_import_torch_npu():
    contract = CONTRACTS["one place knows the NPU"]
    assert set(contract["forbidden_modules"]) == {"torch_npu", "torchair", "npugraph_ex"}
    assert all(line.startswith("lopa_ascend.backend.npu") for line in contract["ignore_imports"])


def test_the_http_process_is_one_of_the_contracts():
    contract = CONTRACTS["the HTTP process knows no torch"]
    assert contract["source_modules"] == ["lopa_ascend.serve"]
    assert "torch" in contract["forbidden_modules"]


def test_no_room_above_the_backend_asks_which_device_it_is():
    """It asks the device's object. Names stand in the table of the setting, and where tensors lie by default."""
    devices, found = {*GRAPH_MODES_BY_DEVICE}, set()
    for path in (ROOT / "lopa_ascend").rglob("*.py"):
        name = str(path.relative_to(ROOT / "lopa_ascend"))
        if not name.startswith("backend/"):
            constants = (n.value for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant))
            found |= {(name, value) for value in constants if value in devices}
    assert found == {("config/engine.py", device) for device in devices} | {("checkpoint/__init__.py", "cpu")}


def test_devices_have_a_contract_and_a_package_each():
    contract = CONTRACTS["a device is one object"]
    assert sorted(contract["forbidden_modules"]) == sorted(
        f"lopa_ascend.backend.{name}" for name in GRAPH_MODES_BY_DEVICE
    )
    above = {f"lopa_ascend.{name}" for layer in layers()[:7] for name in layer}
    assert {*contract["source_modules"]} == above | {"lopa_ascend.backend.device"}
    for name in GRAPH_MODES_BY_DEVICE:
        assert find_device(name).name == name


NPU_CHECKS = ("lopa_ascend.backend.npu.versions", "lopa_ascend.backend.npu.environment")
"""Run before a launch, on machines where torch may not load."""
DEVICES = [f"lopa_ascend.backend.{name}" for name in GRAPH_MODES_BY_DEVICE]


@pytest.mark.parametrize("module", ["lopa_ascend", "lopa_ascend.serve.server", *DEVICES, *NPU_CHECKS, *PURE])
def test_pure_modules_do_not_import_torch(module: str):
    """Nor numpy, whose import takes a third of the time in which the command line answers."""
    heavy = {"torch", "torch_npu", "transformers", "numpy"}
    result = python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))")
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_no_class_name_stands_for_two_things():
    texts = [file.read_text("utf-8") for file in (ROOT / "lopa_ascend").rglob("*.py")]
    counts = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, flags=re.M))
    assert {name for name, count in counts.items() if count > 1} == set()


@pytest.mark.parametrize("name", ["graph", "parallel"])
def test_outer_packages_have_one_name(name: str):
    assert python(f"import lopa_ascend.{name}").returncode == 0
    result = python(f"import {name}")
    assert result.returncode != 0
    assert f"ImportError: {name}/ is the package lopa_ascend.{name}" in result.stderr
    assert (ROOT / name).readlink() == Path("lopa_ascend", name)


def test_decodings_stay_narrow():
    """A base class of few methods, properties and inherited ones among them; and functions of few ways through. Ruff's
    C901 counts neither conditions inside expressions nor comprehensions."""
    from lopa_ascend.decode.strategy import Strategy

    methods = [name for kind in Strategy.__mro__[:-1] for name, value in vars(kind).items() if _is_method(value)]
    assert len(methods) <= 25, methods
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "lopa_ascend" / "decode").glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 100
    assert not {node.name: num_ways(node) for node in functions if num_ways(node) > 12}


def _is_method(value: object) -> bool:
    return isinstance(value, (FunctionType, property, classmethod, staticmethod))


def num_ways(function: ast.AST) -> int:
    """The cyclomatic complexity, with each operand of "and" and "or", and each part of a comprehension."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension))
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count
