"""Reads the command line and the configuration file into a ``ServeConfig``.

Neither torch nor FastAPI is imported here, so that --help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lopa_ascend.admission import check_decoding
from lopa_ascend.config import (
    ConfigError,
    DecodingParams,
    EngineConfig,
    GraphParams,
    ParameterError,
    fitting_defaults,
)
from lopa_ascend.config.files import MAX_DEPTH, read_text, repeated, shown
from lopa_ascend.config.kinds import AnyText, Boolean, Strings, Words
from lopa_ascend.config.presets import LIST, find_preset, presets_text
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import family_of, recommended_decoding
from lopa_ascend.hub import on_this_machine
from lopa_ascend.parallel.launch import Rendezvous, rank_in_environment
from lopa_ascend.serve.config import JsonObject, ServeConfig
from lopa_ascend.serve.flags import (
    DECODING_FLAGS,
    ENGINE_FLAGS,
    FLAGS,
    SERVE_FLAGS,
    USUAL,
    Flag,
    add_flags,
    field_values,
    option,
)

COMMAND = "lopa-serve"
"""What pip installs, and pyproject.toml names."""
API_KEY = "LOPA_API_KEY"
"""The environment variable in place of --api-key."""
MAX_CONFIG = 2**16
"""Bytes of the largest configuration file; PyYAML reads some hundred kilobytes a second."""
MAX_VALUES = 2**12
"""Most values in a configuration file."""
OTHERS_FLAGS = {
    "model_path": "--model",
    "tp": "--tensor-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "context_length": "--max-model-len",
    "max_running_requests": "--max-num-seqs",
    "max_num_reqs": "--max-num-seqs",
    "mem_fraction_static": "--gpu-memory-utilization",
    "profiler_config": "--profile-dir",
    "enable_chunked_prefill": "missing, because a prompt is one pass: docs/troubleshooting.md, What is not supported",
    "enforce_eager": "--graph-mode eager",
    "diffusion_block_size": "--block-size",
    "tokenizer": "--model, whose directory has the tokenizer",
    "revision": "--model ORG/NAME@REVISION",
    "download_dir": "the environment variable HF_HOME",
    "trust_remote_code": "missing, because code of a repository is never run",
}
"""Flags of vLLM, SGLang and Diffulex, and what does the same here."""
EXAMPLES = """\
examples:
  %(prog)s                                  the bundled model on http://127.0.0.1:8000
  %(prog)s --model Dream-org/Dream-v0-Instruct-7B --lora-path DIR --dtype bfloat16
  %(prog)s --preset S13 --tau-conf 0.8      the decoding of a row of the LoPA paper, but one value
  %(prog)s --num-branches 7 --tau-conf 0.8  fewer forward passes, a little less accurate
  %(prog)s --replicas 2                     two engines behind one address, on Ray Serve
