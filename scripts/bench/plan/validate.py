"""Predictions beside what others have published: rows of the LoPA paper, and steps of Qwen3-8B.

A row of the paper needs its tokens per forward pass, which it has for S12 and S18 alone. The steps of Qwen3-8B leave
out the host: their graphs take KV lengths from the device, and their engine is another one. Bandwidth and fixed costs
of attention and small kernels of the 910C were fitted to these steps, and nothing to the paper's rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from scripts.bench.plan.devices import load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import predict
from scripts.bench.plan.tasks import Workload
from scripts.bench.tables import table

PAPER, MEASURED = (Path(__file__).with_name(name) for name in ("paper.json", "measured.json"))
WINDOW = 128
"""Positions of a window: 4 blocks of 32. Assumed; the paper does not say how many blocks are open."""
CONTEXT = 1024
"""Few-shot prompt and committed blocks. Assumed; the term is small."""


def read_paper() -> dict[str, Any]:
    """The content of paper.json."""
    return read_json_object(PAPER, ValueError)


def paper_rows() -> list[dict[str, Any]]:
    """The rows whose tokens per forward pass are published: milliseconds of a step, published and predicted, and
    tokens/s predicted over published. One request, one branch on each group of ranks."""
    paper, found = read_paper(), []
    names = ("setting", "model", "task")
    speeds = {tuple(row[name] for name in names): row["avg_tps"] for row in paper["rows"]}
    for row in paper["tokens_per_forward"]:
        setting = next(each for name, each in paper["settings"].items() if name.endswith(f"-{row['setting']}"))
        sizes = {name: setting[name] for name in ("precision", "tp", "bp")}
        work = Workload(**sizes, k=setting["bp"] - 1, window=WINDOW, context=CONTEXT, tpf=row["tpf"])
        steps = predict(load_model("Dream-7B"), load_device(setting["device"]), work)
        low, high = (1000 * step.step for step in steps.values())
        published = 1000 * row["tpf"] / speeds[tuple(row[name] for name in names)]
        found.append(
            {
                "row": " ".join(row[name] for name in names).replace("D2F-Dream-", ""),
                "published, ms": f"{published:.1f}",
                "predicted, ms": f"{low:.1f} to {high:.1f}",
                "tokens/s, times the published": f"{published / high:.2f} to {published / low:.2f}",
            }
        )
    return found


def measured_steps() -> list[dict[str, Any]]:
    """Milliseconds of each measured step of a token, and of its prediction."""
    data, found = read_json_object(MEASURED, ValueError), []
    model, devices = load_model(data["model"]), load_device(data["device"])
    for row in data["rows"]:
        work = Workload(precision=row["precision"], tp=row["tp"], k=0, window=1, block=1, context=data["context"])
        low, high = (1000 * step.device for step in predict(model, devices, work).values())
        found.append(
            {
                "step": f"{row['precision']}, tp {row['tp']}",
                "measured, ms": f"{row['step_ms']:.2f}",
                "predicted, ms": f"{low:.1f} to {high:.1f}",
            }
        )
    return found


def validate() -> str:
    """Both as tables in Markdown."""
    return "\n\n".join(table([*rows[0]], (row.values() for row in rows)) for rows in (measured_steps(), paper_rows()))
