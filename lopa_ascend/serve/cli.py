"""Command line and configuration file -> ``ServeConfig``. Imports no torch: --help and mistakes answer at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.parallel.launch import Rendezvous, rank_in_environment
from lopa_ascend.serve.flags import DECODING_FLAGS, FLAGS, GROUPS, Flag, size

__all__ = ["DECODING_FLAGS", "ServeConfig", "build_parser", "parse_args"]

API_KEY = "LOPA_API_KEY"
"""The environment variable that stands for --api-key."""
EXAMPLES = """\
examples:
  python -m lopa_ascend.serve                                  the bundled model on http://127.0.0.1:8000
  python -m lopa_ascend.serve --model Dream-v0-Instruct-7B --lora-path D2F_Dream_Instruct_7B_Lora --dtype bfloat16
  python -m lopa_ascend.serve --num-branches 7 --tau-conf 0.8  more branches, bolder filling: fewer forward passes
"""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How to serve. Times are in seconds, sizes in bytes, files are paths. ``decoding`` holds the decoding parameters
    that were given: what a request does not set itself. ``api_key`` and the password are secrets and not shown."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    served_model_name: str | None = None
    chat_template: str | None = None
    max_num_queued_reqs: int = 1024
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    root_path: str = ""
    max_body_size: int = 8 * 2**20
    request_timeout: float | None = None
    watchdog_timeout: float = 60.0
    shutdown_timeout: float = 0.0
    enable_log_requests: bool = False
    uvicorn_log_level: str = "info"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    decoding: Mapping[str, Any] = field(default_factory=dict)


ENGINE_NAMES = {"lora_path": "lora", **{f.name: f.name for f in fields(EngineConfig) if f.name != "lora"}}
"""Flag -> field of EngineConfig."""

GRAPH_DEFAULTS = ("num_branches", "block_size", "window_attention", "confidence")
"""What graphs have room for unless a flag says otherwise: the decoding defaults of these names."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lopa_ascend.serve",
        usage="%(prog)s [--model DIR] [--host ADDRESS] [--port N] [FLAGS]",
        description="Serves a Dream model over an OpenAI-compatible HTTP API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these flags, without dashes; the command line wins"
    )
    for title, (description, flags) in GROUPS.items():
        group = parser.add_argument_group(title, description or None)
        for name, flag in flags.items():
            _add_flag(group, name, flag)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, flag: Flag) -> None:
    default = _default(name)
    note = "" if "(default" in flag.help or default in (None, (), "") else f" (default: {_shown(flag, default)})"
    option, text = _option(name), (flag.help + note).replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = None if flag.choices else flag.metavar
    nargs = "+" if flag.many else None
    group.add_argument(option, type=flag.kind, choices=flag.choices, metavar=metavar, nargs=nargs, help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(name: str) -> Any:
    owner: type = DecodingParams if name in DECODING_FLAGS else EngineConfig if name in ENGINE_NAMES else ServeConfig
    (default,) = (f.default for f in fields(owner) if f.name == ENGINE_NAMES.get(name, name))
    assert default is not MISSING
    return default


def _shown(flag: Flag, default: Any) -> str:
    if flag.kind is size:
        return f"{default >> 20}MiB"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def parse_args(argv: Sequence[str] | None = None) -> ServeConfig:
    """Exits with status 2 and a message that names the flag on a wrong value."""
    parser = build_parser()
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    try:
        if (file := given.pop("config", None)) is not None:
            given = {**_read_config(Path(file)), **given}
        if API_KEY in os.environ:
            given.setdefault("api_key", os.environ[API_KEY])
        return _serve_config(given)
    except ParameterError as error:
        parser.error(f"argument {_option(error.param)}{str(error).removeprefix(error.param)}")


def _serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """Raises ParameterError with the name of the flag at fault."""
    many = {name: tuple(value) for name, value in given.items() if FLAGS[name].many}
    decoding = {name: many.get(name, given[name]) for name in DECODING_FLAGS if name in given}
    defaults = DecodingParams(**decoding)
    lookaheads = defaults.lookaheads
    # Graphs are for what most requests will ask for.
    graphs = {f"graph_{name}": getattr(defaults, name) for name in GRAPH_DEFAULTS}
    engine = EngineConfig(**graphs | {name: given[flag] for flag, name in ENGINE_NAMES.items() if flag in given})
    if lookaheads > engine.max_num_branches:
        hint = "" if "num_branches" in given else " by default"
        message = f"is {lookaheads}{hint}, which exceeds --max-num-branches {engine.max_num_branches}"
        raise ParameterError("num_branches", message)
    if rank_in_environment() is not None:
        Rendezvous.from_environment().check_world_size(engine)
    if given.get("api_key") == "":
        raise ParameterError("api_key", f"is empty; leave it out ({API_KEY} as well) to serve without one")
    for name, needed in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
        if name in given and needed not in given:
            raise ParameterError(name, f"needs {_option(needed)}")
    for name in ("ssl_keyfile_password", "ssl_ca_certs"):
        if name in given and "ssl_certfile" not in given:
            raise ParameterError(name, "needs --ssl-certfile")
    http = {name: value for name, value in given.items() if name not in ENGINE_NAMES and name not in DECODING_FLAGS}
    return ServeConfig(engine=engine, **http, decoding=decoding)


# ---- the configuration file ------------------------------------------------------------------------------------------


def _read_config(file: Path) -> dict[str, Any]:
    """The values in a YAML file, by flag; null counts as absent.

    Raises:
        ParameterError: of ``config``; it cannot be read, or holds an unknown key or a wrong value.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParameterError("config", f"{file}: {error}") from error
    if not isinstance(values, dict | None):
        raise ParameterError("config", f"{file}: expected flags and values, found {type(values).__name__}")
    result = {}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        if name not in FLAGS:
            close = get_close_matches(name, FLAGS, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ParameterError("config", f"{file}: unknown key {str(key)!r}{hint}")
        if name in result:
            raise ParameterError("config", f"{file}: {str(key)!r} is there twice")
        if value is not None:
            result[name] = _from_yaml(f"{file}: {key}", FLAGS[name], value)
    return result


def _from_yaml(where: str, flag: Flag, value: object) -> Any:
    if flag.many:
        entries = value if isinstance(value, list) and value else [value]
        return [_one_from_yaml(where, flag, entry) for entry in entries]
    return _one_from_yaml(where, flag, value)


def _one_from_yaml(where: str, flag: Flag, value: object) -> Any:
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise ParameterError("config", f"{where}: must be true or false, got {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ParameterError("config", f"{where}: must be one value, got {value!r}")
    try:
        parsed = flag.kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ParameterError("config", f"{where}: {error}") from error
    if flag.choices and parsed not in flag.choices:
        raise ParameterError("config", f"{where}: unknown value {value!r}; choose one of {', '.join(flag.choices)}")
    return parsed
