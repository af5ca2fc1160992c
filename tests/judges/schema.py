"""Judge: schemathesis, which sends requests by the server's own /openapi.json, finds no fault."""

from __future__ import annotations

from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, serving
from tests.judges.tools import run_tool

# 400 is the right answer to values that are good one by one and not together, such as a prompt and a max_tokens that
# are longer than the model: a JSON schema cannot express them.
SETTINGS = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "503"]
"""


def judge(options: Options, report: Report) -> None:
    # Schemathesis asks for many long answers; short ones do, because what is judged is their form.
    with serving(options.url, options.out / "schema.log", "--max-new-tokens", "16") as server:
        settings = options.out / "schemathesis.toml"
        settings.write_text(SETTINGS)
        arguments = ["--config-file", str(settings), "run", f"{server.url}/openapi.json"]
        arguments += ["--max-examples", str(options.examples), "--seed", str(options.seed), "--request-timeout", "120"]
        done = run_tool("schemathesis", *arguments, options=options)
        (options.out / "schemathesis.txt").write_text(done.stdout)
        summary = done.stdout.strip().splitlines()[-1:]
        what = f"schemathesis with {options.examples} examples an endpoint"
        report.check(what, done.returncode == 0, summary if done.returncode == 0 else done.stdout[-6000:])
        check_afterwards(server, report)