"""


class _HelpAll(argparse.Action):
    def __call__(self, *_: object) -> None:
        build_parser(shown=None).print_help()
        raise SystemExit(0)


def build_parser(shown: Collection[str] | None = USUAL) -> argparse.ArgumentParser:
    """``shown`` names the flags that --help shows; None: all."""
    parser = argparse.ArgumentParser(
        prog=COMMAND if Path(sys.argv[0]).stem == COMMAND else "python -m lopa_ascend.serve",
        usage="%(prog)s [--model MODEL] [--host ADDRESS] [--port N] [FLAGS]",
        description="Serves a diffusion language model over an OpenAI-compatible HTTP API.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with any of the flags, written without dashes in front; the command line wins",
    )
    parser.add_argument("--help-all", nargs=0, action=_HelpAll, default=None, help="show all flags and exit")
    add_flags(parser, shown=shown)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> ServeConfig:
    """The configuration that a command line asks for; ``argv`` None: that of this process.

    A wrong value ends the process with status 2 and names the flag; "--preset list" ends it with status 0.
    """
    parser = build_parser()
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown_argument(unknown))
    given = {name: value for name, value in vars(known).items() if value is not None}
    try:
        if (file := given.pop("config", None)) is not None:
            given = {**_read_config(Path(file)), **given}
        if given.get("preset") == LIST:
            sys.stdout.write(presets_text())
            parser.exit()
        return _serve_config(_with_key(given))
    except ParameterError as error:
        parser.error(f"argument {error.at(option(error.param))}")


def config_of(values: Mapping[str, Any], origin: str) -> ServeConfig:
    """The configuration of flags, a YAML file and LOPA_API_KEY. ``origin`` says in messages where values stand."""
    return _serve_config(_with_key(_checked(values, origin)))


def _with_key(given: dict[str, Any]) -> dict[str, Any]:
    if API_KEY in os.environ:
        given.setdefault("api_key", _key_from_environment())
    # One that was read from a file may begin with a byte order mark, and ends with a newline: no header has them.
    if "api_key" in given:
        given["api_key"] = given["api_key"].removeprefix("\ufeff").strip(string.whitespace)
    return given


def _key_from_environment() -> str:
    """Raises ParameterError, which does not show the key, if it is not text."""
    key = os.environ[API_KEY]
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("api_key", f"is not text in UTF-8, in {API_KEY} at character {error.start}") from None
    return key


def _unknown_argument(arguments: Sequence[str]) -> str:
    """The message for arguments that no flag takes: it names the first flag, and the one that was meant."""
    first = next((argument for argument in arguments if argument.startswith("-")), arguments[0]).partition("=")[0]
    return f"unknown argument {first!r}{_meant(first.lstrip('-').replace('-', '_'))}"


def _meant(name: str) -> str:
    """The end of a message: which flag an unknown name stands for, if one is like it."""
    if name in OTHERS_FLAGS:
        return f"; here it is {OTHERS_FLAGS[name]}"
    if name.removeprefix("no_") in DecodingParams.names():
        return "; it is no flag, but a field of requests and a parameter of the Python API"
    close = get_close_matches(name, FLAGS, n=1)
    return f"; did you mean {option(close[0])}?" if close else ""


def _serve_config(given: Mapping[str, Any]) -> ServeConfig:
    engine = EngineConfig(**field_values(given, ENGINE_FLAGS))
    if rank_in_environment() is not None:
        Rendezvous.from_environment().check_world_size(engine)
    _check_access(given)
    _check_replicas(given)
    engine = on_this_machine(engine)
    model = engine.model or DEMO_MODEL
    decoding = field_values(given, DECODING_FLAGS)
    if "preset" in given:
        decoding = find_preset(given["preset"]).merged(decoding)
    else:
        decoding = {**_recommended(model, decoding), **decoding}
    params = DecodingParams(**decoding)
    _check_family(model, params)
    # Graphs are compiled for what most requests will ask for.
    engine = replace(engine, graph_params=GraphParams.of(params))
    _check_lookaheads(given, params, engine)
    return ServeConfig(engine=engine, decoding=decoding, **field_values(given, SERVE_FLAGS))


def _recommended(model: str | Path, decoding: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's directory recommends, as far as it goes with the flags."""
    try:
        return fitting_defaults(recommended_decoding(model), decoding)
    except ConfigError as error:
        raise ParameterError("model", f"cannot be served: {error}") from error


def _check_family(model: str | Path, params: DecodingParams) -> None:
    """Refuses default decoding parameters that the model's family cannot run."""
    try:
        family = family_of(model)
    except ConfigError as error:
        raise ParameterError("model", f"cannot be served: {error}") from error
    if family is not None:
        check_decoding(params, family.properties)


def _check_lookaheads(given: Mapping[str, Any], params: DecodingParams, engine: EngineConfig) -> None:
    """Refuses a default number of lookahead branches that no request may ask for."""
    if params.lookaheads <= engine.max_num_branches:
        return
    if "num_branches" in given:
        origin = ""
    elif "preset" in given:
        origin = f" by preset {given['preset']}"
    else:
        origin = " by default"
    message = f"is {params.lookaheads}{origin}, which exceeds --max-num-branches {engine.max_num_branches}"
    raise ParameterError("num_branches", message)


