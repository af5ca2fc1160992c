"""Measures what a Dream-7B takes to load and to decode on a CPU, in W8A8 and in bfloat16.

    python -m scripts.bench_size                         both, in a temporary directory
    python -m scripts.bench_size --formats w8a8 --dir .  in a directory on a disk with 17 GB free

Writes a checkpoint of Dream-7B's dimensions with random weights in bfloat16 (15 GB), shard by shard. Then, for each
format, a process of its own loads it (W8A8 quantises while it loads) and generates 32 tokens with k = 3. The checkpoint
is deleted at the end, whatever happened. A format that needs more memory than is free is skipped, and the table says
so.

Prints a Markdown table. peak: the most memory that the process had, pages of files that it reads included; weights: the
size of the weights; load: seconds until the engine is there; a step: mean seconds of a forward pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lopa_ascend import DecodingParams
from lopa_ascend.backend.memory import free_memory
from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from
from scripts.planner.models import FILE, known_models

FORMATS: dict[str, dict[str, Any]] = {"w8a8": {"quantization": "w8a8"}, "bfloat16": {}}
"""Options of the engine by format."""
NEEDED_GIB = {"w8a8": 10.5, "bfloat16": 17.5}
"""Memory that must be free before a format of Dream-7B is tried."""
PROMPT = tuple(range(100, 116))
NUM_TOKENS = 32
DEVIATION = 0.02
"""Standard deviation of the random weights."""


def write_random(path: Path, config: Mapping[str, Any]) -> int:
    """Writes a checkpoint with random weights, of which one layer at a time is in memory.

    Args:
        path: an empty directory.
        config: the fields of config.json.

    Returns:
        The bytes of all its files.
    """
    import torch
    from safetensors.torch import save_file

    from lopa_ascend.checkpoint.read import expected_shapes

    shards: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in expected_shapes(ModelConfig.from_json(config, {}, "config.json")).items():
        parts = name.split(".")  # "model.layers.N....", or a tensor outside the layers, such as "model.norm.weight"
        is_in_layer = parts[1] == "layers"
        shard = f"layer{int(parts[2]):02}" if is_in_layer else parts[-2]
        shards[shard][name] = shape
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for shard, shapes in shards.items():
        tensors = {}
        for name, shape in shapes.items():
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, DEVIATION, generator=generator)
            if name.endswith("norm.weight"):
                tensors[name] += 1
        file = f"{shard}.safetensors"
        save_file(tensors, str(path / file))
        weight_map |= dict.fromkeys(shapes, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))  # last: without it a directory is no checkpoint
    return sum(file.stat().st_size for file in path.iterdir())


def measure(path: Path, name: str, block_size: int) -> dict[str, float]:
    """Loads a checkpoint in this process and decodes with it.

    Args:
        path: directory of the checkpoint.
        name: one of FORMATS.
        block_size: of the request.
    """
    from lopa_ascend import LLM

    start, cpu = time.perf_counter(), time.process_time()
    llm = LLM(path, max_model_len=128, max_num_seqs=1, enable_prefix_caching=False, **FORMATS[name])
    loaded, cpu_loaded = time.perf_counter(), time.process_time()
    params = DecodingParams(num_branches=3, max_new_tokens=NUM_TOKENS, block_size=block_size, ignore_eos=True)
    (output,) = llm.generate([list(PROMPT)], params, quiet=True)
    end, cpu_end = time.perf_counter(), time.process_time()
    assert len(output.token_ids) == NUM_TOKENS
    return {
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "weights_gib": sum(weight.nbytes for weight in llm.engine.runner.model.weights.values()) / 2**30,
        "load_s": loaded - start,
        "load_cpu_s": cpu_loaded - cpu,
        "forwards": output.num_forwards,
        "step_s": (end - loaded) / output.num_forwards,
        "step_cpu_s": (cpu_end - cpu_loaded) / output.num_forwards,
        "rows": output.model_tokens / output.num_forwards,
    }


def row(name: str, found: dict[str, float]) -> str:
    """A row of the table."""
    cells = (
        f"{found['peak_gib']:.1f} GiB",
        f"{found['weights_gib']:.1f} GiB",
        f"{found['load_s']:.0f} s ({found['load_cpu_s']:.0f} s CPU)",
        f"{found['forwards']:.0f} of {found['rows']:.0f} rows",
        f"{found['step_s']:.1f} s ({found['step_cpu_s']:.1f} s CPU)",
    )
    return f"| {name} | {' | '.join(cells)} |"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_size", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="number formats to load (default: all)"
    )
    parser.add_argument(
        "--model", choices=known_models(), default="Dream-7B", help="model with these dimensions (default: Dream-7B)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory where the checkpoint is made (default: the system's temporary directory)",
    )
    parser.add_argument(
        "--block-size", type=number_from(1), default=32, metavar="N", help="block_size of the request (default: 32)"
    )
    parser.add_argument("--measure", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # in the process of a format
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.formats[0], args.block_size)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="dream-7b-") as directory:
        path = Path(directory)
        start = time.perf_counter()
        size = write_random(path, read_json_object(FILE, ConfigError)[args.model]["config"])
        print(
            f"{args.model} with random weights: {size / 1e9:.1f} GB, written in {time.perf_counter() - start:.0f} s\n"
        )
        print("| format | peak | weights | load | forward passes | a step |\n|---|---|---|---|---|---|", flush=True)
        for name in args.formats:
            free = free_memory("cpu", 1) / 2**30
            if free < NEEDED_GIB[name]:
                print(f"| {name} | left out: {free:.1f} GiB are free, {NEEDED_GIB[name]} are needed |", flush=True)
                continue
            command = [sys.executable, "-m", "scripts.bench_size", "--measure", directory, "--formats", name]
            command += ["--block-size", str(args.block_size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: ended with status {done.returncode}")
            print(row(name, json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
