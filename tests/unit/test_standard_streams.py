"""A process whose output nobody takes goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from lopa_ascend.process.standard_streams import open_closed_streams, write_as_possible
open_closed_streams()
write_as_possible()
for _ in range(40):
    print("greeting" * 1000)
    print("log" * 1000, file=sys.stderr, flush=True)
sys.stdin.read()
with open("/dev/null") as file:
    assert file.fileno() > 2, file.fileno()
sys.stdout.flush()
os._exit(7)
"""


@pytest.mark.parametrize(
    "redirection",
    [
        "",
        ">&-",
        "2>&-",
        "<&-",
        "<&- >&- 2>&-",
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
        "1</dev/null",
        "2>&1 | true",
        "2>&1 | sleep 5",  # full, and nobody reads
    ],
)
def test_a_process_goes_on_whatever_becomes_of_its_output(redirection: str):
    script = f'set -o pipefail; "$0" -c "$1" {redirection}'
    result = subprocess.run(
        ["bash", "-c", script, sys.executable, PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert result.returncode == 7, result.stderr[-500:]
    if not redirection:
        assert result.stdout == (b"greeting" * 1000 + b"\n") * 40
        assert result.stderr == (b"log" * 1000 + b"\n") * 40
