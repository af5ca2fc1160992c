"""Flags and the configuration file of the server."""

import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from lopa_ascend.config import DecodingParams, EngineConfig, GraphParams, ParameterError
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from lopa_ascend.serve import cli
from lopa_ascend.serve.cli import parse_args
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.flags import DECODING_FLAGS, FLAGS, USUAL


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(cli.API_KEY, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message with which a command line is refused."""
    with pytest.raises(SystemExit) as stop:
        parse_args(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_no_flags_are_the_defaults_and_what_the_bundled_model_recommends():
    recommended = recommended_decoding(DEMO_MODEL)
    graphs = GraphParams(num_branches=recommended["num_branches"], block_size=recommended["block_size"])
    engine = EngineConfig(graph_params=graphs)
    assert parse_args([]) == ServeConfig(engine=engine, decoding=recommended)
    assert parse_args(["--model", "absent"]) == ServeConfig(engine=EngineConfig(model="absent"))


def test_flags_reach_their_fields():
    config = parse_args(
        "--model M --lora-path L --max-num-seqs 4 --kv-cache-memory 1.5GiB --no-enable-prefix-caching --seed 7 "
        "--threads 2 --max-body-size 4096 --watchdog-timeout 5 --tau-conf 0.8 --stop a b --ignore-eos "
        "--eos-token-id 1 2 --stop c".split()
    )
    assert config.engine == EngineConfig(
        model="M", lora="L", max_num_seqs=4, kv_cache_memory=3 * 2**29, enable_prefix_caching=False, seed=7, threads=2
    )
    assert (config.max_body_size, config.watchdog_timeout) == (4096, 5.0)
    assert config.decoding == {
        "tau_conf": 0.8,
        "stop": ("a", "b", "c"),
        "ignore_eos": True,
        "eos_token_id": (1, 2),
    }


def test_a_chosen_number_of_branches_leaves_the_graphs_their_own():
    config = parse_args(["--model", "M", "--num-branches", "auto"])
    assert config.decoding == {"num_branches": "auto"}
    assert config.engine == EngineConfig(model="M")


def test_graphs_follow_the_decoding_defaults():
    flags = "--num-branches 5 --block-size 8 --confidence margin --window-attention full --branch-acceptance verified"
    followed = GraphParams(5, 8, "full", "margin", "verified")
    assert parse_args(["--model", "M", *flags.split()]).engine.graph_params == followed
    auto = ["--model", "M", "--num-branches", "auto", "--branch-acceptance"]
    for kind in ("published", "verified", "exact"):
        assert parse_args([*auto, kind]).engine.graph_params == GraphParams(branch_acceptance=kind)


def test_every_setting_has_one_flag():
    alone = {"alg_temp", "tail_fraction", "score_window", "creation_weight", "eos_last", "finish_at_eos"}
    assert set(DecodingParams.names()) - {"seed", "top_logprobs", "structured_outputs"} - alone == DECODING_FLAGS.keys()
    settings = {f.name for f in fields(ServeConfig)} - {"engine", "decoding"}
    engine = {"lora_path" if f.name == "lora" else f.name for f in fields(EngineConfig) if f.name != "graph_params"}
    assert settings | engine | DECODING_FLAGS.keys() == FLAGS.keys()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--tau-conf 2", "0 to 1"),
        ("--port 70000", "65535"),
        ("--port x", "65535"),
        ("--decoding x", "lopa"),
        ("--tau-con 1", "unknown argument '--tau-con'; did you mean --tau-conf?"),
        ("--tp-size=4", "unknown argument '--tp-size'; here it is --tensor-parallel-size"),
        ("--enforce-eager", "here it is --graph-mode eager"),
        ("--xyz 1", "unknown argument '--xyz'"),
        ("--num-branches x", "int"),
        ("--seed -1", "0 to 9223372036854775807"),
        ("--seed 9223372036854775808", "0 to 9223372036854775807"),
        ("--threads 0", "1 to"),
        ("--max-num-seqs 0", "at least 1"),
        ("--max-num-seqs 3000000000", "must be at most 2147483647, got 3000000000"),
        ("--window-attention full --branch-parallel-size 2 --graph-mode inductor", "do not go together in graph mode"),
        (
            "--window-attention full --branch-parallel-size 2 --graph-mode inductor",
            "graph mode eager, where steps run op by op",
        ),
        ("--max-num-queued-reqs -1", "0 to"),
        ("--kv-cache-memory 1GB", "GiB"),
        ("--kv-cache-memory -1", "GiB"),
        ("--kv-cache-memory 0", "1 to"),
        ("--watchdog-timeout 1", "2 to"),
        ("--request-timeout 0", "seconds"),
        ("--shutdown-timeout nan", "0 to"),
        ("--host=", "0.0.0.0"),
        ("--ssl-keyfile k", "--ssl-certfile"),
        ("--ssl-certfile c", "--ssl-keyfile"),
        ("--ssl-ca-certs c", "--ssl-certfile"),
        ("--top-logprobs 3", "it is no flag, but a field of requests"),
        ("--allowed-origins http://[bad", "is not * or an origin"),
        ("--allowed-origins https://example.org/", "without a path"),
        ("--allowed-origins example.org", "such as https://example.org"),
        ("--allowed-origins https://Example.org", "in lower case"),
        ("--allowed-origins https://*.example.org", "a * inside"),
        ("--allowed-origins http://localhost:*", "a * inside"),
        ("--allowed-origins https://example.org:443", "the usual port"),
        ("--allowed-origins https://b\u00fccher.example", "ASCII"),
        ("--root-path /\u00e9", "percent-encoded where not ASCII"),
        ("--root-path models", "is not a path of a URL such as /models/demo"),
        ("--root-path /models/", "is not a path of a URL"),
        ("--model " + "a" * 300, "File name too long"),
    ],
)
def test_wrong_values_name_their_flag(capsys: pytest.CaptureFixture[str], argv: str, expected: str):
    message = refusal(capsys, *argv.split())
    assert argv.split()[0].partition("=")[0] in message
    assert expected in message


def test_more_branches_than_allowed_name_both_flags(capsys: pytest.CaptureFixture[str]):
    for argv in (["--max-num-branches", "2"], ["--max-num-branches", "2", "--num-branches", "4"]):
        message = refusal(capsys, *argv)
        assert "--num-branches" in message
        assert "--max-num-branches 2" in message
    message = refusal(capsys, "--max-num-branches", "2", "--num-branches", "auto")
    assert "--num-branches: is 3, which exceeds --max-num-branches 2" in message
    assert parse_args(["--max-num-branches", "2", "--num-branches", "2"]).engine.max_num_branches == 2
    assert parse_args(["--max-num-branches", "0", "--decoding", "d2f"]).engine.max_num_branches == 0


def test_graphs_are_compiled_for_a_decoding_that_they_can_run():
    model = ["--model", "M"]
    assert parse_args([*model, "--window-attention", "full"]).engine.graph_params.window_attention == "full"
    with pytest.raises(ParameterError, match='window_attention.*"full" and branch_parallel_size 2'):
        EngineConfig(graph_mode="inductor", graph_params=GraphParams(window_attention="full"), branch_parallel_size=2)
    for decoding in (["--decoding", "parallel"], ["--base", "parallel"]):
        config = parse_args([*model, *decoding, "--block-size", "8"])
        assert config.engine == parse_args(model).engine
        assert DecodingParams(**config.decoding).window_attention == "full"


def test_config_file_and_command_line(tmp_path: Path):
    file = write(
        tmp_path / "serve.yaml",
        "port: 9000\nmax-num-seqs: 4\nkv_cache_memory: 64MiB\ntau_conf: 0.8\nstop: ['- x', y]\nignore-eos: true\n"
        "enable_prefix_caching: false\nrequest-timeout: 30\nlora-path: null\nserved-model-name: '7'\neos_token_id: 3\n"
        "model: M\n",
    )
    config = parse_args(["--config", file, "--port", "1", "--enable-prefix-caching", "--tau-conf", "0.7"])
    assert config == ServeConfig(
        engine=EngineConfig(model="M", max_num_seqs=4, kv_cache_memory=2**26, enable_prefix_caching=True),
        served_model_name="7",
        port=1,
        request_timeout=30.0,
        decoding={"tau_conf": 0.7, "stop": ("- x", "y"), "ignore_eos": True, "eos_token_id": (3,)},
    )
    assert parse_args(["--config", write(tmp_path / "empty.yaml", "")]) == parse_args([])
    assert parse_args(["--config", write(tmp_path / "none.yaml", "stop: []")]).decoding["stop"] == ()
    merged = write(tmp_path / "merged.yaml", "<<: {port: 1, tau_conf: 0.5}\nport: 2\n")
    assert parse_args(["--config", merged]) == parse_args(["--port", "2", "--tau-conf", "0.5"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-num-seq: 4", "max-num-seqs?"),
        ("config: x.yaml", "unknown key 'config'"),
        ("1: 2", "unknown key '1'"),
        ("port: 70000", "port: must be"),
        ("port: [1]", "port: must be"),
        ("port: true", "port: must be"),
        ("model: yes", "model: must be"),
        ("api_key: 0123", "api_key: must be a text; put it in quotes"),
        ("stop: [1]", "stop: must be a text"),
        ("port: 1\nport: 2", "'port' is there twice"),
        ("served_model_name: 2026-02-30", "day is out of range for month"),
        ("[" * 3000, "64 levels"),
        ("# x\n" * 20_000, "has 80000 bytes, expected at most 65536"),
        ('host: "a\\0b"', "a NUL character"),
        ("ignore_eos: 1", "ignore_eos: must be true or false"),
        ("dtype: int8", "dtype: unknown value 'int8'; choose one of auto, float32, bfloat16"),
        ("tau-conf: 0.5\ntau_conf: 0.6", "twice"),
        ("- port", "expected flags"),
        ("port: [", "serve.yaml"),
        ("stop: [1, [2]]", "stop: must be"),
    ],
)
def test_wrong_config_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str):
    message = refusal(capsys, "--config", write(tmp_path / "serve.yaml", text))
    assert "--config" in message
    assert "serve.yaml" in message
    assert expected in message


def bomb(line: str, last: str) -> str:
    """A configuration whose lines each repeat the one before nine times: billions of values."""
    return (
        "a0: &a0 {x: 1}\n" + "".join(line.format(n=n, names=",".join([f"*a{n - 1}"] * 9)) for n in range(1, 12)) + last
    )


@pytest.mark.parametrize(
    "line", ["a{n}: &a{n} [{names}]\n", "a{n}: &a{n} {{<<: [{names}]}}\n", "? &a{n} [{names}]\n: 1\n"]
)
def test_aliases_repeat_a_limited_number_of_values(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str):
    start = time.monotonic()
    message = refusal(capsys, "--config", write(tmp_path / "serve.yaml", bomb(line, "port: 1\n")))
    assert time.monotonic() - start < 2
    assert "expected at most 4096 values, with those that aliases repeat" in message
    assert re.search(r"line \d+, column", message)


def test_a_pipe_is_no_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    os.mkfifo(tmp_path / "serve.yaml")  # reading it would wait for somebody to write
    assert "is a pipe" in refusal(capsys, "--config", str(tmp_path / "serve.yaml"))


def test_byte_order_marks_of_files_are_no_part_of_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert parse_args(["--config", write(tmp_path / "serve.yaml", "\ufeffport: 1\n")]).port == 1
    monkeypatch.setenv("LOPA_API_KEY", "\ufeffkey\n")  # as $(cat FILE) has it
    assert parse_args([]).api_key == "key"


def test_values_of_a_config_file_are_checked_together(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    message = refusal(capsys, "--config", write(tmp_path / "serve.yaml", "tau_conf: 2"))
    assert "--tau-conf" in message
    assert "does-not-exist.yaml" in refusal(capsys, "--config", "does-not-exist.yaml")


def test_the_key_comes_from_the_environment_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cli.API_KEY, "from-env")
    assert parse_args([]).api_key == "from-env"
    assert parse_args(["--api-key", "given"]).api_key == "given"
    assert "given" not in repr(parse_args(["--api-key", "given", "--ssl-certfile", "c", "--ssl-keyfile", "k"]))
    monkeypatch.setenv(cli.API_KEY, "from a file\r\n")
    assert parse_args([]).api_key == "from a file"
    for wrong in ("", " \n", "k\udcff"):
        monkeypatch.setenv(cli.API_KEY, wrong)
        assert "--api-key" in refusal(capsys)
    monkeypatch.delenv(cli.API_KEY)
    assert "--model" in refusal(capsys, "--model", "M\udce9")


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def listed(arguments: str) -> list[str]:
    """The flags in the output of a command line."""
    code = (
        f"import sys\nfrom lopa_ascend.serve.cli import parse_args\ntry:\n    parse_args(['{arguments}'])\n"
        "finally:\n    assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return re.findall(r"^  (?:-\w, )?--([\w-]+)", result.stdout, re.MULTILINE)


def test_help_names_the_usual_flags_and_help_all_every_flag_without_torch():
    usual, every = listed("--help"), listed("--help-all")
    assert sorted(usual) == sorted(["help", "config", "help-all", *(flag_name(name) for name in USUAL)])
    assert sorted(every) == sorted(["help", "config", "help-all", *(flag_name(name) for name in FLAGS)])
    assert len(usual) <= 36


def test_help_has_groups():
    text = cli.build_parser().format_help()
    titles = ("model:", "engine:", "server:", "TLS:", "decoding defaults:")
    assert all(f"\n{title}\n" in text for title in titles)
    assert "for research" not in text
    assert "\ndecoding, for research:\n" in cli.build_parser(shown=None).format_help()


def test_help_breaks_no_flag_name(monkeypatch: pytest.MonkeyPatch):
    for columns in range(60, 120, 5):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = cli.build_parser(shown=None).format_help().splitlines()
        assert [line for line in lines if line.endswith("-")] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "::1"], "argument --uds: takes the place of an address; leave --host out"),
        (["--port", "0"], "leave --port out"),
        (["--replicas", "2"], "leave --replicas out"),
        (["--uds", ""], "argument --uds: is empty"),
    ],
)
def test_a_unix_socket_goes_with_no_address_and_no_replicas(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert parse_args(["--uds", "a.sock"]).uds == "a.sock"
    assert message in refusal(capsys, "--uds", "a.sock", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-replicas", "2"], "argument --max-replicas: needs --replicas"),
        (["--replicas", "3", "--max-replicas", "2"], "argument --max-replicas: is 2, which is less than --replicas 3"),
        (["--replicas", "0"], "argument --replicas: must be an integer from 1 to 4096"),
    ],
)
def test_numbers_of_replicas_that_cannot_be(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert message in capsys.readouterr().err
