"""What the self-test of a GPU looks at, in the order in which it decides whether the rest means anything."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lopa_ascend import __version__
from lopa_ascend.backend.cuda import DEVICE
from lopa_ascend.backend.cuda.graphs import Capture, StreamCapture
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import EngineConfig, ModelConfig
from scripts.bench.machine import versions_of
from scripts.bench.plan.devices import Range, known_devices, load_device
from scripts.bench.plan.models import load_model
from scripts.selftest.hour import LEFT_OUT, REFUSALS, WRONG, Report, Row, Step, shortened
from tests import golden
from tests.cuda.cases import MOST, Random, attention_case, cases
from tests.kernel_cases import DREAM_7B, Case, Sizes, error_of

CALLS = 56
"""Calls in a graph that is timed."""
SETS = 4
"""Inputs that take turns there: what one call has read is not in the cache when it is read again."""
L2_BYTES = 48 * 2**20
ALIKE = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bf16"}
ENGINES = ("llguidance", "msgspec", "regex", "tokenizers", "safetensors", "jinja2")
"""Modules that whole engines import beside torch, Triton and NumPy. Steps of random models need msgspec of these."""
SERVED = (*ENGINES, "fastapi", "fastapi_offline", "uvicorn", "httptools", "pydantic", "zmq", "prometheus_client")


@dataclass(frozen=True)
class Plan:
    """How much is looked at; by default everything."""

    sizes: Sizes = DREAM_7B
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    model: ModelConfig = field(default_factory=partial(load_model, "Dream-7B"))
    """Of random weights."""
    layers: int = 2
    """Of what is captured to be compared, and to see what memory it takes."""
    dtype: torch.dtype = torch.bfloat16
    copied: int = 2**30
    """Bytes of the copy that measures the bandwidth."""
    side: int = 8192
    """Of the square matrices whose product measures the rates."""
    goldens: tuple[str, ...] = tuple(case for case in golden.CASES if case != golden.MASK_CHOSEN)
    problems: int = 8
    """Of the bundled model."""
    server: tuple[str, ...] = ("--device", "cuda")
    rows: tuple[int, ...] = (64, 512)
    """Of the products that candidates are compared with."""
    steps: tuple[tuple[int, int], ...] = ((7, 640), (7, 4224), (0, 640), (3, 640))
    """Lookahead branches, and keys, whole pages."""
    block: int = 32
    keys: int = 640
    """Of the other steps."""
    few_sequences: int = 4
    """Of the engine whose steps are compared."""
    most_sequences: int = 64
    most_blocks: int = EngineConfig.graph_window_blocks
    """Of the one whose buckets are captured in two orders."""


Part = Callable[[Plan, Report], Iterator[Row]]


def capture_of(ops: Ops) -> Capture:
    """The graphs of a GPU."""
    return StreamCapture()


def opened() -> Ops:
    """The ops of this machine's first GPU."""
    return DEVICE.load_ops(EngineConfig(device="cuda"))


# ---- the machine and its kernels -------------------------------------------------------------------------------------


def machine(plan: Plan, found: Report) -> Iterator[Row]:
    """Versions, driver, compiler, memory, tools and what else engines import."""
    versions = versions_of(("torch", "triton", "numpy", "nvidia-nccl-cu13", "nvidia-nccl-cu12"))
    yield {"name": "versions", "lopa_ascend": __version__, "python": sys.version.split()[0], **versions}
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    header = Path(sysconfig.get_path("include"), "Python.h").exists()
    yield {"name": "for Triton's first launch", "C compiler": compiler is not None, "Python.h": header}
    yield {"name": "tools", **{tool: shutil.which(tool) is not None for tool in ("nvidia-smi", "ncu", SANITIZER)}}
    yield {"name": "missing modules", "names": [name for name in SERVED if find_spec(name) is None]}
    query = "--query-gpu=name,driver_version,memory.used,power.limit,clocks.sm,clocks.max.sm,ecc.mode.current"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
        yield {"name": "nvidia-smi", "GPUs": lines}
    ops = opened()
    if ops.device.type == "cuda":
        cuda = torch.get_device_module("cuda")
        gpu, (free, total) = cuda.get_device_properties(ops.device), cuda.mem_get_info()
        row: Row = {"name": "GPU", "is": gpu.name, "count": cuda.device_count(), "CUDA": str(torch.version.cuda)}
        row |= {"capability": f"{gpu.major}.{gpu.minor}", "SMs": gpu.multi_processor_count}
        l2 = getattr(gpu, "L2_cache_size", 0)
        yield row | {"free GiB": free / 2**30, "GiB": total / 2**30, "L2 MiB": l2 / 2**20}


