"""Public tools as commands, and the tokenizer directory that they can read."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from lopa_ascend.demo import DEMO_MODEL

MODULES = {"schemathesis": "schemathesis.cli", "lm_eval": "lm_eval", "guidellm": "guidellm"}


def tool(name: str) -> list[str]:
    """The command that runs a tool of this interpreter's environment; SystemExit where it is not installed."""
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"{name} is not installed: pip install -e '.[judge]'")
    return [sys.executable, "-m", MODULES[name]]


def offline(home: Path) -> dict[str, str]:
    """The environment of a tool that would look for models and data sets in the network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(home)}
    return {**os.environ, **offline, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def write_tokenizer(directory: Path) -> Path:
    """The bundled tokenizer as transformers itself can load it: Dream's own class is code on the hub; it is Qwen2's."""
    directory.mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(DEMO_MODEL / name, directory)
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    return directory
