"""Measures decoding speed on a CPU as a share of this machine's GEMM peak, which is measured in the same run.

    python -m scripts.bench_decode
    python -m scripts.bench_decode --branches 8 --dtypes bfloat16 --windows full

The workload is a random Dream of 125 M parameters (hidden size 768, 12 layers, vocabulary 32,000) with a prompt of 128
tokens, 128 new tokens and blocks of 32. Times are CPU seconds of this process, so other work on the machine disturbs
them little. Takes minutes; prints one row for each decode, with the columns

  forwards       forward passes for the 128 tokens
  TPF            visible tokens for each forward pass
  tokens/step    tokens computed in a step; positions that branches share are computed once
  cpu secs       CPU seconds of the decode
  forward        FLOP/s of the model's forward passes (linear layers); in brackets as a share of the GEMM peak
  decode         FLOP/s of the whole decode: linear layers and LM head by all CPU seconds; in brackets as a share of the
                 GEMM peak
  published      FLOPs that the published code spends on as many forward passes with k = 8 and full attention (17,920
                 tokens of 100.1 M parameters for 19 passes) by our CPU seconds, as a share of the GEMM peak
  outside        share of the CPU seconds outside the forward passes of the model, the head and the scores

With full attention in float32 the output ids are compared with those of the published code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import save_file

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.probe import PartTimes
from lopa_ascend.types import GenerationOutput

WORKLOAD = Path(__file__).with_name("bench_workload.json")
PUBLISHED_FLOPS = 2 * 100.1e6 * 17_920 / 19
"""Of the published code in one forward pass with k = 8 and full attention."""
RECORDED = {0: "d2f", 4: "bf4", 8: "bf8"}
"""Lookahead branches -> name under which the workload file has the published code's output ids."""


