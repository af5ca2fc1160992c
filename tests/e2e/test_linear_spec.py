"""Linear self-speculation writes what "ar" writes, whatever its drafts are."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lopa_ascend import DecodingParams
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from lopa_ascend.types import GenerationOutput
from tests.e2e.batching import run

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
MODELS = (("nemotron/model_b", "float32"), ("orthrus/model_a", "bfloat16"), ("pangu/model_a", "float32"))
ROUNDS = 6
"""Random requests for each model."""


def random_params(rng: random.Random) -> dict[str, Any]:
    """What a request may ask for, but for its decoding."""
    asked: dict[str, Any] = {
        "max_new_tokens": rng.choice([1, 2, 3, 17, 40]),
        "ignore_eos": rng.random() < 0.3,
        "top_logprobs": rng.choice([0, 2]),
    }
    further: list[dict[str, Any]] = [
        {"eos_token_id": rng.sample(range(3, 99), 12)},
        {"stop_token_ids": rng.sample(range(3, 99), 8)},
        {"min_new_tokens": asked["max_new_tokens"] // 2, "eos_token_id": rng.sample(range(3, 99), 12)},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": ((5, 2.0), (7, -3.0))},
        {"frequency_penalty": 0.4},
        {"bad_words": [[token] for token in range(20, 50)] + [[60, 61], [9, 9]]},
        {"temperature": 0.9, "seed": rng.randrange(99)},
        {"temperature": 0.7, "seed": rng.randrange(99), "top_p": 0.9},
        {"temperature": 1.2, "seed": rng.randrange(99), "top_k": 9, "repetition_penalty": 1.1},
    ]
    for options in rng.sample(further, rng.choice([0, 1, 2])):
        asked |= options
    return asked


def written(output: GenerationOutput) -> tuple[object, ...]:
    return output.token_ids, output.finish_reason, output.stop_reason, output.alternatives, output.max_probs


def generated(
    engine: Engine, asked: Sequence[tuple[list[int], dict[str, Any]]], **decoding: Any
) -> list[GenerationOutput]:
    return run(engine, [(prompt, DecodingParams(**fields, **decoding)) for prompt, fields in asked])


@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_the_answer_is_that_of_ar_to_the_bit(model: str, dtype: str) -> None:
    """In one batch with others, prompts in pieces, on shared beginnings, with any parameters; drafts are wrong and
    right."""
    rng = random.Random(f"{model} {dtype}")
    reference = Engine(EngineConfig(model=str(GOLDEN / model), dtype=dtype, enable_prefix_caching=False))
    first = [rng.randrange(12, 99) for _ in range(min(150, reference.limits.max_model_len - 41))]
    prompts = [first[: rng.randrange(1, len(first))] + [rng.randrange(12, 99)] for _ in range(ROUNDS)]
    asked = [(prompt, random_params(rng)) for prompt in prompts]
    expected = [written(output) for each in asked for output in generated(reference, [each], decoding="ar")]
    sizes = [rng.choice([1, 2, 5, 8, 16, 40]) for _ in asked]
    drafting = [
        (prompt, {**fields, "block_size": size, "draft_threshold": rng.choice([0.0, 0.5])})
        for (prompt, fields), size in zip(asked, sizes, strict=True)
    ]
    engine = Engine(EngineConfig(model=str(GOLDEN / model), dtype=dtype, max_num_batched_tokens=96))
    together = generated(engine, drafting, decoding="linear_spec")
    alone = [generated(engine, [each], decoding="linear_spec")[0] for each in drafting]
    assert [written(output) for output in together] == expected
    assert [written(output) for output in alone] == expected
    assert [output.num_forwards for output in together] == [output.num_forwards for output in alone]
    branches = [
        (prompt, {**fields, "num_branches": rng.choice([1, 3]), "branch_rows": rng.choice(["second", "ahead"])})
        for prompt, fields in drafting
    ]
    with_branches = generated(engine, branches, decoding="lopa", base="linear_spec")
    assert [written(output) for output in with_branches] == expected
    for record in [record for output in with_branches for record in output.trace or ()]:
        if record.accepted is None:
            continue
        assert record.committed == len(record.fills) + len(record.branches[record.winner].own_fills)
        assert record.committed >= record.accepted + 1 or record.committed == record.accepted


def test_samples_have_the_distribution_of_ar() -> None:
    """Of three tokens, against the probabilities of "ar", by a chi-square test that refuses another temperature."""
    engine = Engine(EngineConfig(model=str(GOLDEN / "orthrus/model_a"), dtype="float32"))
    prompt, top_k, count = list(range(20, 33)), 3, 300

    def distribution(temperature: float) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            fields = {"max_new_tokens": 1, "ignore_eos": True, "top_logprobs": top_k, "temperature": temperature}
            outputs = generated(engine, [([*prompt, *known], {**fields, "seed": 1}) for known in found], decoding="ar")
            longer = dict[tuple[int, ...], float]()
            for (known, share), output in zip(found.items(), outputs, strict=True):
                total = sum(prob for _, prob in output.alternatives[0])
                longer |= {(*known, token): share * prob / total for token, prob in output.alternatives[0]}
            found = longer
        return found

    fields: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 2.5, "top_k": top_k}
    asked = [(prompt, {**fields, "seed": seed, "block_size": 3}) for seed in range(count)]
    outputs = generated(engine, asked, decoding="linear_spec")
    counts = Counter(output.token_ids for output in outputs)

    def chi_square(expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
        """The statistic, with rare answers as one; and the quantile that it exceeds once in a thousand times."""
        assert counts.keys() <= expected.keys()
        cells = [(counts[each], count * share) for each, share in expected.items()]
        rare = [cell for cell in cells if cell[1] < 5]
        cells = [cell for cell in cells if cell[1] >= 5] + [(sum(n for n, _ in rare), sum(mean for _, mean in rare))]
        part = 2 / (9 * (len(cells) - 1))  # the approximation of Wilson and Hilferty
        quantile = (len(cells) - 1) * (1 - part + 3.09 * part**0.5) ** 3
        return sum((n - mean) ** 2 / mean for n, mean in cells), quantile

    records = [record for output in outputs for record in output.trace or ()]
    assert 0 < sum(record.accepted or 0 for record in records) < sum(record.accepted is not None for record in records)
    for temperature, is_right in ((2.5, True), (6.0, False)):
        statistic, quantile = chi_square(distribution(temperature))
        assert (statistic < quantile) is is_right


def test_an_adapter_of_other_layers_is_refused_by_name(tmp_path: Path) -> None:
    """One that only drafts use is not merged, so it may adapt what the decoder has room for."""
    model = shutil.copytree(GOLDEN / "nemotron/model_b", tmp_path / "model")
    file, fields = (
        model / "linear_spec_lora" / "adapter_model.safetensors",
        model / "linear_spec_lora/adapter_config.json",
    )
    tensors, weights = load_file(file), load_file(model / "model.safetensors")
    moved = {}
    for name, tensor in tensors.items():
        module, _, _ = name.removeprefix("base_model.model.").replace("o_proj", "q_proj").partition(".lora")
        rows, columns = weights[f"{module}.weight"].shape
        rank = min(tensor.shape)
        shape = (rank, columns) if "lora_A" in name else (rows, rank)
        moved[name.replace("o_proj", "q_proj")] = torch.zeros(shape)
    save_file(moved, file)
    fields.write_text(json.dumps({**json.loads(fields.read_text()), "target_modules": ["q_proj"]}))
    with pytest.raises(CheckpointError, match=r"target_modules: adapts .*q_proj; an adapter that only drafts use may"):
        Engine(EngineConfig(model=str(model)))
