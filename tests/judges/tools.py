"""Public tools as commands, and their environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

MODULES = {"schemathesis": "schemathesis.cli", "lm_eval": "lm_eval", "guidellm": "guidellm"}
"""By tool: the module that is its command."""


def tool_command(name: str) -> list[str]:
    """The command of a tool that is installed for this interpreter.

    Raises:
        ModuleNotFoundError: the tool is not installed.
    """
    require(name)
    return [sys.executable, "-m", MODULES[name]]


def require(module: str) -> None:
    """Checks that a tool is installed for this interpreter.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{module} is not installed: pip install -e '.[judge]'")


def offline_environment(home: Path) -> dict[str, str]:
    """Environment variables that keep a tool from looking for models and data sets on the network.

    Args:
        home: where Hugging Face libraries keep their files.
    """
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
