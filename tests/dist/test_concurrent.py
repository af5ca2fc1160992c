"""The bundled model on several ranks with many requests at a time, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.demo import DEMO_MODEL, HELD_OUT
from lopa_ascend.parallel.launch import free_port
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_tokenizer
from tests.dist import ranks
from tests.dream_checkpoint import open_checkpoint
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank

SETTINGS: list[dict[str, Any]] = [
    {"num_branches": 3},
    {"num_branches": 4, "tau_conf": 0.8, "max_active_blocks": 2},
    {"num_branches": 7, "window_attention": "full", "tau_conf": 0.8},
    {"decoding": "d2f"},
    {"num_branches": 2, "confidence": "margin", "branch_score": "tail"},
    {"num_branches": 3, "confidence": "neg_entropy", "finish_at_eos": False},
    {"num_branches": 3, "window_attention": "full"},
    {"num_branches": 1, "min_new_tokens": 40, "repetition_penalty": 1.2, "logit_bias": {"20": 1.5, "700": -3}},
]


def job(together: bool, **options: Any) -> dict[str, Any]:
    """Held-out problems with settings of all kinds; the first prompt comes twice, to be found in the prefix cache."""
    config = open_checkpoint(DEMO_MODEL).config
    texts = Prompts(load_tokenizer(DEMO_MODEL, config.vocab_size), config.vocab_size, config.mask_token_id, "demo")
    with HELD_OUT.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line, _ in zip(lines, range(len(SETTINGS) - 1), strict=False)]
    prompts = [texts.encode_chat([{"role": "user", "content": question}]) for question in questions]
    requests = [
        {"prompt": prompt, "params": settings | {"max_new_tokens": 64}}
        for prompt, settings in zip([prompts[0], *prompts], SETTINGS, strict=True)
    ]
    options = {"kv_cache_memory": ranks.KV_MEMORY, **options}
    return {"model": None, "options": options, "requests": requests, "together": together}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return ranks.generate(1, [job(True)], tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 2), (2, 2), (4, 1), (1, 3)], [(2, 2), (1, 3)]))
def test_tokens_are_those_of_one_process(tp: int, bp: int, expected, tmp_path: Path) -> None:
    options = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    assert ranks.generate(tp * bp, [job(True, **options)], tmp_path) == expected


def test_llm_starts_its_ranks_by_itself(expected, tmp_path: Path) -> None:
    """Without a main guard: nothing of the caller runs again in the other ranks."""
    options = {"branch_parallel_size": 2}
    script, task, out = tmp_path / "script.py", tmp_path / "job.json", tmp_path / "out"
    task.write_text(json.dumps(job(True, **options)))
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from tests.dist.generate import run\n"
        "print('begins')\n"
        "Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))\n"
    )
    environment = {**os.environ, **ranks.ENVIRONMENT}
    command = [sys.executable, str(script), str(task), str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ranks.TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "begins\n"
    assert json.loads(out.read_text()) == expected[0]


@pytest.mark.slow  # test_launch.py starts such agents by the launch script, and asks the server
def test_two_nodes(expected, tmp_path: Path) -> None:
    """Two torchrun agents on this machine, each with a tensor-parallel group of two."""
    options = {"tensor_parallel_size": 2, "branch_parallel_size": 2}
    task, out, port = tmp_path / "job.json", tmp_path / "out", free_port()
    task.write_text(json.dumps([job(True, **options)]))
    agents = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["-m", "tests.dist.generate", str(task), str(out)]
        environment = {**os.environ, **ranks.ENVIRONMENT}
        process = subprocess.Popen(command, cwd=ranks.ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        agents.append(process)
    ranks.finish(agents)
    for rank in range(4):
        assert json.loads(Path(f"{out}.{rank}").read_text()) == expected
