"""The folder of a benchmark: what it holds, what it refuses, and how an interrupted run goes on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.demo import HELD_OUT
from scripts.eval.described import describe_benchmark, describe_model
from scripts.eval.files import read_problems
from scripts.eval.samples import SampleFile, Setting
from tests.samples import SAMPLE, plan


def test_an_interrupted_run_neither_loses_nor_repeats_a_sample(tmp_path: Path):
    settings = [Setting(DecodingParams(num_branches=k), f"k = {k}") for k in (3, 7)]
    missing = plan(settings).missing(SampleFile(tmp_path, {"model": "m"}))
    assert [(run, s.key, index) for run, s, index in missing] == [
        (run, s.key, index) for run in (0, 1) for s in settings for index in (0, 1)
    ]
    file = SampleFile(tmp_path, {"model": "m"})
    for run, setting, index in missing[:3]:
        file.add(replace(SAMPLE, setting=setting.key, run=run, index=index))
    with (tmp_path / "samples.jsonl").open("a") as lines:
        lines.write('{"setting": "cut of')
    again = SampleFile(tmp_path, {"model": "m"})
    assert list(again.samples.values()) == list(file.samples.values())
    assert plan(settings).missing(again) == missing[3:]
    again.add(replace(SAMPLE, setting=missing[3][1].key, run=missing[3][0], index=missing[3][2]))
    assert len(SampleFile(tmp_path, {"model": "m"}).samples) == 4


def test_samples_of_which_nothing_says_what_was_measured_are_refused(tmp_path: Path):
    SampleFile(tmp_path, {"model": "m"}).add(SAMPLE)
    (tmp_path / "benchmark.json").unlink()
    with pytest.raises(ParameterError, match="has samples without benchmark.json"):
        SampleFile(tmp_path, {"model": "other"})
    assert not (tmp_path / "benchmark.json").exists()


def test_a_folder_holds_one_benchmark(tmp_path: Path):
    SampleFile(tmp_path, {"model": "m", "machine": {"cores": 2}}).add(SAMPLE)
    with pytest.raises(ParameterError, match="whose machine.cores is 2, but this one's is 4; choose another folder"):
        SampleFile(tmp_path, {"model": "m", "machine": {"cores": 4}})


@pytest.mark.parametrize(
    "change",
    [
        {"quantization": "w8a8"},
        {"quantization": "w8a8", "quantization_exclude": ("o_proj",)},
        {"enable_prefix_caching": False},
        {"graph_mode": "inductor"},
        {"max_num_seqs": 1},
    ],
)
def test_a_folder_holds_answers_of_one_engine(tmp_path: Path, change: dict[str, Any]):
    tasks = read_problems(HELD_OUT)

    def header(config: EngineConfig, *, cut: bool = True) -> dict[str, Any]:
        return describe_benchmark(config, tasks, None, "chat", {}, cut=cut)

    SampleFile(tmp_path, header(EngineConfig(**change)))  # a run that failed before its first answer
    SampleFile(tmp_path, header(EngineConfig())).add(SAMPLE)
    SampleFile(tmp_path, header(EngineConfig()))
    with pytest.raises(ParameterError, match=f"whose engine.{min(change)} is"):
        SampleFile(tmp_path, header(EngineConfig(**change)))
    with pytest.raises(ParameterError, match="whose cut is"):
        SampleFile(tmp_path, header(EngineConfig(), cut=False))


def test_a_folder_holds_answers_to_prompts_with_the_same_examples(tmp_path: Path):
    tasks = read_problems(HELD_OUT)

    def header(answer: str) -> dict[str, Any]:
        examples = {"gsm8k": [{"question": "1 + 1?", "answer": answer}]}
        return describe_benchmark(EngineConfig(), tasks, None, "chat", examples, cut=True)

    SampleFile(tmp_path, header("#### 2")).add(SAMPLE)
    SampleFile(tmp_path, header("#### 2"))
    with pytest.raises(ParameterError, match=r"whose examples\.gsm8k\.digest is"):
        SampleFile(tmp_path, header("#### 3"))


def test_a_model_of_other_weights_has_another_digest(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    digests = []
    for place in (None, 0, 33 * 2**20, 64 * 2**20 - 1):
        content = bytearray(64 * 2**20)
        if place is not None:
            content[place] = 1
        weights.write_bytes(content)
        digests.append(describe_model(str(tmp_path), None)["model_digest"])
    assert len(set(digests)) == 4
    with pytest.raises(CheckpointError, match="nothing: expected a directory in the Hugging Face layout"):
        describe_model(str(tmp_path / "nothing"), None)


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path):
    holds = "import pathlib, sys; from scripts.eval import samples; "
    holds += "file = samples.SampleFile(pathlib.Path(sys.argv[1]), {}); print(); input()"
    command = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ParameterError, match="another process writes to .*choose another folder"):
            SampleFile(tmp_path, {})
        other.communicate("\n")
    SampleFile(tmp_path, {})