def kernels(plan: Plan, found: Report) -> Iterator[Row]:
    """Every kernel once, up to the first wrong one. What it does not write is poison."""
    ops = opened()
    pairs = ((each, case) for each in plan.dtypes for case in cases(ops, plan.sizes, each))
    for dtype, case in pairs:
        with _poisoned():
            share = error_of(case, case.run())
        most = MOST[dtype] if case.most is None else case.most
        verdict = "ok" if share <= most else WRONG
        yield {"name": f"{case.name}, {ALIKE[dtype]}", "error": share, "most": most, "verdict": verdict}
        if verdict == WRONG:
            return


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fills new tensors with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


SANITIZER = "compute-sanitizer"
RUN = "from tests.kernel_cases import {0}; from scripts.selftest.gpu import run_all; run_all({0})"
"""Code of a process that a tool looks at."""


def sanitizer(plan: Plan, found: Report) -> Iterator[Row]:
    """Every kernel at ragged shapes under memcheck, in a process of its own."""
    if not (tool := shutil.which(SANITIZER)):
        yield {"name": SANITIZER, "verdict": LEFT_OUT, "message": "not installed; CUDA's toolkit has it"}
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", RUN.format("RAGGED")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = {"name": "memcheck", "exit code": done.returncode, "says": " ".join(done.stdout.splitlines()[-2:])}
    yield row | {"verdict": WRONG if done.returncode else "ok"}


def run_all(sizes: Sizes) -> None:
    """Runs every kernel once."""
    for case in cases(opened(), sizes, torch.bfloat16):
        case.run()
    torch.get_device_module("cuda").synchronize()


# ---- rates -----------------------------------------------------------------------------------------------------------


def seconds_of(ops: Ops, runs: Sequence[Callable[[], Any]]) -> float:
    """Seconds of a call, of CALLS in a captured graph that take turns. Its pool of memory is its own: one whose graphs
    are all destroyed cannot be used again while a block of it lives."""
    capture, device = capture_of(ops), ops.device

    def launch() -> Tensor:
        results = [None]
        for run in itertools.islice(itertools.cycle(runs), CALLS):
            results[0] = run()
        return torch.zeros(1, device=device)

    capture.warm_up(launch)
    replay, _ = capture.capture(launch)
    replay()
    return timed(replay, capture, device) / CALLS


