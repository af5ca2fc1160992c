"""Whole engines on a GPU: recorded traces, the bundled model beside the CPU, a server, and two GPUs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import GraphParams
from lopa_ascend.parallel.collectives import RankError
from scripts.bench.prompts import text_prompts
from scripts.selftest.gpu import SERVED, Plan
from scripts.selftest.hour import LEFT_OUT, WRONG, Report, Row
from tests import golden

NEAR = 1e-3
"""Margins of decisions in float32 that sums in another order may turn."""
DEVICE = "cuda"
MODES = ("cuda_graphs", "eager")
PROBLEMS = 8
"""Of the bundled model, on two GPUs."""
TIMEOUT = 20
"""Seconds after which ranks give up one that is dead."""
START = 60.0
GZIP = b"\x1f\x8b"


def engines(plan: Plan, found: Report) -> Iterator[Row]:
    for mode in MODES:
        yield from goldens(mode, plan.goldens)
    yield from bundled(plan.problems)


def goldens(mode: str, chosen: Sequence[str]) -> Iterator[Row]:
    """The recorded traces of the published code, in float32; of those that differ the first pass, with its margin."""
    count = 0
    for (name, attention, confidence), of_kind in golden.cases_by_kind().items():
        traces = {case: golden.read(case) for case in of_kind if case in chosen}
        params = {case: golden.decoding_params(trace) for case, trace in traces.items()}
        if not traces:
            continue
        compiled = GraphParams(
            max(p.lookaheads for p in params.values()),
            max(p.block_size for p in params.values()),
            window_attention=attention,
            confidence=confidence,
        )
        model = str(golden.FOLDER / "models" / name)
        options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False, "max_num_seqs": 1}
        with LLM(model, device=DEVICE, graph_mode=mode, graph_params=compiled, **options) as llm:
            for case, trace in traces.items():
                output = llm.generate([trace["prompt_ids"]], params[case], trace=True, quiet=True)[0]
                count += 1
                yield from _different(f"{case}, {mode}", output, golden.rounds(trace), params[case].tau_conf)
    yield {"name": f"golden traces, {mode}", "decoded": count}


def _different(name: str, output: Any, recorded: list[Row], tau_conf: float) -> Iterator[Row]:
    """A row for an output that decides otherwise than recorded; a near-tie is no fault."""
    if difference := golden.first_difference(golden.rounds_of(output), recorded, tau_conf):
        yield {"name": name, **difference, "verdict": "near-tie" if difference["margin"] < NEAR else WRONG}


def bundled(problems: int) -> Iterator[Row]:
    """The bundled model decodes what it decodes on the CPU, alone and together."""
    params = DecodingParams(decoding="lopa", num_branches=7)
    with LLM(device="cpu", dtype="float32", graph_mode="eager") as llm:
        prompts = text_prompts(llm, problems)
        expected = llm.generate(prompts, params, trace=True, quiet=True)
    for mode in MODES:
        with LLM(device=DEVICE, dtype="float32", graph_mode=mode, graph_params=GraphParams(7)) as llm:
            begin = time.perf_counter()
            alone = [llm.generate([prompt], params, trace=True, quiet=True)[0] for prompt in prompts]
            taken = time.perf_counter() - begin
            together = llm.generate(prompts, params, trace=True, quiet=True)
        for how, outputs in (("alone", alone), ("together", together)):
            for number, (output, other) in enumerate(zip(outputs, expected, strict=True)):
                name = f"problem {number} {how}, {mode}"
                yield from _different(name, output, golden.rounds_of(other), params.tau_conf)
        tokens, passes = sum(len(o.token_ids) for o in alone), sum(o.num_forwards for o in alone)
        yield {"name": f"bundled model, {mode}", "tokens/s": tokens / taken, "TPF": tokens / passes}


def served(plan: Plan, found: Report) -> Iterator[Row]:
    """A server starts, streams an answer, records a profile, and ends by SIGTERM."""
    if missing := [name for name in SERVED if find_spec(name) is None]:
        yield {"name": "server", "verdict": LEFT_OUT, "message": f"needs {', '.join(missing)}"}
        return
    with closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    command = [sys.executable, "-m", "lopa_ascend.serve", *plan.server, "--port", url.rpartition(":")[2]]
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        command += ["--profile-dir", folder]
        log = Path(folder, "log")
        with log.open("w") as stderr:
            started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            while not _answers(f"{url}/health"):
                if started.poll() is not None or time.monotonic() > begin + START:
                    said = log.read_text().strip().splitlines()[-1:]
                    yield {"name": "start", "verdict": "failed", "message": f"no answer on /health: {said}"}
                    return
                time.sleep(0.2)
            yield {"name": "start", "s": time.monotonic() - begin}
            yield from _asked(url, Path(folder))
            started.send_signal(signal.SIGTERM)
            status = started.wait(30)
            yield {"name": "SIGTERM", "exit status": status, "verdict": "ok" if status == 0 else WRONG}
        finally:
            started.kill()


def _asked(url: str, folder: Path) -> Iterator[Row]:
    """What a server that runs says of itself and to a request."""
    info = json.loads(_get(f"{url}/server_info"))
    yield {"name": "server_info", "says": info}
    _get(f"{url}/start_profile", {})
    question = {"role": "user", "content": "What is 2 + 3?"}
    asked = {"messages": [question], "max_completion_tokens": 64, "stream": True}
    events = [line for line in _get(f"{url}/v1/chat/completions", asked).splitlines() if line.startswith("data: ")]
    yield {"name": "stream", "events": len(events), "verdict": "ok" if events[-1:] == ["data: [DONE]"] else WRONG}
    traces = json.loads(_get(f"{url}/stop_profile", {}))["traces"]
    texts = [(folder / trace).read_bytes() for trace in traces]
    kernels = sum((gzip.decompress(text) if text[:2] == GZIP else text).count(b'"cat": "kernel"') for text in texts)
    yield {"name": "profile", "traces": len(traces), "kernels": kernels}


def _get(url: str, body: Row | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _answers(url: str) -> bool:
    try:
        _get(url)
    except OSError:  # urllib's errors are among these
        return False
    return True


def two_gpus(plan: Plan, found: Report) -> Iterator[Row]:
    """Two GPUs decode what one decodes, an engine of two closes, and the death of a rank ends a request."""
    count = next((row["count"] for row in found.get("machine", ()) if "count" in row), 0)
    if count < 2:
        yield {"name": "two GPUs", "verdict": LEFT_OUT, "message": f"this machine has {count}"}
        return
    params = DecodingParams(decoding="lopa", num_branches=7)
    with LLM(device=DEVICE, dtype="float32", graph_params=GraphParams(7)) as llm:
        prompts = text_prompts(llm, PROBLEMS)
        expected = llm.generate(prompts, params, trace=True, quiet=True)
    for flag in ("branch_parallel_size", "tensor_parallel_size"):
        options: dict[str, Any] = {flag: 2, "distributed_timeout_seconds": TIMEOUT, "graph_params": GraphParams(7)}
        with LLM(device=DEVICE, dtype="float32", **options) as llm:
            outputs = llm.generate(prompts, params, trace=True, quiet=True)
            begin = time.monotonic()
        yield {"name": f"{flag} 2 closes", "s": time.monotonic() - begin}
        for number, (output, other) in enumerate(zip(outputs, expected, strict=True)):
            yield from _different(f"{flag} 2, problem {number}", output, golden.rounds_of(other), params.tau_conf)
    llm = LLM(device=DEVICE, branch_parallel_size=2, distributed_timeout_seconds=TIMEOUT)
    threading.Timer(1.0, kill_children).start()
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 2 * TIMEOUT:
            llm.generate(prompts, quiet=True)
    except RankError as error:
        taken = time.monotonic() - begin
        row = {"name": "a follower dies", "s": taken, "message": str(error)[:200]}
        yield row | {"verdict": WRONG if taken > 2 * TIMEOUT else "ok"}
    else:
        yield {"name": "a follower dies", "verdict": WRONG, "message": "requests go on without it"}
    llm.close()


def kill_children() -> None:
    """Kills the processes that this one has started."""
    for file in Path("/proc/self/task").glob("*/children"):
        for child in file.read_text().split():
            os.kill(int(child), signal.SIGKILL)
