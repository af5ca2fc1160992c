"""Makes the table of docs/cuda.md of what fits on which GPU.

    python -m ci.card_table            print the table
    python -m ci.card_table --write    put it into docs/cuda.md

It follows from the sizes of published checkpoints and the defaults of the engine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ci.decoding_table import markdown, with_table
from lopa_ascend.config import EngineConfig, ModelConfig
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.families import FAMILIES
from lopa_ascend.hub.fit import step_bytes
from lopa_ascend.kv.pages import PAGE_SIZE, page_bytes
from scripts.bench.plan.models import load_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cuda.md"
GIB = 2**30
CARDS = {"RTX 4090": 23.6, "A100 40 GB": 39.4, "A100, H100 80 GB": 79.1, "H200": 139.7}
"""GiB in all, as torch's errors name them."""
CONTEXT = 0.6 * GIB
"""What CUDA and the kernels themselves take."""
MODELS = ("Dream-7B", "llada-8B", "sdar-8B", "nemotron-14B", "LLaDA2.0-mini")
FORMATS = (None, "w8a8")
FEWER = 4096
"""``max_num_batched_tokens`` where the usual one leaves no room."""
BYTES = 2
"""Of a bfloat16."""


def table() -> str:
    """For each model and number format the weights, and on each card the thousands of positions that the KV pool has
    room for by default."""
    rows = [("model", "format", "weights", *CARDS)]
    for name in MODELS:
        for quantization in FORMATS:
            config = replace(load_model(name), dtype="bfloat16")
            engine = EngineConfig(device="cuda", dtype="bfloat16", quantization=quantization)
            tensors = FAMILIES[config.model_type].tensors(config)
            weights = tensors.num_bytes(BYTES, tensors.quantized(engine.quantized_layers(), 0), 1)
            cells = [_positions(int(gib * GIB - CONTEXT - weights), config, engine) for gib in CARDS.values()]
            rows.append((name, quantization or "bfloat16", f"{weights / GIB:.1f} GiB", *cells))
    return markdown(rows)


def _positions(free: int, model: ModelConfig, engine: EngineConfig) -> str:
    """What the KV pool gets of the free memory once a step's logits, and twice its activations, are set aside."""
    usual, page = engine.batched_tokens(engine.longest_sequence(model)), page_bytes(model.kv_shape(1), BYTES)
    for tokens, mark in ((usual, ""), (FEWER, "*")):
        reserved = tokens * (model.vocab_size * BYTES + page // PAGE_SIZE) + 2 * step_bytes(model, tokens, BYTES, 1)
        pool = max(0, free - reserved) * 4 // 5
        if pool >= engine.longest_sequence(model) * page // PAGE_SIZE:
            return f"{pool // page * PAGE_SIZE // 1000:,}k{mark}"
    return "no"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ci.card_table", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/cuda.md instead of printing")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), "cards", table()), "utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
