"""Names on the hub, against a stand-in for it: what is downloaded, and what is refused before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from lopa_ascend.backend.cpu import Cpu
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.hub import fit, model_name, name_in, on_this_machine
from scripts.bench.plan.models import load_model
from tests.hub_standin import COMMITS, HeldRepository, Hub, large_repository, running_hub

GIB = 2**30


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Hub], None]:
    """Makes huggingface_hub in this process use a stand-in, and an empty cache."""

    def use_hub(hub: Hub) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)  # of versions 0.x
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)

    return use_hub


@pytest.fixture
def demo(tmp_path: Path) -> HeldRepository:
    """The bundled model, beside files that nobody needs here."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    for name in ("README.md", "modeling_dream.py", "pytorch_model.bin", "model.gguf", "logo.png", "trainer_state.json"):
        (folder / name).write_text("not wanted")
    return HeldRepository(folder)


@pytest.fixture
def large(tmp_path: Path) -> HeldRepository:
    return large_repository(tmp_path / "large")


def located(name: str) -> Path:
    """The directory of a model."""
    model = on_this_machine(EngineConfig(model=name)).model
    assert model is not None
    return Path(model)


def refusal(model: str = "org/model", **settings: Any) -> str:
    with pytest.raises(ParameterError) as refused:
        on_this_machine(EngineConfig(model=model, **settings))
    return refused.value.message


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = ("org/name", "org/name@v1", "org/name@refs/pr/3", f"/elsewhere/models--org--name/snapshots/{'c' * 40}")
    assert [tuple(name_in(name) or ())[1:] for name in names] == [
        ("org/name", "main"), ("org/name", "v1"), ("org/name", "refs/pr/3"), ("org/name", "c" * 40)
    ]  # fmt: skip
    for path in ("org/here", "name", "./name", "../name", "a/b/c", "/org/name", "org/name@", "org/a--b", "org/x@../y"):
        assert name_in(path) is None


def test_what_is_read_is_downloaded_once(use: Callable[[Hub], None], demo: HeldRepository, capfd) -> None:
    with running_hub(model=demo) as hub:
        use(hub)
        hub.cuts["model.safetensors"] = 12 * 2**20
        try:
            directory = located("org/model@v1")
        except ParameterError:  # it has broken off: versions before 2 of huggingface_hub go on in the next start
            directory = located("org/model@v1")
        read = sorted(file.name for file in DEMO_MODEL.iterdir() if file.suffix in (".json", ".txt", ".safetensors"))
        assert hub.downloaded() == sorted(file.name for file in directory.iterdir()) == read
        assert (model_name(EngineConfig(model=str(directory))), directory.name) == ("org/model", COMMITS["v1"])
        spans = [asked.range for asked in hub.asked if asked.path == "/cdn/org/model/model.safetensors"]
        assert spans[0] is None
        assert spans[1] in ("bytes=10485760-", "bytes=12582912-"), "a download goes on where it was cut"
        assert "MiB in 4 files to download to" in (told := capfd.readouterr().err)
        assert "weights 33.6 MiB (float32), KV pages" in told
        hub.asked.clear()
        assert located("org/model@v1") == directory
        assert hub.downloaded() == []
        assert "download" not in capfd.readouterr().err
        hub.status = 503
        assert located("org/model@v1") == directory
        assert "cannot be reached" in (told := capfd.readouterr().err)
        assert "taking commit bbbbbbb from the cache" in told


def test_without_a_network_the_cache_must_have_all(use, demo: HeldRepository, monkeypatch, tmp_path: Path) -> None:
    with running_hub(model=demo) as hub:
        use(hub)
        directory = located("org/model")
    assert located("org/model") == directory
    (directory / "model.safetensors").unlink()
    assert "[Errno 111] Connection refused), and in the cache" in (told := refusal())
    assert "org/model lacks model.safetensors; start once with a network, or give a directory" in told
    assert "org/model@v1 is not there" in refusal("org/model@v1")
    (tmp_path / "file").touch()
    with running_hub(model=demo) as hub:
        use(hub)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
        assert " cannot be written (Not a directory; HF_HOME names another folder), and in the cache" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal().startswith("HF_HUB_OFFLINE is set, and in the cache")


def test_what_the_hub_refuses(use, demo: HeldRepository, monkeypatch) -> None:
    gated = HeldRepository(demo.folder, gated_for="hf_right")
    with running_hub(model=demo, gated=gated) as hub:
        use(hub)
        page = f"{hub.url}/org/gated"
        remedy = f"accept its conditions on {page}, and set HF_TOKEN to a token of that account"
        assert refusal("org/gated") == f"org/gated is gated: {remedy}"
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert refusal("org/gated") == f"org/gated is gated: {remedy}"
        assert f"no repository that {hub.url} shows you (404); look at {hub.url}/org/nothing" in refusal("org/nothing")
        monkeypatch.setenv("HF_TOKEN", "expired")
        assert refusal() == f"{hub.url}/org/model is refused (401); check what the token in HF_TOKEN may read"
        monkeypatch.delenv("HF_TOKEN")
        assert "org/nothing is no directory here, and no repository" in refusal("org/nothing")
        assert refusal("org/model@v9") == f"org/model has no revision 'v9'; {hub.url}/org/model shows which it has"
        assert hub.downloaded() == []


