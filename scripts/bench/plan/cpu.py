"""Measures this CPU, and compares predicted with measured steps of random models on it. Times are CPU seconds.

One thread, float32, eager steps. Rates are those of torch; the fixed cost of a layer and of a step follows from two
models that are too narrow to compute much.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import save_file

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import ModelConfig
from scripts.bench.parts import fastest_call
from scripts.bench.plan.devices import CONSTANTS, Device, parse_device
from scripts.bench.plan.step import Workload, predict
from scripts.bench.workload import parameters

ROWS = 128
"""Positions of a step: four branches of one block."""
PROMPT_LENGTH = 32
REPEATS = 5
"""Calls of which the fastest one gives a rate."""
TOLERANCE = 0.25
"""How far a prediction may be from the measurement, as a share of it."""


@dataclass(frozen=True)
class Size:
    """The geometry of a random model."""

    hidden: int
    layers: int
    vocab: int = 1024

    @property
    def config(self) -> dict[str, Any]:
        """As in config.json: heads of 64, half as many for keys and values, an MLP of three times the width."""
        heads = max(2, self.hidden // 64)
        return {
            "model_type": "Dream", "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": heads,
            "num_key_value_heads": heads // 2, "max_position_embeddings": 512, "torch_dtype": "float32",
            "mask_token_id": self.vocab - 1, "eos_token_id": self.vocab - 2,
        }  # fmt: skip


SIZES = (Size(512, 6), Size(768, 8), Size(1024, 10))
"""Models of 16, 47 and 105 M parameters in their layers."""
NARROW = (Size(64, 2), Size(64, 10))


def measure_cpu(narrow: Sequence[Size] = NARROW, elements: int = 2**25) -> dict[str, Any]:
    """The description of this CPU, as in devices.json.

    Args:
        narrow: two models of one width, whose steps give the fixed costs.
        elements: of the largest float32 tensor that is read.
    """
    torch.set_num_threads(1)
    x, weight, data = torch.randn(ROWS, 1024), torch.randn(3072, 1024), torch.randn(elements)
    flops = 2 * x.shape[0] * weight.numel() / fastest_call(lambda: torch.nn.functional.linear(x, weight), REPEATS)
    bandwidth = 4 * elements / fastest_call(data.sum, REPEATS)
    constants: dict[str, list[Any]] = {name: [0, "", "no such cost apart from the others"] for name in CONSTANTS}
    for name in ("bf16_flops", "int8_flops", "fp32_flops"):
        constants[name] = [flops, "FLOP/s", "measured: float32, 128 x 1024 by 1024 x 3072, one thread"]
    constants["memory_bandwidth"] = [bandwidth, "B/s", "measured: sum of a tensor, one thread"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    constants["memory_bytes"] = [memory, "B", "of the operating system"]
    for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
        constants[name] = [1, "", "the rates are measured"]
    constants["link_bandwidth"] = [bandwidth, "B/s", "assumed: ranks of one machine send through memory"]
    constants["collective_s"] = [0.37e-3, "s", "docs/ranks.md: an exchange of 2 ranks with gloo"]
    constants["slow_collective_s"] = [0.46e-3, "s", "docs/ranks.md: an exchange of 4 ranks with gloo"]
    constants["vector_kernels_layer"] = [1, "", "a layer counts as one kernel"]
    without_fixed_costs = parse_device({"constants": constants}, "this CPU")
    (few, short), (many, long) = ((size.layers, _fixed_seconds(without_fixed_costs, size)) for size in narrow)
    layer = max(0.0, (long - short) / (many - few))
    source = (
        f"measured: steps of models of width {narrow[0].hidden} with {few} and {many} layers, less their arithmetic"
    )
    constants["vector_kernel_s"] = [layer, "s", source]
    constants["host_launch_s"] = [max(0.0, short - few * layer), "s", source]
    return {"title": "this CPU, one thread, float32, eager steps", "constants": constants}


def _fixed_seconds(without_fixed_costs: Device, size: Size) -> float:
    """CPU seconds of a model's step beyond what its arithmetic and memory traffic take.

    Args:
        without_fixed_costs: this CPU, as if layers and steps had no fixed costs.
        size: of the model.
    """
    measured = measure_step(size)
    return max(0.0, measured.seconds - predict(measured.model, without_fixed_costs, measured.work).step)


@dataclass(frozen=True)
class MeasuredStep:
    """The mean step of a decode."""

    model: ModelConfig
    work: Workload
    """With the mean number of positions that steps computed."""
    seconds: float
    """CPU seconds."""


def measure_step(size: Size, repetitions: int = 3) -> MeasuredStep:
    """The fastest of some decodes of one block with four branches, by a random model."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), size.config)
        with LLM(folder, threads=1, enable_prefix_caching=False, max_num_seqs=1) as llm:
            # With these thresholds a step fills one position, and the window is one block.
            params = DecodingParams(
                num_branches=3, max_new_tokens=32, tau_conf=1.0, tau_add=1.0, finish_at_eos=False, ignore_eos=True
            )
            outputs, times = [], []
            for _ in range(1 + repetitions):  # the first one warms up
                start = time.process_time()
                outputs += llm.generate([list(range(PROMPT_LENGTH))], params, quiet=True)
                times.append(time.process_time() - start)
            model, output = llm.config, outputs[-1]
    positions = output.model_tokens / output.num_forwards
    work = Workload(precision="fp32", k=3, window=max(1, round(positions / 4)), context=PROMPT_LENGTH)
    return MeasuredStep(model, work, min(times[1:]) / output.num_forwards)


def write_random_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes a Dream directory with small random weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in parameters(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def validate_cpu(sizes: Sequence[Size] = SIZES, narrow: Sequence[Size] = NARROW) -> dict[str, Any]:
    """This CPU as measured now, and predicted and measured steps of models of some sizes."""
    description = measure_cpu(narrow)
    device, rows = parse_device(description, "this CPU"), []
    for size in sizes:
        measured = measure_step(size)
        predicted = predict(measured.model, device, measured.work)
        ratio = predicted.step / measured.seconds
        rows.append(
            {
                "hidden": size.hidden,
                "layers": size.layers,
                "positions": measured.work.tokens,
                "predicted_ms": round(1000 * predicted.step, 3),
                "measured_ms": round(1000 * measured.seconds, 3),
                "predicted_over_measured": round(ratio, 4),
                "within_tolerance": abs(ratio - 1) <= TOLERANCE,
                "bound_by": predicted.bound_by,
            }
        )
    return {"rows": rows, "device": description}
