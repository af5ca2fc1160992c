"""Runs the launch scripts with an interpreter that starts nothing, so that tests see what would be started."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ("--node-rank", "1", "--master-addr", "10.0.0.1", "--interface", "eth0")
CPU = ("--device", "cpu", "--tp", "2", "--bp", "1")
# Takes the place of the interpreter: runs the checks, and records everything else that it was asked to run.
INTERPRETER = """\
#!{python}
import json, os, sys, time
if sys.argv[1] == "-c":
    sys.exit({missing})
if sys.argv[1].endswith("scripts/launch/__main__.py"):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
started = {{"command": sys.argv[1:], "environment": dict(os.environ)}}
with open(os.path.join("{folder}", f"{{os.getpid()}}.json"), "w") as file:
    json.dump(started, file)
if sys.argv[-2] == "--fail" and sys.argv[-1] == sys.argv[sys.argv.index("--port") + 1]:
    sys.exit(3)
time.sleep(float(os.environ.get("LINGER", 0)))
"""


class Scripts:
    """Runs launch scripts with an interpreter that starts nothing."""

    def __init__(self, folder: Path, missing: int = 0):
        self.folder, self.python = folder, folder / "python"
        self.python.write_text(INTERPRETER.format(python=sys.executable, folder=folder, missing=missing))
        self.python.chmod(0o755)

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        # Not this process's own environment: what it sets for OpenMP would win over what the scripts set.
        return {"PATH": os.environ["PATH"], "PYTHON": str(self.python), **variables}

    def run(self, name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / f"scripts/launch/{name}.sh"), *flags]
        environment = self.environment(variables)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=self.folder)

    def started(self) -> list[tuple[dict[str, str], list[str]]]:
        """Environment and command of each program that was started since the last call, by command."""
        files = list(self.folder.glob("*.json"))
        runs = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        runs.sort(key=lambda run: run["command"])
        return [(run["environment"], run["command"]) for run in runs]

    def dry_run(self, name: str, *flags: str, **variables: str) -> list[tuple[dict[str, str], list[str]]]:
        """Environment and command of each server, as a shell reads what is printed."""
        done = self.run(name, "--dry-run", *flags, **variables)
        assert done.returncode == 0, done.stderr
        assert self.started() == []
        subprocess.run(["bash", "-euc", done.stdout], env={}, check=True, timeout=60)
        own = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}  # bash's and Python's
        return [({k: v for k, v in env.items() if k not in own}, command) for env, command in self.started()]
