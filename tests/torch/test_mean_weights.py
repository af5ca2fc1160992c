"""The mean of two checkpoints' weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.mean_weights import write_mean
from scripts.training.checkpoint import WEIGHTS


def write(directory: Path, **tensors: Tensor) -> Path:
    """Writes a checkpoint with a configuration."""
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / "config.json").write_text(directory.name)
    return directory


def test_the_mean_has_the_share_of_the_second_and_the_files_of_the_first(tmp_path: Path) -> None:
    first = write(tmp_path / "first", a=torch.zeros(2, dtype=torch.bfloat16), b=torch.tensor([4.0]))
    second = write(tmp_path / "second", a=torch.full((2,), 8.0), b=torch.tensor([0.0]))
    write_mean(first, second, 0.25, tmp_path / "out")
    mean = load_file(tmp_path / "out" / WEIGHTS)
    assert mean["a"].tolist() == [2.0, 2.0]
    assert mean["a"].dtype == torch.bfloat16
    assert mean["b"].tolist() == [3.0]
    assert (tmp_path / "out" / "config.json").read_text() == "first"


def test_a_mean_that_is_not_finished_leaves_the_checkpoint_that_it_replaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = write(tmp_path / "first", a=torch.zeros(2)), write(tmp_path / "second", a=torch.ones(2))

    def interrupted(tensors: dict[str, Tensor], file: Path, **_: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("scripts.training.checkpoint.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_mean(first, second, 0.5, second)
    assert load_file(second / WEIGHTS)["a"].tolist() == [1.0, 1.0]
    write_mean(first, second, 0.5, second)
    assert load_file(second / WEIGHTS)["a"].tolist() == [0.5, 0.5]
    assert sorted(file.name for file in second.iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize(
    ("second", "named"),
    [({"a": torch.ones(3)}, "b"), ({"a": torch.ones(2), "b": torch.ones(1)}, "a")],
)
def test_checkpoints_of_different_models_are_refused_by_the_name_of_the_tensor(
    tmp_path: Path, second: dict[str, Tensor], named: str
) -> None:
    first = write(tmp_path / "first", a=torch.ones(3), b=torch.ones(1))
    with pytest.raises(ValueError, match=f"{named} differs or is missing"):
        write_mean(first, write(tmp_path / "second", **second), 0.5, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_int8_checkpoints_are_refused(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, a=torch.ones(3, dtype=torch.int8)) for name in ("first", "second"))
    with pytest.raises(ValueError, match="a is not in floating point; take the checkpoints from before"):
        write_mean(first, second, 0.5, tmp_path / "out")
