"""`bench serve` finds out what each process of a server on Ray takes."""

import subprocess
import sys

import pytest

from tests.launch_scripts import ROOT

pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.mark.slow
@pytest.mark.multirank
def test_the_cpu_time_of_engines_on_ray_is_counted_by_part():
    flags = "--clients 2 --requests 4 --max-tokens 16 -- --replicas 2"
    command = [sys.executable, "-m", "scripts.bench", "serve", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    headings, _, cells = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    level = dict(zip(headings, cells, strict=True))
    assert float(level["tokens/s"]) > 0
    used = {part: float(seconds) for part, seconds in (each.split(" ") for each in level["CPU, ms"].split(", "))}
    assert {"proxy", "ingress", "replicas", "engines", "clients"} <= used.keys()
    assert used["engines"] > 0
