"""What ``scripts.bench_batches`` measures of requests that are decoded together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lopa_ascend.types import GenerationOutput
from scripts.bench_batches import Decode, draw, main
from scripts.decode_bench.parts import Parts
from tests.tiny import write_dream


def test_every_decode_has_a_row_and_only_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decode whose prompts were not in the prefix cache would end the script."""
    threads = torch.get_num_threads()
    model = tmp_path / "model"
    write_dream(model)
    options = ["--model", str(model), "--dtype", "float32", "--new-tokens", "32"]
    main([*options, "--requests", "1", "3", "--prompts", "8", "200", "--branches", "0", "2"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:6].strip().isdigit()]
    assert [row[:3] for row in rows] == [
        [prompt, requests, k] for prompt in ("8", "200") for k in ("0", "2") for requests in ("1", "3")
    ]
    tokens_a_step = {tuple(row[:3]): float(row[4]) for row in rows}
    for prompt in ("8", "200"):
        assert tokens_a_step[prompt, "3", "0"] > tokens_a_step[prompt, "1", "0"]
        assert tokens_a_step[prompt, "1", "2"] > tokens_a_step[prompt, "1", "0"]
    torch.set_num_threads(threads)


def test_computed_tokens_are_drawn_against_requests(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = GenerationOutput(
        (5,) * 8, (1, 2, 3), None, "length", None, num_forwards=1, num_positions=32, model_tokens=40
    )
    decodes = [Decode(8, requests, 0, 1.0, (output,) * requests, 1, Parts()) for requests in (1, 2)]
    for one in decodes:
        one.parts.by_name["host"].seconds = 0.5
    draw(decodes, tmp_path / "batches.png")
    assert (tmp_path / "batches.png").stat().st_size > 0
