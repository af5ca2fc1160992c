"""The self-test of a GPU: what it computes, and how fast. `python -m scripts.selftest --device cuda` runs it."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from lopa_ascend import LLM, DecodingParams, __version__
from lopa_ascend.backend.cuda.graphs import Capture
from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.memory import is_out_of_memory
from lopa_ascend.config import GraphParams
from lopa_ascend.model.base import SplitModel
from scripts.bench.prompts import text_prompts
from scripts.selftest.gpu_kernels import DREAM_7B, Measured, Sizes, cases, examine, measure
from scripts.selftest.gpu_steps import SHAPES, RandomStep, Shape, StepCase, random_model, time_step
from tests import golden

SECONDS = 300.0
"""After so many seconds no further step is begun."""
MOST_TOKENS = 16384
"""Tokens of the largest step that is timed."""
PROBLEMS = 8
STEPS = tuple(
    StepCase(requests, lookaheads, prompt)
    for prompt, requests, lookaheads in itertools.product((512, 4096), (1, 8, 32), (7, 0, 3, 14))
)
"""The first one is that of the aim of 8 ms."""


@dataclass(frozen=True)
class Plan:
    """How much is examined; by default everything."""

    sizes: Sizes = DREAM_7B
    shapes: tuple[tuple[str, Shape], ...] = tuple(SHAPES.items())
    steps: tuple[StepCase, ...] = STEPS
    dtype: torch.dtype = torch.bfloat16
    graph_modes: tuple[str, ...] = ("cuda_graphs", "eager")
    goldens: tuple[str, ...] = tuple(case for case in golden.CASES if case != golden.MASK_CHOSEN)
    problems: int = PROBLEMS
    """Of the bundled model."""
    seconds: float = SECONDS


def examine_gpu(ops: Ops, capture: Capture, plan: Plan) -> dict[str, Any]:
    """Everything that is known of a GPU afterwards, for JSON."""
    begin = time.monotonic()
    measured = measure(ops, capture, plan.sizes)
    report: dict[str, Any] = {"stack": _stack(ops), "measured": asdict(measured), "kernels": [], "left_out": []}
    for case in cases(ops, plan.sizes):
        _announce(case.name)
        report["kernels"].append(examine(case, capture, measured))
    report["goldens"] = {mode: _wrong_goldens(mode, plan.goldens) for mode in plan.graph_modes}
    report["bundled"] = [_decode_bundled(k, plan) for k in (0, 7)] if plan.problems else []
    report["neighbours"] = _neighbours(plan) if plan.problems else None
    report["steps"] = list(_steps(ops, capture, measured, plan, begin + plan.seconds, report["left_out"]))
    report["seconds"] = time.monotonic() - begin
    return report


def failures(report: dict[str, Any]) -> list[str]:
    """What is wrong with a GPU, by its report."""
    found = [f"{kernel['kernel']} computes something else" for kernel in report["kernels"] if kernel["verdict"] != "ok"]
    found += [f"{case} differs in {mode}" for mode, cases in report["goldens"].items() for case in cases]
    return found + [f"{step['name']}: graph and eager differ" for step in report["steps"] if not step["equal"]]


def report_text(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [", ".join(f"{name} {value}" for name, value in report["stack"].items())]
    lines.append(
        "{:.2f} TB/s copied, {:.0f} TFLOP/s bf16, {:.0f} TOP/s int8".format(
            *(value / 1e12 for value in report["measured"].values())
        )
    )
    lines += _table(
        ("kernel", "verdict", "error", "us", "floor us", "of the floor"),
        (
            (k["kernel"], k["verdict"], f"{k['error']:.1e}", f"{k['us']:.1f}", f"{k['floor_us']:.1f}", _share(k, "us"))
            for k in report["kernels"]
        ),
    )
    lines += _table(
        ("step", "graph = eager", "ms", "floor ms", "of the floor", "host ms", "kernels ms"),
        (
            (
                s["name"], str(s["equal"]), f"{s['ms']:.2f}", f"{s['floor_ms']:.2f}", _share(s, "ms"),
                f"{s['host_ms']:.2f}", f"{s.get('kernels_ms', 0):.2f}",
            )
            for s in report["steps"]
        ),
    )  # fmt: skip
    lines += [f"golden traces that differ in {mode}: {len(cases)}" for mode, cases in report["goldens"].items()]
    lines += [
        f"bundled model, k = {b['k']}: {b['tokens_per_second']:.0f} tokens/s at TPF {b['tpf']:.1f}"
        for b in report["bundled"]
    ]
    if report["neighbours"] is not None:
        lines.append(f"answers that differ beside others: {report['neighbours']} of {PROBLEMS}")
    lines += [f"left out: {name}" for name in report["left_out"]]
    return "\n".join([*lines, *(f"WRONG: {failure}" for failure in failures(report))])


def _share(row: dict[str, Any], unit: str) -> str:
    return f"{100 * row[f'floor_{unit}'] / row[unit]:.0f} %"


def _table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> list[str]:
    table = [tuple(headings), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _announce(name: str) -> None:
    """Says on stderr what comes next: it is not lost where the GPU hangs."""
    sys.stderr.write(f"{name}\n")
    sys.stderr.flush()


def _stack(ops: Ops) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    found = {"lopa_ascend": __version__, **versions}
    if ops.device.type == "cuda":
        device = torch.get_device_module("cuda").get_device_properties(ops.device)
        found |= {"CUDA": str(torch.version.cuda), "GPU": device.name, "GiB": f"{device.total_memory / 2**30:.0f}"}
    return found


# ---- whole engines ---------------------------------------------------------------------------------------------------


def _wrong_goldens(graph_mode: str, chosen: Sequence[str]) -> list[str]:
    """The recorded traces of the published code that are decoded otherwise, in float32."""
    wrong = []
    for (name, attention, confidence), of_kind in golden.cases_by_kind().items():
        traces = {case: golden.read(case) for case in of_kind if case in chosen}
        params = {case: golden.decoding_params(trace) for case, trace in traces.items()}
        if not traces:
            continue
        _announce(f"goldens of {name}, {graph_mode}")
        with LLM(
            golden.FOLDER / "models" / name,
            device="cuda",
            dtype="float32",
            graph_mode=graph_mode,
            enable_prefix_caching=False,
            max_num_seqs=1,
            graph_params=GraphParams(
                max(p.lookaheads for p in params.values()),
                max(p.block_size for p in params.values()),
                window_attention=attention,
                confidence=confidence,
            ),
        ) as llm:
            for case, trace in traces.items():
                output = llm.generate([trace["prompt_ids"]], params[case], quiet=True)[0]
                if list(output.token_ids) != trace["output_ids"]:
                    wrong.append(case)
    return wrong


def _decode_bundled(lookaheads: int, plan: Plan) -> dict[str, Any]:
    """Tokens a second and tokens per forward pass of the bundled model, one request at a time."""
    _announce(f"bundled model, k = {lookaheads}")
    with LLM(device="cuda", graph_mode=plan.graph_modes[0], dtype="auto") as llm:
        params = DecodingParams(decoding="lopa" if lookaheads else "d2f", num_branches=lookaheads)
        prompts = text_prompts(llm, plan.problems)
        llm.generate(prompts[:1], params, quiet=True)
        begin = time.perf_counter()
        outputs = [llm.generate([prompt], params, quiet=True)[0] for prompt in prompts]
        taken = time.perf_counter() - begin
    tokens, passes = sum(len(o.token_ids) for o in outputs), sum(o.num_forwards for o in outputs)
    return {"k": lookaheads, "tokens_per_second": tokens / taken, "tpf": tokens / passes}


def _neighbours(plan: Plan) -> int:
    """How many answers of the bundled model have other tokens among others than alone."""
    _announce("neighbours")
    with LLM(device="cuda", graph_mode=plan.graph_modes[0]) as llm:
        prompts = text_prompts(llm, plan.problems)
        alone = [llm.generate([prompt], quiet=True)[0].token_ids for prompt in prompts]
        together = [output.token_ids for output in llm.generate(prompts, quiet=True)]
    return sum(a != b for a, b in zip(alone, together, strict=True))


# ---- steps -----------------------------------------------------------------------------------------------------------


def _steps(
    ops: Ops, capture: Capture, measured: Measured, plan: Plan, end: float, left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """The times of all steps, until ``end``."""
    for (model_name, shape), is_int8 in itertools.product(plan.shapes, (False, True)):
        format_name = "W8A8" if is_int8 else "bf16"
        if time.monotonic() > end:
            left_out.append(f"{model_name} {format_name}: no time")
            continue
        model = random_model(shape, ops, plan.dtype, is_int8=is_int8)
        for case in plan.steps:
            name = f"{model_name} {format_name}, {case.requests} x k = {case.lookaheads}, prompt {case.prompt}"
            tokens = case.bucket(0).tokens
            if tokens > MOST_TOKENS or time.monotonic() > end:
                left_out.append(f"{name}: {f'{tokens} tokens' if tokens > MOST_TOKENS else 'no time'}")
                continue
            _announce(name)
            found = _time_unless_full(model, case, capture, measured)
            if found is None:
                left_out.append(f"{name}: no memory")
            else:
                yield {"name": name, **found}
        del model


def _time_unless_full(model: SplitModel, case: StepCase, capture: Capture, measured: Measured) -> dict[str, Any] | None:
    """What is found about a step; None if the GPU has no memory for it."""
    try:
        return time_step(RandomStep(model, case), capture, measured)
    except (RuntimeError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        return None
