"""Command line -> ``ServeConfig``. Imports no torch, so that --help and mistakes answer at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lopa_ascend.config import (
    BRANCH_SCORES,
    CONFIDENCES,
    DECODINGS,
    WINDOW_ATTENTIONS,
    DecodingParams,
    ParameterError,
)

EXAMPLES = """\
examples:
  python -m lopa_ascend.serve                                  the bundled model on http://127.0.0.1:8000
  python -m lopa_ascend.serve --model Dream-v0-Instruct-7B --lora-path D2F_Dream_Instruct_7B_Lora --dtype bfloat16
  python -m lopa_ascend.serve --num-branches 7 --tau-conf 0.8  more branches, bolder filling: fewer forward passes
"""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """``decoding`` holds the decoding parameters given on the command line: what a request does not set itself."""

    model: str | None = None
    lora_path: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: float = 0.0
    decoding: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Flag:
    """How the default of one decoding parameter is given on the command line."""

    kind: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None
    many: bool = False


# Every field of DecodingParams but ``seed``, whose default is the engine's --seed.
DECODING_FLAGS = {
    "decoding": Flag(str, '"lopa": lookahead branches beside the anchor; "d2f": the anchor alone', DECODINGS),
    "num_branches": Flag(int, "k, lookahead branches beside the anchor (default: 3 with lopa, 0 with d2f)"),
    "block_size": Flag(int, "positions in a diffusion block"),
    "tau_add": Flag(float, "fraction of the last block filled before the next block is added"),
    "tau_act": Flag(float, "fraction of a block filled before the block after it must fill a position a step"),
    "tau_conf": Flag(float, "probability above which a position is filled; lower is faster and less accurate"),
    "confidence": Flag(str, "what a branch is scored by", CONFIDENCES),
    "branch_score": Flag(str, "how the confidences still masked become a branch's score", BRANCH_SCORES),
    "tail_fraction": Flag(float, 'share of the least confident positions for --branch-score "tail"'),
    "score_window": Flag(int, 'positions in a window for --branch-score "window"'),
    "creation_weight": Flag(float, "weight of a lookahead token's own confidence in its branch's score"),
    "window_attention": Flag(str, "what masked blocks see of each other", WINDOW_ATTENTIONS),
    "max_active_blocks": Flag(int, "at most so many blocks from the first unfinished one on (default: no limit)"),
    "max_new_tokens": Flag(int, "length of an answer, where --max-model-len leaves room for it"),
    "min_new_tokens": Flag(int, "positions in which neither EOS nor a stop string ends the answer"),
    "stop": Flag(str, "strings that end the answer", many=True),
    "temperature": Flag(float, "0: the most probable token"),
    "top_p": Flag(float, "sample from the most probable tokens with this mass (needs --temperature)"),
    "top_k": Flag(int, "sample from the so many most probable tokens (needs --temperature)"),
    "eos_token_id": Flag(int, "ids that end an answer (default: the model's)", many=True),
    "ignore_eos": Flag(bool, "go on after EOS"),
    "finish_at_eos": Flag(bool, "end as soon as the visible answer is final; off: fill every open block, as published"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lopa_ascend.serve",
        description="Serves a Dream model over an OpenAI-compatible HTTP API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="DIR", help="Hugging Face directory of a Dream model (default: bundled)")
    model.add_argument("--lora-path", metavar="DIR", help="PEFT LoRA adapter, merged into the weights at start")
    model.add_argument("--served-model-name", metavar="NAME", help='name in the API (default: "demo", or DIR\'s name)')
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="of the weights (default: auto)")
    model.add_argument("--max-model-len", type=int, metavar="N", help="prompt and answer together, in tokens")
    model.add_argument("--device", choices=("cpu",), help="where the model runs (default: cpu)")
    model.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: torch's choice)")
    model.add_argument("--seed", type=int, metavar="N", help="of the sampling where a request has none (default: 0)")
    http = parser.add_argument_group("server")
    http.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    http.add_argument("--port", type=_port, metavar="N", help="0 takes a free one (default: 8000)")
    http.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long running requests may go on after Ctrl-C or SIGTERM before they are ended (default: 0)",
    )
    group = parser.add_argument_group(
        "decoding defaults", "What a request does not say itself; it may set each by the same name, e.g. tau_conf."
    )
    for name, flag in DECODING_FLAGS.items():
        _add_decoding_flag(group, name, flag)
    return parser


def _add_decoding_flag(group: argparse._ArgumentGroup, name: str, flag: Flag) -> None:
    default = getattr(DecodingParams(), name)
    note = "" if "(default" in flag.help or default in (None, ()) else f" (default: {default})"
    option, text = "--" + name.replace("_", "-"), (flag.help + note).replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = None if flag.choices else {int: "N", float: "X"}.get(flag.kind, "TEXT")  # type: ignore[call-overload]
    nargs = "+" if flag.many else None
    group.add_argument(option, type=flag.kind, choices=flag.choices, metavar=metavar, nargs=nargs, help=text)


def parse_args(argv: Sequence[str] | None = None) -> ServeConfig:
    """Exits with status 2 and a message that names the flag on a wrong value."""
    parser = build_parser()
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    decoding = {name: given.pop(name) for name in DECODING_FLAGS if name in given}
    for name in ("stop", "eos_token_id"):
        if name in decoding:
            decoding[name] = tuple(decoding[name])
    try:
        DecodingParams(**decoding)
    except ParameterError as error:
        parser.error("argument --" + error.param.replace("_", "-") + str(error).removeprefix(error.param))
    return ServeConfig(**given, decoding=decoding)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _port(text: str) -> int:
    if not 0 <= (value := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {value}")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < 86400:
        raise argparse.ArgumentTypeError(f"must be from 0 to 86400 seconds, got {text}")
    return value