def timed(run: Callable[[], object], capture: Capture, device: torch.device) -> float:
    """Seconds that the device takes for what is launched, by its own clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    capture.wait()
    first, last = (torch.get_device_module("cuda").Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    taken: float = first.elapsed_time(last)
    return taken / 1000


def ceilings(plan: Plan, found: Report) -> Iterator[Row]:
    """What this GPU reaches, on random numbers; then every kernel beside its floor by these rates."""
    ops = opened()
    device, random, side = ops.device, Random(ops.device, plan.dtype, 0), plan.side
    if known := known_device(found):
        low = known.low
        peaks = {"TB/s": low.reachable_bandwidth, "bf16 peak TFLOP/s": low.bf16_flops, "int8 peak": low.int8_flops}
        yield {"name": "data sheet", **{name: value / 1e12 for name, value in peaks.items()}}
    sources = [torch.empty(plan.copied, dtype=torch.int8, device=device).random_() for _ in range(2)]
    copies = [partial(sources[index].copy_, sources[1 - index]) for index in range(2)]
    bandwidth = 2 * plan.copied / seconds_of(ops, copies)
    yield {"name": "copy", "TB/s": bandwidth / 1e12}
    del sources, copies
    pairs = [(random.normal(side, side), random.normal(side, side)) for _ in range(SETS)]
    rates, operations = {}, 2.0 * side**3
    for name, make in (("bf16", _float_product), ("int8", _int8_product), ("fp8", _fp8_product)):
        try:
            taken = seconds_of(ops, [make(*pair) for pair in pairs])
        except REFUSALS as error:
            yield {"name": name, "verdict": LEFT_OUT, "message": shortened(error)}
            continue
        rates[name] = operations / taken
        yield {"name": name, "TFLOP/s": rates[name] / 1e12}
    held = torch.empty(min(L2_BYTES, plan.copied) // 4, dtype=torch.int32, device=device).random_()
    read = held.nbytes / seconds_of(ops, [partial(torch.amax, held.view(-1, 64), 1)])
    yield {"name": "L2, read by a reduction", "TB/s": read / 1e12}
    del pairs, held
    for alike in zip(*(cases(ops, plan.sizes, plan.dtype, seed) for seed in range(SETS)), strict=True):
        if not alike[0].num_bytes:
            continue
        yield _beside_floor(alike, seconds_of(ops, [case.run for case in alike]), bandwidth, rates)


def _float_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return partial(torch.mm, x, weight.t())


def _int8_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    codes, others = ((24 * each).round().clamp(-127, 127).to(torch.int8) for each in (x, weight))
    return partial(torch._int_mm, codes, others.t())


def _fp8_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """With a scale for each row and each output."""
    codes, others = (each.to(torch.float8_e4m3fn) for each in (x, weight))
    scales = [torch.rand(len(each), 1, device=x.device) for each in (x, weight)]
    multiply = partial(torch._scaled_mm, codes, others.t(), out_dtype=torch.bfloat16)
    return partial(multiply, scale_a=scales[0], scale_b=scales[1].t())


def _beside_floor(alike: Sequence[Case], taken: float, bandwidth: float, rates: dict[str, float]) -> Row:
    case = alike[0]
    by_rate = case.operations / rates[case.rate] if case.operations and case.rate in rates else 0.0
    floor = max(case.num_bytes / bandwidth, by_rate)
    return {"name": case.name, "us": 1e6 * taken, "floor us": 1e6 * floor, "of the floor": floor / taken}


def known_device(found: Report) -> Range | None:
    """What the planner knows of this GPU."""
    name = next((str(row["is"]) for row in found.get("machine", ()) if row["name"] == "GPU"), "")
    key = next((key for key in known_devices() if key in name.lower().replace(" ", "")), None)
    return load_device(key) if key else None


# ---- choices ---------------------------------------------------------------------------------------------------------


def choices(plan: Plan, found: Report) -> Iterator[Row]:
    """Candidates beside one another: int8 products by the own kernel and by cuBLAS with scales after it, fp8 with
    scales inside it, and bf16; and tiles of attention."""
    ops = opened()
    s = plan.sizes
    queries = s.heads * s.dim
    shapes = {"qkv": (s.hidden, queries + 2 * s.kv_heads * s.dim), "o": (queries, s.hidden)}
    shapes |= {"gate_up": (s.hidden, 2 * s.inner), "down": (s.inner, s.hidden)}
    for tokens, (name, (inputs, outputs)) in itertools.product(plan.rows, shapes.items()):
        random = Random(ops.device, plan.dtype, 0)
        pairs = [(random.normal(tokens, inputs), random.normal(outputs, inputs)) for _ in range(SETS)]
        row: Row = {"name": f"{name}, {tokens} tokens, us"}
        for kind, make in (
            ("bf16", _float_product),
            ("int8, own", partial(_own_int8, ops)),
            ("int8, _int_mm alone", _int8_product),
            ("int8, _int_mm and scales", _scaled_int8),
            ("fp8, _scaled_mm", _fp8_product),
        ):
            try:
                row[kind] = 1e6 * seconds_of(ops, [make(*pair) for pair in pairs])
            except REFUSALS as error:
                row[kind] = f"refused: {shortened(error)}"
        yield row
    yield from _attentions(plan, ops)


def _attentions(plan: Plan, ops: Ops) -> Iterator[Row]:
    """Attention of one request with 8 branches, and of many, by what the ops choose and by what they could."""
    from lopa_ascend.backend.cuda import ops as chosen

    for alternative in ({}, {"QUERY_ROWS": 64}, {"QUERY_ROWS": 128}, {"FEW_PROGRAMS": 0}):
        known = {name: value for name, value in alternative.items() if getattr(chosen, name, value) != value}
        if len(known) < len(alternative):  # these ops have no such choice, or make it
            continue
        row: Row = {"name": f"attention, us, {known or 'as it is served'}"}
        with mock.patch.dict(vars(chosen), known):
            for branches, requests in ((8, 1), (1, plan.sizes.sequences)):
                name = f"{requests} x {branches} branches"
                randoms = [Random(ops.device, plan.dtype, seed) for seed in range(SETS)]
                alike = [attention_case(ops, plan.sizes, random, name, requests, branches) for random in randoms]
                row[name] = 1e6 * seconds_of(ops, [case.run for case in alike])
        yield row


def _own_int8(ops: Ops, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    (codes, scale), (others, by_output) = ops.quantize(x), ops.quantize(weight)
    return partial(ops.quant_linear, codes, scale, ops.stored(others), by_output, None, x.dtype)


def _scaled_int8(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    product, rows = _int8_product(x, weight), torch.rand(len(x), 1, device=x.device)
    columns = torch.rand(len(weight), device=x.device)
    return lambda: (product() * columns).mul_(rows).to(x.dtype)


COUNTERS = (
    "lts__t_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "gpu__time_duration.sum",
)
HEAVIEST = "regex:multiply_int8|attend|norm_rows"


def counters(plan: Plan, found: Report) -> Iterator[Row]:
    """L2 and tensor pipes of the heaviest kernels, by ncu."""
    if not (tool := shutil.which("ncu")):
        yield {"name": "ncu", "verdict": LEFT_OUT, "message": "not installed; Nsight Compute has it"}
        return
    options = ["--clock-control", "none", "--metrics", ",".join(COUNTERS), "--launch-count", "12"]
    command = [tool, *options, "--kernel-name", HEAVIEST, sys.executable, "-c", RUN.format("DREAM_7B")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = [line.strip() for line in done.stdout.splitlines() if "__" in line or "(" in line]
    yield {"name": "ncu", "exit code": done.returncode, "lines": shown[:60]}


# ---- the order -------------------------------------------------------------------------------------------------------


def later(module: str, name: str) -> Part:
    """A part of a module that needs more than torch, Triton and NumPy, and is imported where it runs."""

    def part(plan: Plan, found: Report) -> Iterator[Row]:
        rows: Iterator[Row] = getattr(import_module(f"scripts.selftest.{module}"), name)(plan, found)
        return rows

    return part


ORDER: tuple[tuple[str, float, bool, str, Part], ...] = (
    ("machine", 40, True, "a GPU of capability 8.0 or newer, a C compiler, Python.h", machine),
    ("kernels", 150, True, "errors of at most 1 % in bf16, and of 0.01 % in float32", kernels),
    ("sanitizer", 90, True, "no error", sanitizer),
    ("ceilings", 90, False, "a copy as on the data sheet, bf16 at 80 % of its peak", ceilings),
    ("captures", 60, True, "the bits of the same step op by op", later("steps", "captures")),
    ("engines", 150, False, "the recorded tokens, and those of the CPU", later("engines", "engines")),
    ("buckets", 60, False, "clearly less memory in descending order", later("steps", "buckets")),
    ("steps", 150, False, "the milliseconds that are predicted before each", later("steps", "steps")),
    ("choices", 90, False, "int8 by the own kernel as fast as bf16, fp8 1.5 times as fast", choices),
    ("counters", 45, False, "int8 and attention bound by L2, not by tensor pipes", counters),
    ("server", 90, False, "an answer in a stream, and exit status 0", later("engines", "served")),
    ("two GPUs", 150, False, "the tokens of one GPU, and RankError where a rank dies", later("engines", "two_gpus")),
)
"""Name, seconds at most, whether what follows needs it, what is expected, and what it does."""
SHORT = ("machine", "kernels", "ceilings", "captures", "engines", "steps")
"""What decides whether a GPU is usable, and how fast."""


def first_hour(plan: Plan) -> list[Step]:
    """Everything in its order, about eight minutes with one GPU."""
    return [Step(name, limit, text, partial(run, plan), needed) for name, limit, needed, text, run in ORDER]
