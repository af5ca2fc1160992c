"""Presets: the values of the papers' tables, what overrides them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import DecodingParams, ParameterError, find_preset, presets
from lopa_ascend.config.presets import FILE, presets_text
from lopa_ascend.serve.cli import parse_args

TAUS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""tau_act and tau_conf of Table 6, in the order of the settings of a group."""
TABLE_5 = {
    # preset: task, examples, block_size, tau_add, tau_act, tau_conf, num_branches
    "dream-gsm8k": ("gsm8k", 4, 32, 0.1, 0.95, 0.90, 14),
    "dream-math": ("minerva_math", 4, 16, 0.1, 0.95, 0.90, 7),
    "dream-humaneval": ("humaneval", 0, 32, 0.3, 0.95, 0.95, 7),
    "dream-mbpp": ("mbpp", 3, 32, 0.3, 0.95, 0.95, 7),
    "diffucoder-humaneval-plus": ("humaneval_plus", 0, 32, 0.3, 0.95, 0.95, 6),
    "diffucoder-mbpp-plus": ("mbpp_plus", 0, 32, 0.3, 0.95, 0.90, 14),
}

RECOMMENDED = {
    "sdar-chat": ("d2f", 4, 0.85),
    "trado": ("d2f", 4, 0.9),
    "dreamreasoner": ("d2f", 32, 0.9),
    "llada2.0": ("d2f", 32, 0.95),
    "llada2.1-quality": ("d2f", 32, 0.7),
    "llada2.1-speed": ("d2f", 32, 0.5),
    "fast-dllm-v2-demo": ("fast_dllm_v2", 32, 0.9),
    "fast-dllm-v2-eval": ("fast_dllm_v2", 32, 1.0),
}
"""What the authors of block-causal models recommend: decoding, block_size, tau_conf."""


def test_every_row_of_table_6_is_a_preset():
    for number in range(1, 19):
        preset, params = find_preset(f"S{number}"), DecodingParams.preset(f"S{number}")
        assert (params.block_size, params.tau_add, params.max_new_tokens) == (32, 0.1, 512)
        assert params.tau_act == params.tau_conf == TAUS[(number - 1) % 6]
        launch = preset.launch
        group = (launch.precision, launch.tensor_parallel_size, launch.branch_parallel_size)
        assert group == (("bf16", 1, 4), ("bf16", 1, 8), ("w8a8", 4, 4))[(number - 1) // 6]
        assert params.num_branches == launch.branch_parallel_size - 1
        assert params.confidence == "neg_entropy"
        assert params.window_attention == ("block_causal" if number > 12 else "full")
        assert preset.tasks == {"mbpp": 3, "gsm8k": 4}
        base, instruct = preset.prompts
        assert (base.add_bos, base.chat_template) == (True, False)
        assert (instruct.add_bos, instruct.chat_template, instruct.fewshot_as_multiturn) == (False, True, True)


@pytest.mark.parametrize("name", TABLE_5)
def test_every_row_of_table_5_is_a_preset(name: str):
    task, shots, *expected = TABLE_5[name]
    params = DecodingParams.preset(name)
    found = [params.block_size, params.tau_add, params.tau_act, params.tau_conf, params.num_branches]
    assert found == expected
    assert find_preset(name).tasks == {task: shots}
    assert params.confidence == ("max_prob" if "diffucoder" in name else "neg_entropy")


def test_diffucoders_prompt_begins_the_answer_with_a_fence():
    (prompt,) = find_preset("diffucoder-mbpp-plus").prompts
    assert prompt.answer_prefix == "```python\n"
    assert "{prompt}" in prompt.user
    assert prompt.system is not None


def test_d2fs_own_evaluation():
    params = DecodingParams.preset("d2f-mbpp")
    assert (params.decoding, params.num_branches, params.block_size, params.max_new_tokens) == ("d2f", 0, 48, 240)
    assert find_preset("d2f-gsm8k").tasks == {"gsm8k_cot": 8}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_what_authors_recommend_is_a_preset(name: str):
    decoding, block_size, tau_conf = RECOMMENDED[name]
    params = DecodingParams.preset(name)
    assert (params.decoding, params.block_size, params.tau_conf) == (decoding, block_size, tau_conf)
    assert (params.num_branches, params.window_attention, params.sub_block_size) == (0, "block_causal", 8)
    assert params.tau_add == 1 or decoding == "fast_dllm_v2"
    assert params.editing_threshold == {"llada2.1-quality": 0.5, "llada2.1-speed": 0.0}.get(name)


CANVASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llada-chat": ("parallel", 128, {"block_size": 32, "tau_conf": 1.0}),
    "llada-gsm8k": ("parallel", 256, {"block_size": 8, "tau_conf": 1.0}),
    "llada-math": ("parallel", 512, {"block_size": 64, "tau_conf": 1.0}),
    "llada-1.5-gsm8k": ("parallel", 256, {"block_size": 16, "eos_last": True}),
    "llada-1.5-math": ("parallel", 1024, {"block_size": 128, "eos_last": True}),
    "llada-1.5-code": ("parallel", 512, {"block_size": 32, "eos_last": True}),
    "fast-dllm-llada": ("fast_dllm", 256, {"block_size": 32, "tau_conf": 0.9, "block_cache": "dual"}),
    "fast-dllm-llada-factor": ("fast_dllm", 256, {"acceptance": "factor", "acceptance_factor": 1.0}),
    "d3llm-chat": ("parallel", 256, {"acceptance": "entropy", "max_entropy": 0.5, "tau_add": 0.1}),
    "d3llm-dream-gsm8k": ("parallel", 256, {"acceptance": "entropy", "max_entropy": 0.4, "max_active_blocks": 1024}),
}


