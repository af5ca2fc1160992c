"""Replicas on two nodes survive what can end: no request is lost, and the replica comes back."""

import asyncio
import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray
from ray import serve
from ray.cluster_utils import Cluster
from safetensors.torch import load_file, save_file

from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.parallel.launch import LOCALHOST
from lopa_ascend.serve.replicas.app import APP, build
from lopa_ascend.serve.replicas.command import failure
from tests.replicas.deployment import FAULTS, NODE, Deployment, answers, deployed, load, survive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestThreeReplicasOfTwoRanks:
    @pytest.fixture(scope="class")
    @classmethod
    def deployment(cls) -> Iterator[Deployment]:
        with deployed(3, branch_parallel_size=2) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, deployment: Deployment) -> dict[str, str]:
        return asyncio.run(answers(deployment.url))

    @pytest.mark.parametrize("fault", FAULTS)
    def test_no_request_is_lost(self, deployment: Deployment, expected: dict[str, str], fault: str):
        outcomes = survive(deployment, fault, random.Random(fault), expected)
        assert outcomes.wrong == []
        assert outcomes.counts["ok"] > 0
        if fault not in ("ingress", "node"):  # a node may have had no replica
            lost = deployment.metrics("lopa:lost_choices_total")
            assert lost
            assert all('engine="0"' in labels or 'outcome="' in labels for labels in lost)


def other_weights(folder: Path) -> Path:
    """The bundled model with 1 for 2 and 2 for 1: it answers otherwise."""
    shutil.copytree(DEMO_MODEL, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    one, two = vocabulary["1"], vocabulary["2"]
    rows = tensors["model.embed_tokens.weight"]
    rows[[one, two]] = rows[[two, one]]
    save_file(tensors, file)
    return folder


class TestTwoReplicas:
    @pytest.fixture(scope="class")
    @classmethod
    def deployment(cls) -> Iterator[Deployment]:
        with deployed(2) as running:
            yield running

    def test_an_upgrade_of_the_weights_loses_no_request(self, deployment: Deployment, tmp_path: Path):
        folder = other_weights(tmp_path / "demo")
        old = asyncio.run(answers(deployment.url))
        until = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            clients = threads.submit(lambda: asyncio.run(load(deployment.url, old, until, clients=8)))
            try:
                serve.run(build({"replicas": 2, "model": str(folder)}), name=APP)
                deployment.wait_until_whole()
            finally:
                until.set()
            outcomes = clients.result()
        new = asyncio.run(answers(deployment.url))
        assert new != old
        others = [text for text in outcomes.wrong if not text.startswith("wrong: another answer")]
        assert others == []
        texts = [text.removeprefix("wrong: another answer: ") for text in outcomes.wrong]
        assert set(texts) <= {repr(text) for text in new.values()}
        assert outcomes.counts["ok"] > 0
        assert outcomes.counts["event"] == 0

    def test_a_replica_that_is_scaled_down_ends_what_it_has(self, deployment: Deployment):
        expected = asyncio.run(answers(deployment.url))
        until = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            clients = threads.submit(lambda: asyncio.run(load(deployment.url, expected, until, clients=8)))
            try:
                deployment.replicas = 1
                model = serve.status().applications[APP].deployments
                assert "demo" in model
                serve.run(build({"replicas": 1}), name=APP)
                deployment.wait_until_whole()
            finally:
                until.set()
            outcomes = clients.result()
        assert [text for text in outcomes.wrong if "another answer" not in text] == []
        assert outcomes.counts["event"] == 0

    def test_several_models_answer_by_name(self, deployment: Deployment):
        deployment.replicas = 2
        second = {"served_model_name": "second", "max_model_len": 256, "replicas": 1, "max_replicas": 2}
        models = [{"served_model_name": "first"}, second]
        serve.run(build({"models": models}), name=APP)
        deployment.wait_until_whole()
        cards = httpx.get(f"{deployment.url}/v1/models").json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == {
            "first": cards[0]["max_model_len"],
            "second": 256,
        }
        body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        for name in ("first", "second"):
            answer = httpx.post(f"{deployment.url}/v1/chat/completions", json={**body, "model": name}, timeout=60)
            assert answer.json()["model"] == name
        unknown = httpx.post(f"{deployment.url}/v1/chat/completions", json={**body, "model": "third"}, timeout=60)
        assert unknown.status_code == 404
        assert "'first', 'second'" in unknown.json()["error"]["message"]
        samples = deployment.metrics("vllm:request_success_total")
        assert sum('model_name="first"' in labels and value == 1 for labels, value in samples.items()) == 1

    def test_a_checkpoint_that_cannot_be_loaded_ends_the_deployment(self, deployment: Deployment, tmp_path: Path):
        folder = tmp_path / "demo"
        shutil.copytree(DEMO_MODEL, folder)
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(RuntimeError) as error:
            serve.run(build({"model": str(folder)}), name=APP)
        assert "model.safetensors" in failure(str(error.value))
        assert serve.status().applications[APP].status == "DEPLOY_FAILED"


def test_ranks_of_different_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path.parent)  # Ray's processes look for modules where the test runs, too
    root = Path(__file__).parents[2]
    shutil.copytree(root / "lopa_ascend", tmp_path / "lopa_ascend", ignore=shutil.ignore_patterns("__pycache__"))
    init = tmp_path / "lopa_ascend/__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    one = {**NODE, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
    try:
        cluster.add_node(**one, env_vars={"PYTHONPATH": str(tmp_path)})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        serve.start(proxy_location="Disabled")
        with pytest.raises(RuntimeError) as error:
            serve.run(build({"branch_parallel_size": 2, "host": LOCALHOST}), name=APP)
        versions = r"rank 1 has lopa_ascend (9\.0|0)\.1\.0, and rank 0 has lopa_ascend (9\.0|0)\.1\.0; install the same"
        assert re.search(versions, failure(str(error.value)))
    finally:
        ray.shutdown()
        cluster.shutdown()
