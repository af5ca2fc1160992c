"""`bench serve` with stand-ins for engines: the rest of the server is the real one."""

import json
import subprocess
import sys

import pytest

from tests.launch_scripts import ROOT

pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.mark.slow
@pytest.mark.multirank
def test_stand_ins_answer_at_their_pace_behind_two_ingresses():
    flags = "--stand-ins 2 --ingresses 2 --clients 2 --requests 4 --max-tokens 40 --json"
    command = [sys.executable, "-m", "scripts.bench", "serve", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["tpf"], level["pieces"]) == (10.0, 4)
    assert level["answer_p50_ms"] > 4 * 36
    assert {"proxy", "ingress", "replicas", "clients"} <= level["cpu_ms"].keys()