@pytest.mark.parametrize("name", CANVASES)
def test_decodings_of_a_whole_canvas_are_presets(name: str):
    decoding, max_new_tokens, fields = CANVASES[name]
    params = DecodingParams.preset(name)
    assert (params.decoding, params.max_new_tokens, params.window_attention) == (decoding, max_new_tokens, "full")
    assert {field: getattr(params, field) for field in fields} == fields


def test_presets_are_complete():
    content = json.loads(FILE.read_text())
    assert set(content["presets"]) == set(presets())
    assert {own["group"] for own in content["presets"].values()} == set(content["groups"])
    used = {prompt.name for preset in presets().values() for prompt in preset.prompts}
    assert used == set(content["prompts"])
    for name, preset in presets().items():
        assert preset.decoding.keys() == preset.certainty.keys() <= set(DecodingParams.names())
        assert {"block_size", "num_branches", "confidence"} <= preset.decoding.keys()
        assert preset.decoding.keys() & {"tau_conf", "acceptance"}
        assert {"tau_add", "tau_act"} <= preset.decoding.keys() or name in RECOMMENDED or name in CANVASES
        assert all(text.startswith(("paper", "script", "inferred")) for text in preset.certainty.values())
        assert preset.tasks or name in RECOMMENDED or name in CANVASES
        assert preset.source


def test_options_override_a_preset():
    params = DecodingParams.preset("S13", tau_conf=0.8, num_branches=7)
    assert (params.tau_conf, params.tau_act, params.num_branches) == (0.8, 0.95, 7)
    assert DecodingParams.preset("S13") == DecodingParams(**find_preset("S13").decoding)


def test_the_branches_of_a_preset_belong_to_its_decoding():
    baseline = DecodingParams.preset("S13", decoding="d2f")
    assert (baseline.num_branches, baseline.tau_act, baseline.block_size) == (0, 0.95, 32)
    assert DecodingParams.preset("S13", decoding="lopa").num_branches == 3
    assert DecodingParams.preset("d2f-gsm8k", decoding="lopa").num_branches == 3  # the engine's default
    with pytest.raises(ParameterError, match="num_branches"):
        DecodingParams.preset("S13", decoding="d2f", num_branches=3)


@pytest.mark.parametrize("name", ["S0", "S19", "s13", "", "list"])
def test_unknown_names_are_refused_with_the_list(name: str):
    with pytest.raises(ParameterError, match="S1, S2, .*, d3llm-dream-gsm8k") as refusal:
        DecodingParams.preset(name)
    assert refusal.value.param == "preset"


def test_wrong_options_are_refused():
    with pytest.raises(ParameterError, match="tau_confidence: unknown option"):
        DecodingParams.preset("S13", tau_confidence=0.8)
    with pytest.raises(ParameterError, match="tau_conf"):
        DecodingParams.preset("S13", tau_conf=2)


def test_the_list_has_every_preset_with_its_source():
    lines = presets_text().splitlines()
    for name, preset in presets().items():
        assert f"  {name}" in lines
        assert f"  source  {preset.source}" in lines
    assert max(len(line) for line in lines if line.startswith("      ")) <= 112


# ---- the server ------------------------------------------------------------------------------------------------------


def test_a_servers_preset_sets_its_decoding_defaults_alone():
    config = parse_args(["--preset", "S13"])
    assert config.preset == "S13"
    assert DecodingParams(**config.decoding) == DecodingParams.preset("S13")
    assert (config.engine.tensor_parallel_size, config.engine.branch_parallel_size) == (1, 1)
    assert (config.engine.model, config.engine.dtype) == (None, "auto")
    # Graphs are compiled for the defaults, whoever has set them.
    graphs = config.engine.graph_params
    assert (graphs.confidence, graphs.num_branches) == ("neg_entropy", 3)
    assert parse_args(["--preset", "S1"]).engine.graph_params.window_attention == "full"


def test_flags_and_files_override_a_servers_preset(tmp_path: Path):
    config = parse_args("--preset S13 --tau-conf 0.5 --acceptance factor".split())
    assert DecodingParams(**config.decoding) == DecodingParams.preset("S13", tau_conf=0.5, acceptance="factor")
    file = tmp_path / "serve.yaml"
    file.write_text("preset: S13\ntau-conf: 0.5\n")
    assert parse_args(["--config", str(file)]).decoding["tau_conf"] == 0.5
    assert parse_args(["--config", str(file), "--preset", "S8"]).decoding["tau_act"] == 0.9
    baseline = DecodingParams(**parse_args("--preset S13 --decoding d2f".split()).decoding)
    assert baseline == DecodingParams.preset("S13", decoding="d2f")


def test_the_server_prints_the_list_or_refuses(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--preset", "list"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == presets_text()
    for argv, expected in (
        (["--preset", "S19"], "argument --preset: unknown value 'S19'; choose one of S1, S2"),
        (["--preset", "dream-gsm8k", "--max-num-branches", "7"], "--num-branches: is 14 by preset dream-gsm8k"),
    ):
        with pytest.raises(SystemExit) as stop:
            parse_args(argv)
        assert stop.value.code == 2
        assert expected in capsys.readouterr().err
