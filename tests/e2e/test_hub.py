"""A server and `LLM` by names on the hub, against a stand-in for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lopa_ascend import LLM
from lopa_ascend.config.kinds import format_size
from lopa_ascend.hub import fit
from lopa_ascend.kv.pages import pages_for
from lopa_ascend.runner.scoring import HEAD_ROWS
from tests.e2e.conftest import ROOT, running
from tests.hub_standin import COMMITS, HeldRepository, large_repository, running_hub
from tests.tiny import write_dream

BY_NAME = """
import sys
from lopa_ascend import LLM
with LLM("org/model", max_model_len=256) as llm:
    print(llm.engine.model_name, llm.generate("hello", llm.params(max_new_tokens=8), quiet=True)[0].num_forwards > 0)
"""


def write_adapter(path: Path) -> Path:
    """A random adapter of the first layer's queries."""
    path.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": r".*layers\.0\.self_attn\.q_proj"}
    (path / "adapter_config.json").write_text(json.dumps(values))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 32), f"{module}.lora_B.weight": torch.ones(32, 2)}
    save_file(factors, str(path / "adapter_model.safetensors"))
    return path


def test_a_server_and_llm_by_name(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "modeling_dream.py").write_text("raise SystemExit('it ran')")
    model = HeldRepository(folder, gated_for="hf_right")
    with running_hub(model=model, adapter=HeldRepository(write_adapter(tmp_path / "adapter"))) as hub:
        environment = hub.environment(tmp_path / "hf", HF_TOKEN="hf_right")
        flags = ["--model", "org/model@v1", "--lora-path", "org/adapter"]
        with running(*flags, env=environment) as server:
            assert server.openai.models.list().data[0] == server.openai.models.retrieve("org/model")
            answer = server.openai.completions.create(model="org/model", prompt="hello", max_tokens=8)
            assert answer.choices[0].text
            assert "org/model@v1: weights " in "".join(server.stderr.seen)
        read = {file.name for file in model_dir.iterdir()} | {file.name for file in (tmp_path / "adapter").iterdir()}
        assert set(hub.downloaded()) == read
        assert {asked.token for asked in hub.asked if not asked.path.startswith("/cdn/")} == {"Bearer hf_right"}

        offline = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        (tmp_path / "hf/hub/models--org--model/refs/main").write_text(COMMITS["v1"])
        hub.asked.clear()
        done = subprocess.run([sys.executable, "-c", BY_NAME], env=offline, capture_output=True, text=True, check=True)
        assert (done.stdout, hub.asked) == ("org/model True\n", [])


def test_what_the_fit_check_counts_is_what_the_engine_takes(tmp_path: Path) -> None:
    assert fit.SCORED_ROWS == HEAD_ROWS
    model_dir = write_dream(tmp_path / "tiny", hidden=128, intermediate=256)  # sizes that kernels do not pad
    with LLM(model_dir, tensor_parallel_size=1, quantization="w8a8", dtype="bfloat16", max_model_len=300) as llm:
        told = fit.check_fit("tiny", llm.engine.config, model_dir, (model_dir / "model.safetensors").stat().st_size)
        (report,) = llm.engine.ranks
        pages = format_size(pages_for(300) * report.page_bytes)
        assert f"(bfloat16 and int8), KV pages {pages} (a request of 300 positions)" in told
        found = fit._read("tiny", model_dir, 0)
        assert fit._need(llm.engine.config, found).weights == pytest.approx(report.weights, rel=0.05)


@pytest.mark.parametrize("what", ["no network", "too large"])
def test_a_server_that_is_refused_ends_soon(what: str, tmp_path: Path) -> None:
    with running_hub(model=large_repository(tmp_path / "large")) as hub:
        environment = hub.environment(tmp_path / "hf")
        if what == "no network":
            environment["HF_ENDPOINT"] = "http://127.0.0.1:1"
        started = time.monotonic()
        with running("--model", "org/model", "--dtype", "float32", wait=False, env=environment) as server:
            assert server.process.wait(timeout=60) == 2
        assert time.monotonic() - started < 30
        assert "Traceback" not in (errors := server.stderr.all())
        message = errors.partition("serve: error: argument --model: ")[2]
        if what == "no network":
            assert message.startswith("http://127.0.0.1:1 cannot be reached ([Errno 111] Connection refused), and in")
        else:
            assert message.startswith("org/model does not fit: weights 270.9 GiB (float32), ")
            assert hub.downloaded() == ["config.json", "model.safetensors.index.json"]
