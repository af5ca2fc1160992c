"""The commands that print the paper's tables, on the bundled model."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.demo import HELD_OUT
from lopa_ascend.serve.flags import ENGINE_FLAGS, field_values
from scripts.eval import paper_tables, tasks
from scripts.eval.paper_rows import METRICS, TABLES, models_of, rows_of

SMALL = ("--limit", "2", "--max-new-tokens", "64", "--threads", "1")
TASK = """\
task: gsm8k
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer.split('####')[-1].strip()}}"
generation_kwargs: {until: ["Question:"], do_sample: false}
filter_list:
  - {name: flexible-extract, filter: [{function: regex, regex_pattern: '#### (\\d+)'}, {function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
"""In place of lm-eval's GSM8K, whose problems are on the hub."""
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra eval)")


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def test_tables_have_the_papers_rows():
    assert [len(rows_of(table)) for table in TABLES] == [20, 6, 8, 72]
    numbers = {(row.table, row.name): row.published for table in TABLES for row in rows_of(table)}
    assert numbers["table1", "D2F-Dream-LoPA-gsm8k"] == {"TPF": 10.1, "score": 73.8}
    assert numbers["table2", "D2F-DiffuCoder-LoPA-humaneval_plus"] == {"TPF": 8.3, "score": 64.0}
    assert numbers["table3", "D2F-Dream-Base-S18-mbpp"] == {
        "Avg TPS": 1073.86, "Max TPS": 2400.12, "TPF": 11.92, "latency": 0.78,
    }  # fmt: skip
    assert numbers["table4", "D2F-Dream-Instruct-S7-gsm8k"]["Top-10 TPS"] == 710.10
    for table in TABLES:
        assert all(set(row.published) == set(METRICS[table]) for row in rows_of(table))
        assert len({row.name for row in rows_of(table)}) == len(rows_of(table))
    assert models_of("table1") == ["Dream", "D2F-Dream"]
    row = next(row for row in rows_of("table1") if row.name == "D2F-Dream-vanilla-mbpp")
    assert row.preset.merged(row.options)["decoding"] == "d2f"
    assert "num_branches" not in row.preset.merged(row.options)
    dream = {row.name: row.preset.merged(row.options) for row in rows_of("table1") if row.name.startswith("Dream-")}
    lopa, without = (DecodingParams(**dream[f"Dream-{name}-gsm8k"]) for name in ("LoPA", "Fast-dLLM"))
    assert lopa.changed(decoding="fast_dllm", base="d2f", num_branches=0) == without


def test_baselines_of_diffucoder_decode_as_the_published_code_or_say_how_not():
    rows = {f"{row.model} {row.label}": row for row in rows_of("table2")}
    params = {name: DecodingParams(**row.preset.merged(row.options)) for name, row in rows.items()}
    assert params["D2F-DiffuCoder vanilla"].window_attention == "block_causal"
    assert params["D2F-DiffuCoder LoPA"].window_attention == "full"
    assert params["DiffuCoder vanilla"].temperature == 0
    assert "samples at temperature 0.4 and top_p 0.95" in rows["DiffuCoder vanilla"].certainty


@pytest.fixture(scope="module")
def included(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "gsm8k.yaml").write_text(TASK.replace("FILE", str(HELD_OUT)))
    return folder


@needs_lm_eval
def test_our_numbers_stand_beside_the_papers_and_are_measured_once(
    included: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["table1", "--rows", "D2F-Dream-.*gsm8k", "--out", str(tmp_path), "--include", str(included), *SMALL]
    paper_tables.main(command)
    rows = read_csv(tmp_path)
    assert [(row["setting"], row["metric"]) for row in rows] == [
        (setting, metric) for setting in ("vanilla", "LoPA") for metric in ("TPF", "score")
    ]
    assert {(row["answers"], row["note"]) for row in rows} == {("2", "bundled, cpu, float32, 1 ranks")}
    tpf = {row["setting"]: float(row["ours"]) for row in rows if row["metric"] == "TPF"}
    assert tpf["LoPA"] > tpf["vanilla"] > 1
    assert "| D2F-Dream | LoPA | gsm8k | 10.1, " in (tmp_path / "table.md").read_text()

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is missing, so nothing is evaluated")

    monkeypatch.setattr(tasks, "evaluate", refuse)
    (tmp_path / "table.csv").unlink()
    paper_tables.main(command)
    assert read_csv(tmp_path) == rows
    with pytest.raises(SystemExit):
        paper_tables.main([*command, "--limit", "1"])
    assert "was made with limit 2, and not 1; choose another folder" in capsys.readouterr().err


@needs_lm_eval
def test_rows_of_many_devices_run_on_one_if_they_are_told_to(included: Path, tmp_path: Path) -> None:
    command = ["table3", "--rows", "Instruct-S18-gsm8k", "--one-rank", "--include", str(included), *SMALL]
    paper_tables.main([*command, "--out", str(tmp_path)])
    rows = {row["metric"]: row for row in read_csv(tmp_path)}
    assert set(rows) == {"Avg TPS", "Max TPS", "TPF", "latency"}
    assert all(float(row["ours"]) > 0 for row in rows.values())


def test_rows_that_cannot_run_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(paper_tables, "check_installed", lambda: None)
    paper_tables.main(["table4", "--rows", "S(1|18)-gsm8k", "--out", str(tmp_path), *SMALL])
    assert {row["setting"]: row["note"] for row in read_csv(tmp_path)} == {
        "S1": "needs 4 devices, and there are 2; --one-rank runs it on one",
        "S18": "needs 16 devices, and there are 2; --one-rank runs it on one",
    }
    rows = ["table1", "--rows", "^D2F.*LoPA-gsm8k", *SMALL]
    paper_tables.main([*rows, "--out", str(tmp_path / "b"), "--checkpoint", f"Dream={tmp_path}"])
    assert {row["note"] for row in read_csv(tmp_path / "b")} == {"no --checkpoint D2F-Dream=DIR"}
    missing = str(tmp_path / "missing")
    paper_tables.main([*rows, "--out", str(tmp_path / "c"), "--checkpoint", f"D2F-Dream={missing}"])
    (reason,) = {row["note"] for row in read_csv(tmp_path / "c")}
    assert missing in reason


def test_every_row_can_run_on_16_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with full attention on several groups of branches in eager steps, all others in graphs."""
    monkeypatch.setattr(paper_tables, "num_npus", lambda: 16)
    parser, models, modes = tasks.build_parser(), paper_tables.checkpoints_of([], "table4"), set()
    for row in rows_of("table4"):
        assert paper_tables.reason_to_skip(row, models, "npu", one_rank=False) == ""
        flags = ["--device", "npu", "--dtype", "bfloat16"]
        args = parser.parse_args([*paper_tables.command_of(row, models, one_rank=False), *flags])
        given = {name: value for name, value in vars(args).items() if value is not None}
        config = EngineConfig(**field_values(given, ENGINE_FLAGS))
        is_full = DecodingParams(**row.preset.merged(row.options)).window_attention == "full"
        assert (config.graph_mode == "eager") == (is_full and config.branch_parallel_size > 1), row.name
        assert config.world_size == row.ranks[0] * row.ranks[1]
        modes.add(config.graph_mode)
    assert modes == {"eager", "npugraph_ex"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint", "Dream"], "must be MODEL=DIR or MODEL=DIR,ADAPTER, got 'Dream'"),
        (["--checkpoint", "DiffuCoder=x"], "Table 1 has no model 'DiffuCoder'; it has Dream, D2F-Dream"),
        (["--rows", "nothing"], "matches none of Dream-vanilla-mbpp"),
        (["--limit", "0"], "argument --limit: must be a whole number from 1 on"),
        (["--row", "x"], "unrecognized arguments: --row"),
        (["gsm8k"], "the table says which tasks are run, and not gsm8k"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        paper_tables.main(["table1", "--out", str(tmp_path / "out"), *arguments])
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