def test_what_cannot_be_served_is_refused_before_its_weights_come(use, demo: HeldRepository) -> None:
    with running_hub(model=demo) as hub:
        use(hub)
        config = json.loads((demo.folder / "config.json").read_text())
        (demo.folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
        assert "model_type is 'llama', expected one of Dream," in (told := refusal())
        assert told.endswith("Code of a repository is never run")
        (demo.folder / "model.safetensors").unlink()
        assert "has no 'model.safetensors', expected weights in safetensors; pytorch_model.bin is never" in refusal()
        assert refusal("/nowhere", lora="org/model") == "org/model has no adapter_config.json: it is no PEFT adapter"
        assert hub.downloaded() == ["config.json", "generation_config.json"]


@pytest.mark.parametrize(
    ("device", "free", "settings", "words"),
    [
        ("cpu", 400, {}, None),
        ("cpu", 200, {"dtype": "float32"}, "and 200.0 GiB are free; choose dtype bfloat16, which takes 14"),
        ("cpu", 100, {}, "choose quantization w8a8, which takes "),
        ("cpu", 79, {"dtype": "float32"}, "choose dtype bfloat16 and quantization w8a8, which takes 75.4 GiB"),
        ("cpu", 60, {}, "choose quantization w4a8, which takes 50.9 GiB"),
        ("cpu", 24, {}, "; nor does it with quantization w4a8: 50.9 GiB"),
        ("cpu", 24, {"graph_mode": "inductor"}, " take 140.8 GiB, and 24.0 GiB are free"),
        ("cuda", 80, {}, "choose quantization w8a8, which takes 75.4 GiB"),
        ("cpu", 24, {"tensor_parallel_size": 3}, "3 does not split this model evenly; choose one of 1, 2, "),
        ("cpu", 24, {"max_model_len": 200_000}, "must be from 1 to the model's 131072 positions, got 200000"),
        ("cuda", 60, {"quantization": "w8a8"}, "choose tensor_parallel_size 2, which takes "),
    ],
)
def test_what_does_not_fit(use, large: HeldRepository, monkeypatch, capfd, device, free, settings, words) -> None:
    monkeypatch.setattr(fit, "_free_memory", lambda engine: free * GIB)
    with running_hub(model=large) as hub:
        use(hub)
        told = refusal(device=device, **settings)
        assert hub.downloaded() == ["config.json", "model.safetensors.index.json"]
    if words is None:  # the memory is enough
        assert told == "org/model: 135.4 GiB do not fit onto the disk; HF_HOME chooses another one"
        assert "400.0 GiB are free" in capfd.readouterr().err
    else:
        assert words in told


def test_int4_is_known_before_weights_come(use, large: HeldRepository, monkeypatch) -> None:
    monkeypatch.setattr(fit, "_free_memory", lambda engine: GIB)
    file = large.folder / "config.json"
    values = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": values}))
    with running_hub(model=large) as hub:
        use(hub)
        assert "device cuda has no kernels; choose device cpu, or a bfloat16 or W8A8" in refusal(device="cuda")
        assert "GiB (bfloat16 and int4), KV pages" in refusal()
        assert hub.downloaded() == ["config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("fields", "form", "has_npu"),
    [({}, "bfloat16 and fp8", False), ({"weight_block_size": [128, 128]}, "bfloat16", True)],
)
def test_fp8_is_known_before_weights_come(use, large: HeldRepository, monkeypatch, fields, form, has_npu) -> None:
    """With scales of blocks the weights become floats."""
    monkeypatch.setattr(fit, "_free_memory", lambda engine: GIB)
    file = large.folder / "config.json"
    values = {"quant_method": "fp8", "activation_scheme": "dynamic", **fields}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": values}))
    with running_hub(model=large) as hub:
        use(hub)
        assert f"GiB ({form}), KV pages" in refusal()
        assert ("device npu has no kernels; choose device cpu or cuda" in refusal(device="npu")) is not has_npu


def test_the_free_memory_is_that_of_the_machine(use, large: HeldRepository, monkeypatch) -> None:
    monkeypatch.setattr(Cpu, "free_memory", lambda self, ranks: 7 * GIB // ranks)
    with running_hub(model=large) as hub:
        use(hub)
        assert "and 7.0 GiB are free" in refusal()
        assert "and 3.5 GiB of each rank are free" in refusal(tensor_parallel_size=2)
        assert (load_model("org/model").num_layers, hub.downloaded()[0]) == (80, "config.json")