def _check_replicas(given: Mapping[str, Any]) -> None:
    if "max_replicas" in given and "replicas" not in given:
        raise ParameterError("max_replicas", "needs --replicas")
    if "max_replicas" in given and given["max_replicas"] < given["replicas"]:
        message = f"is {given['max_replicas']}, which is less than --replicas {given['replicas']}"
        raise ParameterError("max_replicas", message)
    if "replicas" in given and rank_in_environment() is not None:
        raise ParameterError("replicas", "starts its ranks itself; leave torchrun out")
    if "replicas" in given and "profile_dir" in given:
        raise ParameterError("profile_dir", "is for one engine; leave --replicas out")


def _check_access(given: Mapping[str, Any]) -> None:
    if given.get("host") == "":
        raise ParameterError("host", "is empty; give 0.0.0.0 to listen on all addresses, or leave out the flag")
    for name in ("host", "port", "replicas"):
        if name in given and "uds" in given:
            raise ParameterError("uds", f"takes the place of an address; leave {option(name)} out")
    if given.get("uds") == "":
        raise ParameterError("uds", "is empty; give the path of a socket, or leave out the flag")
    if given.get("api_key") == "":
        raise ParameterError("api_key", f"is empty; to serve without a key leave out the flag and {API_KEY}")
    if "ssl_certfile" in given and "ssl_keyfile" not in given:
        raise ParameterError("ssl_certfile", "needs --ssl-keyfile")
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        if name in given and "ssl_certfile" not in given:
            raise ParameterError(name, "needs --ssl-certfile")


# ---- the configuration file ------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last; values that are nested too deeply; and too
    many, counted with what aliases repeat. PyYAML's errors name the line."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[str, int] = {}
        """By anchor: how many values an alias of it repeats."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias, before = isinstance(event, yaml.AliasEvent), self._num_values
        self._num_values += self._sizes.get(event.anchor, 0) if is_alias else 1
        self._depth += 1
        if self._num_values > MAX_VALUES or self._depth > MAX_DEPTH:
            limits = f"at most {MAX_VALUES} values, with those that aliases repeat, and {MAX_DEPTH} levels of them"
            raise yaml.composer.ComposerError(None, None, f"expected {limits}", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias and event.anchor is not None:
            self._sizes[event.anchor] = self._num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here the merge key "<<" is not yet replaced by the keys that it brings, which the mapping's own may override.
        node = super().compose_mapping_node(anchor)
        twice = repeated((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice is not None:
            raise ValueError(f"{twice[1]!r} is there twice")
        return node


def _read_config(file: Path) -> dict[str, Any]:
    """The values in a YAML file, by names of flags; null counts as absent. Errors are those of the flag ``config``."""
    try:
        text = read_text(file, ValueError, max_bytes=MAX_CONFIG)
    except ValueError as error:  # it names the file
        raise ParameterError("config", str(error)) from error
    try:
        values = yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no such day
        raise ParameterError("config", f"{file}: {error}") from error
    if not isinstance(values, dict | None):
        raise ParameterError("config", f"{file}: expected flags and values, found {type(values).__name__}")
    return _checked(values or {}, str(file))


def _checked(values: Mapping[Any, Any], origin: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in FLAGS:
            raise ParameterError("config", f"{origin}: unknown key {str(key)!r}{_meant(name)}")
        if name in result:
            raise ParameterError("config", f"{origin}: {str(key)!r} is there twice")
        if value is None:
            continue
        try:
            result[name] = _from_yaml(FLAGS[name], value)
        except ValueError as error:
            raise ParameterError("config", f"{origin}: {key}: {error}") from error
    return result


def _from_yaml(flag: Flag, value: object) -> Any:
    """Raises ValueError if the YAML value is not of the right kind."""
    if not flag.setting.kind.many:
        return _one_from_yaml(flag, value)
    entries = value if isinstance(value, list) else [value]
    return [_one_from_yaml(flag, entry) for entry in entries]


def _one_from_yaml(flag: Flag, value: object) -> Any:
    kind = flag.setting.kind
    if isinstance(kind, Boolean | JsonObject):
        return kind.checked(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be one value, got {shown(value)}")
    if isinstance(kind, AnyText | Strings | Words) and not isinstance(value, str):
        raise ValueError("must be a text; put it in quotes, because YAML reads it as a number")  # 0123 would be "83"
    return flag.parse(str(value))
