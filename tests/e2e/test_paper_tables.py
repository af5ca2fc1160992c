"""The commands that print the paper's tables, on the bundled model."""

import csv
import json
from pathlib import Path

import pytest

from lopa_ascend.config import DecodingParams, EngineConfig
from scripts.eval import latex, paper_tables
from scripts.eval.paper_rows import METRICS, TABLES, models_of, rows_of
from scripts.eval.paper_run import Checkpoint, Options, TableRun

SMALL = ("--limit", "2", "--max-new-tokens", "64", "--threads", "1")


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table1")
    paper_tables.main(["table1", "--rows", "D2F-Dream-.*(gsm8k|mbpp)", "--out", str(folder), *SMALL])
    return folder


def test_our_numbers_stand_beside_the_papers(folder: Path):
    rows = read_csv(folder)
    assert len(rows) == 4 * 2
    for row in rows:
        assert row["skipped"] == ""
        assert float(row["difference"]) == pytest.approx(float(row["ours"]) - float(row["paper"]))
        assert (row["answers"], row["ran_on"]) == ("2", "bundled model, cpu, float32, tp 1 x bp 1")
    tpf = {row["setting"]: float(row["ours"]) for row in rows if row["metric"] == "TPF" and row["task"] == "gsm8k"}
    assert tpf["LoPA"] > tpf["vanilla"] > 1
    text = (folder / "table.md").read_text()
    assert "| D2F-Dream | LoPA | gsm8k | 10.1, " in text


def test_a_table_goes_on_row_by_row(folder: Path, monkeypatch: pytest.MonkeyPatch):
    before = {path: path.read_text() for path in folder.glob("*/samples.jsonl")}
    lost = folder / "D2F-Dream-LoPA-gsm8k" / "samples.jsonl"
    lines = before[lost].splitlines(keepends=True)
    lost.write_text(lines[0] + lines[1][:30])
    paper_tables.main(["table1", "--rows", "D2F-Dream-.*(gsm8k|mbpp)", "--out", str(folder), *SMALL])
    after = {path: path.read_text() for path in folder.glob("*/samples.jsonl")}
    assert {path for path in before if before[path] != after[path]} <= {lost}
    again = [json.loads(line) for line in after[lost].splitlines()]
    assert after[lost].startswith(lines[0])
    assert [line["text"] for line in again] == [json.loads(line)["text"] for line in lines]

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is missing, so no model is needed")

    monkeypatch.setattr("lopa_ascend.LLM", refuse, raising=False)
    paper_tables.main(["table1", "--rows", "D2F-Dream-.*(gsm8k|mbpp)", "--out", str(folder), *SMALL])


def test_rows_that_cannot_run_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    paper_tables.main(["table4", "--rows", "S(1|18)-gsm8k", "--out", str(tmp_path), *SMALL])
    reasons = {row["setting"]: row["skipped"] for row in read_csv(tmp_path)}
    assert reasons == {
        "S1": "needs 4 devices, and there are 2; --one-rank runs it on one",
        "S18": "needs 16 devices, and there are 2; --one-rank runs it on one",
    }
    checkpoint = ["--checkpoint", f"Dream={tmp_path}"]
    paper_tables.main(["table1", "--rows", "^D2F.*LoPA-gsm8k", "--out", str(tmp_path / "b"), *checkpoint, *SMALL])
    assert {row["skipped"] for row in read_csv(tmp_path / "b")} == {"no --checkpoint D2F-Dream=DIR"}
    assert "| none | " not in (tmp_path / "b" / "table.md").read_text()
    missing = ["--checkpoint", f"D2F-Dream={tmp_path / 'missing'}"]
    paper_tables.main(["table1", "--rows", "^D2F.*LoPA-gsm8k", "--out", str(tmp_path / "c"), *missing, *SMALL])
    (reason,) = {row["skipped"] for row in read_csv(tmp_path / "c")}
    assert str(tmp_path / "missing") in reason


def test_a_folder_of_something_else_is_refused_before_any_row_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def refuse(*_: object) -> None:
        raise AssertionError("the command is refused before a model is loaded")

    monkeypatch.setattr("lopa_ascend.LLM", refuse, raising=False)
    with pytest.raises(SystemExit):
        paper_tables.main(["table1", "--out", str(folder), *SMALL, "--limit", "1"])
    assert "problems.limit" in capsys.readouterr().err


def test_every_row_can_run_on_16_npus(monkeypatch: pytest.MonkeyPatch):
    """Those with full attention on several groups of branches in eager steps, all others in graphs."""
    monkeypatch.setattr("scripts.eval.paper_run.num_npus", lambda: 16)
    engine = {"device": "npu", "dtype": "bfloat16"}
    data = paper_tables.build_parser().parse_args(["table4"]).data
    options = Options(
        data=data, limit=1, runs=1, one_rank=False, prompt=None, examples=0, max_new_tokens=64, engine=engine
    )
    rows = [row for row in rows_of("table4") if row.task == "gsm8k"]
    modes = set()
    for row, plan in (
        TableRun(Path(), options, dict.fromkeys(models_of("table4"), Checkpoint(None, None))).check(rows).items()
    ):
        assert plan.setting is not None
        assert plan.engine is not None
        config = EngineConfig(**plan.engine)
        is_full = plan.setting.params.window_attention == "full" and config.branch_parallel_size > 1
        assert (config.graph_mode == "eager") == is_full, row.name
        modes.add(config.graph_mode)
    assert modes == {"eager", "npugraph_ex"}


def test_rows_of_many_devices_run_on_one_if_they_are_told_to(tmp_path: Path):
    paper_tables.main(["table3", "--rows", "Instruct-S18-gsm8k", "--one-rank", "--out", str(tmp_path), *SMALL])
    rows = {row["metric"]: row for row in read_csv(tmp_path)}
    assert set(rows) == {"Avg TPS", "Max TPS", "TPF", "latency"}
    assert all(float(row["ours"]) > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint", "Dream"], "must be MODEL=DIR or MODEL=DIR,ADAPTER, got 'Dream'"),
        (["--checkpoint", "DiffuCoder=x"], "Table 1 has no model 'DiffuCoder'; it has Dream, D2F-Dream"),
        (["--rows", "nothing"], "matches none of Dream-vanilla-mbpp"),
        (["--data", "absent"], "absent/gsm8k.jsonl: cannot be read"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [] if "--rows" in arguments else ["--rows", "gsm8k"]
    with pytest.raises(SystemExit):
        paper_tables.main(["table1", "--out", str(tmp_path / "out"), *rows, *arguments])
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("table", TABLES)
def test_whole_tables_run_end_to_end_on_ten_problems(table: str, tmp_path: Path):
    arguments = ["--limit", "10", "--max-new-tokens", "32", "--threads", "1", "--one-rank", "--out", str(tmp_path)]
    paper_tables.main([table, *arguments])
    rows = read_csv(tmp_path)
    assert len(rows) == len(rows_of(table)) * len(METRICS[table])
    for row in rows:
        if row["task"] == "minerva_math" and latex.missing_package():
            assert row["skipped"] == latex.missing_package()
        else:
            assert (row["answers"], row["skipped"]) == ("10", "")
