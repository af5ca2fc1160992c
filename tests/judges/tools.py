"""Runs public tools, without network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

from tests.judges.report import Options

MODULES = {"schemathesis": "schemathesis.cli", "lm_eval": "lm_eval", "guidellm": "guidellm"}
"""By tool: the module that is its command."""


def run_tool(name: str, *arguments: str, options: Options, cwd: Path | None = None) -> CompletedProcess[str]:
    """Runs a tool without network; its ``stdout`` has what it writes to stderr too.

    Args:
        name: in MODULES.
        arguments: of the tool.
        options: the judges' options.
        cwd: where to run it; None for the folder of the reports.

    Raises:
        ModuleNotFoundError: the tool is not installed for this interpreter.
    """
    require(name)
    return subprocess.run(
        [sys.executable, "-m", MODULES[name], *arguments],
        cwd=cwd or options.out,
        env=offline_environment(options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def require(module: str) -> None:
    """Checks that a tool is installed for this interpreter.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{module} is not installed: pip install -e '.[judge]'")


def offline_environment(options: Options) -> dict[str, str]:
    """Environment variables that keep a tool from looking for models and data sets on the network."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(options.out / "huggingface"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
