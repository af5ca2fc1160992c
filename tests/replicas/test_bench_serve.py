"""`bench serve` finds out what each process of a server on Ray takes."""

import json
import subprocess
import sys

import pytest

from tests.launch_scripts import ROOT

pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.mark.slow
@pytest.mark.multirank
def test_the_cpu_time_of_engines_on_ray_is_counted_by_part():
    flags = "--clients 2 --requests 4 --max-tokens 16 --json -- --replicas 2"
    command = [sys.executable, "-m", "scripts.bench", "serve", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    (level,) = json.loads(done.stdout)["levels"]
    assert level["tokens/s"] > 0
    assert {"proxy", "ingress", "replicas", "engines", "clients"} <= level["CPU, ms"].keys()
    assert level["CPU, ms"]["engines"] > 0
