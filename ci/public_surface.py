"""Writes the public surface as data: flags, fields, names of the Python API, HTTP routes, their schemas, and metrics.

tests/unit/test_public_surface.py compares it with tests/data/public_surface.json, so that whoever changes the surface
changes that file, and a reviewer sees it.

    python -m ci.public_surface            print it
    python -m ci.public_surface --write    put it into tests/data/public_surface.json
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import lopa_ascend
from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.config.decodings import all_decodings
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.cli import build_parser
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.flags import FLAGS
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import Ready, Stepped
from lopa_ascend.serve.link.spawn import EngineProcess
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import (
    BranchRecord,
    EngineStats,
    Fill,
    GenerationOutput,
    GraphStats,
    Progress,
    StepRecord,
    TokenRun,
    Traffic,
    Update,
)

FILE = Path(__file__).resolve().parents[1] / "tests" / "data" / "public_surface.json"
WIDTH = 90
"""Most columns of an object or list on one line, without its name."""
DATACLASSES = (EngineConfig, DecodingParams, GenerationOutput, Progress, StepRecord, BranchRecord, Fill, Update)
PARTS = ("flags", "dataclasses", "python", "routes", "openapi", "metrics")


def surface() -> dict[str, Any]:
    """The public surface by parts, as JSON."""
    found = {"flags": _flags(), "dataclasses": _dataclasses(), "python": _python(), **asyncio.run(_http())}
    result: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists, as in the file
    return result


def as_text(value: Any, indent: int = 0) -> str:
    """JSON with every object and list on one line if it fits into ``WIDTH``, else with one line for each item."""
    line = json.dumps(value, sort_keys=True)
    if not isinstance(value, dict | list) or len(line) + 2 * indent < WIDTH:
        return line
    items = [(f"{json.dumps(key)}: ", value[key]) for key in sorted(value)] if isinstance(value, dict) else []
    items += [("", item) for item in value] if isinstance(value, list) else []
    start, end, margin = line[0], line[-1], "  " * (indent + 1)
    body = ",\n".join(margin + name + as_text(item, indent + 1) for name, item in items)
    return f"{start}\n{body}\n{margin[2:]}{end}"


# ---- flags -----------------------------------------------------------------------------------------------------------


def _flags() -> dict[str, Any]:
    """Flags by their first spelling. ``default`` is what a server uses without the flag; null: see --help."""
    flags = {}
    for action in build_parser()._actions:
        flag = FLAGS.get(action.dest)
        flags[action.option_strings[0]] = {
            "also": action.option_strings[1:],
            "choices": action.choices,
            "default": None if flag is None else flag.setting.default,
            "metavar": action.metavar,
            "nargs": action.nargs,
        }
    return flags


# ---- Python ----------------------------------------------------------------------------------------------------------


def _dataclasses() -> dict[str, Any]:
    """Fields in order, as in the source, and names of properties. Those of decodings are among the parameters."""
    own = [each.parameters for _, variants in all_decodings() for each in variants]
    more: dict[type[Any], Iterable[str]] = {
        DecodingParams: dict.fromkeys(_declaration(field) for owner in own for field in dataclasses.fields(owner))
    }
    return {
        owner.__name__: {
            "fields": [*map(_declaration, dataclasses.fields(owner)), *more.get(owner, ())],
            "properties": sorted(name for name in dir(owner) if isinstance(getattr(owner, name), property)),
        }
        for owner in DATACLASSES
    }


def _declaration(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    return f"{field.name}: {field.type}{default}"


def _python() -> dict[str, Any]:
    """Public names of the package, and methods and attributes of ``LLM``."""
    # Read from the source, because importing it would import torch.
    source = (Path(lopa_ascend.__file__).parent / "llm.py").read_text("utf-8")
    (llm,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "LLM")
    functions = [node for node in llm.body if isinstance(node, ast.FunctionDef)]
    attributes = {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return {
        "lopa_ascend": sorted(lopa_ascend.__all__),
        "LLM": {f.name: ast.unparse(f.args) for f in functions if f.name == "__init__" or f.name[0] != "_"},
        "LLM attributes": sorted(name for name in attributes if name[0] != "_"),
    }


# ---- HTTP ------------------------------------------------------------------------------------------------------------


async def _http() -> dict[str, Any]:
    """Routes, OpenAPI document and metrics of the application, whose engine process was never started."""
    limits = Limits(
        vocab_size=100,
        mask_token_id=99,
        max_model_len=500,
        num_pages=100,
        max_num_seqs=4,
        max_num_batched_tokens=600,
        max_num_branches=15,
    )
    ready = Ready(limits, model_name="m", dtype="float32", device="cpu", kv_cache_memory=0, seed=0, ranks=())
    engine = EngineProcess(zmq.asyncio.Context.instance().socket(zmq.PAIR))
    client = EngineClient(engine, ready, Prompts(None, 100, 99, "m"), ServeConfig())
    try:
        app = create_app([client])
        _report_a_step(client)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            document = (await http.get("/openapi.json")).json()
            metrics = (await http.get("/metrics")).text
    finally:
        await client.close()
    routes = {route.path: sorted(route.methods or ()) for route in app.routes if isinstance(route, Route)}
    return {"routes": routes, "openapi": _openapi(document), "metrics": _metrics(metrics)}


def _report_a_step(client: EngineClient) -> None:
    """A message such as an engine with graphs and several ranks sends, so that every metric has a sample."""
    graphs = GraphStats(1, 0, 0, 1, 1, 0, 0, {"temperature": 1})
    client.stats = EngineStats(1, 0, 1, 0, 100, 1, traffic=(Traffic("scores", 1, 8),), graphs=graphs)
    update = Update("r-0", TokenRun((7,), (0.5,)), 1, 1, 9, 1, 0)
    for observer in client.observers:
        observer(Stepped([update], client.stats))


def _openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Operations with the schemas that they take and answer, and the fields of these schemas."""
    operations = {
        f"{method.upper()} {path}": {
            "body": sorted(_schema_names(operation.get("requestBody"))),
            "answers": {
                status: sorted({*answer.get("content", ()), *_schema_names(answer)})
                for status, answer in operation["responses"].items()
            },
        }
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    schemas, used, new = document["components"]["schemas"], set[str](), _schema_names(document["paths"])
    while new := new - used:
        used |= new
        new = {name for schema in new for name in _schema_names(schemas[schema])}
    fields = {
        name: {"fields": sorted(schemas[name]["properties"]), "required": sorted(schemas[name].get("required", ()))}
        for name in used
    }
    return {"operations": operations, "schemas": fields}


def _schema_names(part: Any) -> set[str]:
    """Names of the schemas that a part of the document refers to."""
    if isinstance(part, dict):
        own = {part["$ref"].rpartition("/")[2]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(_schema_names, part.values()))
    return set().union(*map(_schema_names, part)) if isinstance(part, list) else set()


def _metrics(text: str) -> dict[str, Any]:
    """Type and labels by name."""
    return {
        family.samples[0].name if family.type == "counter" else family.name: {
            "type": family.type,
            "labels": sorted({label for sample in family.samples for label in sample.labels}),
        }
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")  # prometheus_client adds these
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ci.public_surface", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write tests/data/public_surface.json instead of printing")
    args = parser.parse_args()
    text = as_text(surface()) + "\n"
    if args.write:
        FILE.write_text(text, "utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
