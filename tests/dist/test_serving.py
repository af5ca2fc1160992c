"""What a server of several ranks says of itself, where it listens, and what it refuses."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import refused
from tests.listeners import check_loopback_alone

pytestmark = pytest.mark.multirank


def counted(server: ServerProcess, name: str) -> dict[str, float]:
    """A counter of /metrics, by purpose."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_total"]
    return {sample.labels.get("purpose", ""): sample.value for sample in samples}


def test_a_server_of_several_ranks_says_what_they_do() -> None:
    sizes = ("--tensor-parallel-size", "2", "--branch-parallel-size", "2")
    with running(*sizes, "--num-branches", "4", "--max-new-tokens", "64") as server:
        # HTTP, the store, and gloo of four ranks.
        check_loopback_alone([server.process.pid, *server.engines], at_least=6)
        greeting = server.greeting
        assert "ranks     tensor parallel 2 x branch parallel 2, 5 branches: 1 of 6 slots idle" in greeting
        places = [f"rank {n} (bp {n // 2}, tp {n % 2}) on {platform.node()} cpu: weights " for n in range(4)]
        assert all(place in greeting for place in places)
        backend = server.http.get("/server_info").json()["backend"]
        assert len(backend["ranks"]) == 4
        assert (backend["tensor_parallel_size"], backend["branch_parallel_size"]) == (2, 2)
        assert backend["kv_update"] == {"block_causal": "single-phase", "full": "two-phase"}

        body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        calls, steps = counted(server, "lopa:collective_calls"), counted(server, "lopa:steps")[""]
        assert steps == answer.json()["lopa"]["num_forwards"]
        assert calls["branches"] == steps
        assert calls["layers"] == 2 * 12 * steps
        assert "kv" not in calls
        assert counted(server, "lopa:collective_bytes")["branches"] % 12 == 0
        assert counted(server, "lopa:idle_rows")[""] >= 1  # the first pass has one branch for two groups

        wide = {**body, "temperature": 1.0, "top_k": 257}
        assert refused(server.http.post("/v1/chat/completions", json=wide))["param"] == "top_k"
        assert server.http.post("/v1/chat/completions", json={**wide, "top_k": 256}).status_code == 200

        def texts(form: dict[str, str]) -> str:
            answer = server.http.post("/v1/chat/completions", json={**body, **form})
            return str(answer.json()["choices"][0]["message"]["content"])

        # Rank 0 says when the ranks, each of which compiles the grammars by itself, begin a request.
        forms = [{}, *({"guided_regex": f"[0-9]{{{n}}}"} for n in (2, 3, 5)), {}]
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(texts, forms))
        assert found[0] == found[-1] == answer.json()["choices"][0]["message"]["content"]
        assert [len(text) for text in found[1:-1]] == [2, 3, 5]
