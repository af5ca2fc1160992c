"""Profiles of a running server: which requests are refused, and what every rank writes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM
from lopa_ascend.config import ParameterError
from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import complete, refused


def generate(server: ServerProcess) -> None:
    complete(server.openai, "Tom has 3 boxes", max_tokens=24, ignore_eos=True)


def ranges_in(trace: Path) -> set[str]:
    """The names of the marked ranges of a trace."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_server_without_a_folder_records_nothing(server: ServerProcess):
    for route in ("/start_profile", "/stop_profile"):
        error = refused(server.http.post(route), 404)
        assert error["code"] == "no_profile_dir"
        assert "--profile-dir" in error["message"]


def test_profiles_of_chosen_ranks(model_dir: Path, tmp_path: Path):
    folder = tmp_path / "traces"
    ranks = ("--branch-parallel-size", "2", "--num-branches", "1")
    with running("--model", str(model_dir), "--profile-dir", str(folder), *ranks) as server:
        post = server.http.post
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"ranks": [2]}, "ranks"),
            ({"ranks": []}, "ranks"),
            ({"num_steps": 0}, "num_steps"),
            ({"num_steps": 21}, "num_steps"),
            ({"delay_steps": -1}, "delay_steps"),
            ({"output_dir": "/elsewhere"}, "output_dir"),
        ]
        for body, param in wrong:
            assert refused(post("/start_profile", json=body))["param"] == param
        assert "POST /start_profile" in refused(post("/stop_profile"), 409)["message"]

        for number in range(9):
            (folder / f"20200101-00000{number}-000000").mkdir()
        own = {"notes", "20200101-000000-00000", "2020-profile"}
        for name in own:
            (folder / name).mkdir()
        started = post("/start_profile", json={"ranks": [1, 0, 1], "num_steps": 2}).raise_for_status().json()
        assert (started["ranks"], started["delay_steps"], started["num_steps"]) == ([0, 1], 0, 2)
        assert "POST /stop_profile" in refused(post("/start_profile"), 409)["message"]
        generate(server)  # more steps than two: the profile ends by itself
        stopped = post("/stop_profile").raise_for_status().json()
        refused(post("/stop_profile"), 409)
        kept = {f"20200101-00000{number}-000000" for number in range(2, 9)}  # with the new one the newest eight
        assert {path.name for path in folder.iterdir()} == {*kept, *own, started["profile"]}
        assert [name.partition(".")[0] for name in stopped["traces"]] == [
            f"{started['profile']}/rank{rank}" for rank in (0, 1)
        ]
        for name in stopped["traces"]:
            # The first step warms the profiler up.
            assert ranges_in(folder / name) >= {"ProfilerStep#1", "ProfilerStep#2", "forward", "score", "exchange"}
            assert "ProfilerStep#3" not in ranges_in(folder / name)

        post("/start_profile", json={"ranks": [1]}).raise_for_status()
        assert post("/stop_profile").json() == {"traces": []}  # no step was made

        folder.rename(tmp_path / "moved")
        folder.touch()
        post("/start_profile", json={"ranks": [1]}).raise_for_status()
        generate(server)  # a rank that cannot write goes on
        assert "rank 1 (bp 1, tp 0)" in refused(post("/stop_profile"), 500)["message"]
        folder.unlink()
        (tmp_path / "moved").rename(folder)

        post("/start_profile", json={"ranks": [1]}).raise_for_status()
        generate(server)
        status, _ = server.stop(signal.SIGTERM)
    assert status == 0
    (last,) = set(folder.rglob("*.json")) - {folder / name for name in stopped["traces"]}
    assert last.name.startswith("rank1.")
    assert "forward" in ranges_in(last)


def test_a_folder_that_cannot_be_is_refused(model_dir: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    for where in ("file", "file/below"):
        with pytest.raises(ParameterError, match=r"file\S* cannot be a folder") as caught:
            LLM(model_dir, profile_dir=str(tmp_path / where))
        assert caught.value.param == "profile_dir"