def parameters(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every parameter, in the order in which their random values are drawn."""
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{p}self_attn.{name}_proj.bias", (rows,)
        yield p + "self_attn.o_proj.weight", (hidden, hidden)
        yield p + "mlp.gate_proj.weight", (inner, hidden)
        yield p + "mlp.up_proj.weight", (inner, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inner)
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def spread(name: str, init: dict[str, float]) -> float:
    """The standard deviation of a parameter's random values, which depends on the first of these parts in its name."""
    groups = {"bias": "bias", "embed": "emb", "lm_head": "head", "q_proj": "qk", "k_proj": "qk", "self_attn": "attn"}
    for part, group in groups.items():
        if part in name:
            return init[group]
    return init["mlp"]


def write_model(folder: Path, work: dict[str, Any]) -> None:
    """Writes the workload's model as a Dream directory, with the weights that were timed with the published code."""
    config = dict(work["model"])
    init = config.pop("init")
    generator = torch.Generator().manual_seed(init["seed"])
    digest, tensors = hashlib.sha256(), {}
    for name, shape in parameters(config):
        values = torch.randn(shape, generator=generator)
        values = 1.0 + init["norm"] * values if name.endswith("norm.weight") else spread(name, init) * values
        digest.update(name.encode() + values.numpy().tobytes())
        tensors[name] = values.contiguous()
    if digest.hexdigest() != work["weights_sha256_fp32"]:
        raise RuntimeError("this torch draws other random weights than those that were timed")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"model_type": "Dream", "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def gemm_peak(dtype: torch.dtype) -> float:
    """The FLOP/s of CPU time that torch reaches in the fastest of some linear layers of the model's sizes."""
    best = 0.0
    for rows, inner, outer in ((1152, 768, 4096), (1152, 2048, 768), (2048, 2048, 2048)):
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        for _ in range(6):
            start = time.process_time()
            torch.nn.functional.linear(x, weight)
            best = max(best, 2 * rows * inner * outer / (time.process_time() - start))
    return best


@dataclass(frozen=True)
class Measurement:
    """One decode. Times are CPU seconds."""

    output: GenerationOutput
    total: float
    """The whole decode."""
    forward: float
    """Forward passes of the model."""
    score: float
    """LM head and scores."""


def measure(llm: LLM, prompt: list[int], params: DecodingParams) -> Measurement:
    """Decodes a prompt, and measures the CPU time of the parts."""
    times = PartTimes()
    llm.engine.runner.set_probe(times)
    start = time.process_time()
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    total = time.process_time() - start
    return Measurement(output, total, times.seconds["forward"], times.seconds["score"])


def report(llm: LLM, measured: Measurement, peak: float, expected: dict[str, Any] | None) -> str:
    """The row of the table for one decode.

    Args:
        llm: the model.
        measured: the decode.
        peak: FLOP/s of the GEMM peak.
        expected: the published code's decode, whose "output_ids" must be the same; None if it was not recorded.
    """
    c, output = llm.config, measured.output
    assert output.trace is not None
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    layers_flop = 2 * c.num_layers * (attention + mlp) * output.model_tokens
    head_flop = 2 * c.hidden_size * c.vocab_size * sum(record.head_rows for record in output.trace)
    forward_speed = layers_flop / measured.forward
    decode_speed = (layers_flop + head_flop) / measured.total
    published_speed = PUBLISHED_FLOPS * output.num_forwards / measured.total
    verdict = ""
    if expected is not None:
        verdict = "same ids" if list(output.token_ids) == expected["output_ids"] else "OTHER IDS"
    cells = (
        f"{output.num_forwards:8d}",
        f"{output.tokens_per_forward:6.2f}",
        f"{output.model_tokens / output.num_forwards:11.1f}",
        f"{measured.total:9.2f}",
        f"{forward_speed / 1e9:8.1f} ({forward_speed / peak:4.2f})",
        f"{decode_speed / 1e9:8.1f} ({decode_speed / peak:4.2f})",
        f"{published_speed / peak:9.2f}",
        f"{1 - (measured.forward + measured.score) / measured.total:7.1%}",
        verdict,
    )
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_decode", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--branches",
        type=int,
        nargs="+",
        default=[0, 4, 8],
        metavar="K",
        help="lookahead branches, the paper's k; 0 is D2F (default: 0 4 8)",
    )
    for name, choices, text in (
        ("--dtypes", ["float32", "bfloat16"], "number formats of the weights"),
        ("--windows", ["full", "block_causal"], "window attentions"),
    ):
        parser.add_argument(name, nargs="+", default=choices, choices=choices, help=f"{text} (default: both)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], metavar="N", help="numbers of CPU threads (default: 1)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("build/bench-model"),
        metavar="DIR",
        help="where the random model is kept (default: build/bench-model)",
    )
    args = parser.parse_args()
    work = json.loads(WORKLOAD.read_text())
    if not (args.model / "config.json").exists():
        write_model(args.model, work)
    generator = torch.Generator().manual_seed(work["prompt_seed"])
    prompt = torch.randint(0, work["prompt_vocab"], (work["prompt_len"],), generator=generator).tolist()
    heading = "forwards     TPF  tokens/step  cpu secs  forward GFLOP/s   decode GFLOP/s  published  outside"
    for dtype in args.dtypes:
        llm = LLM(args.model, dtype=dtype, enable_prefix_caching=False)
        for threads in args.threads:
            torch.set_num_threads(threads)
            own, wide = gemm_peak(getattr(torch, dtype)), gemm_peak(torch.float32)
            peak = max(own, wide)  # a processor without bfloat16 units is faster in float32, and that is the floor then
            print(f"\n{dtype}, {threads} thread(s): GEMM peak {own / 1e9:.1f} GFLOP/s a core, float32 {wide / 1e9:.1f}")
            print(f"{'window':>12s}   k  {heading}")
            for window in args.windows:
                for k in args.branches:
                    params = DecodingParams(
                        decoding="lopa" if k else "d2f", num_branches=k, max_new_tokens=128, confidence="neg_entropy",
                        window_attention=window, finish_at_eos=False, ignore_eos=True,
                    )  # fmt: skip
                    found = measure(llm, prompt, params)
                    recorded = window == "full" and dtype == "float32" and k in RECORDED
                    expected = work["expected"][f"{RECORDED[k]}/float32"] if recorded else None
                    print(f"{window:>12s} {k:3d}  {report(llm, found, peak, expected)}", flush=True)


if __name__ == "__main__":
    main()
