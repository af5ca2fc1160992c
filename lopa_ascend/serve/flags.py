"""The server's flags as tables: name, type and help of each. Their defaults are those of the dataclasses they fill."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lopa_ascend.config import (
    ATTENTION_LAYOUTS,
    BRANCH_SCORES,
    CONFIDENCES,
    DECODINGS,
    GRAPH_MODES,
    WINDOW_ATTENTIONS,
)

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DAY = 86400


@dataclass(frozen=True)
class Flag:
    """One flag. ``kind`` makes its value from text and raises ValueError or ArgumentTypeError; bool makes a pair of
    flags, --x and --no-x. The help's own "(default" stands instead of the dataclass's."""

    kind: Callable[[str], Any]
    help: str
    metavar: str = "TEXT"
    choices: tuple[str, ...] | None = None
    many: bool = False


def size(text: str) -> int:
    """Bytes: a number, with a unit or without."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([KMGT]iB|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes, or with a unit, e.g. 512MiB or 4GiB; got {text!r}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, got {text!r}")
        return value

    return parse


def seconds(low: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not low <= value <= DAY:
            raise argparse.ArgumentTypeError(f"must be from {low:g} to {DAY} seconds, got {text!r}")
        return value

    return parse


MODEL_FLAGS = {
    "model": Flag(str, "Hugging Face directory of a Dream model (default: the bundled one)", "DIR"),
    "lora_path": Flag(str, "PEFT LoRA adapter, merged into the weights at start", "DIR"),
    "served_model_name": Flag(str, 'name in the API (default: "demo", or DIR\'s name)', "NAME"),
    "chat_template": Flag(str, "Jinja template of conversations (default: the model's own)", "FILE"),
    "dtype": Flag(str, "of the weights", choices=("auto", "float32", "bfloat16")),
    "max_model_len": Flag(int, "prompt and answer together, in tokens (default: the model's limit)", "N"),
    "device": Flag(str, "where the model runs", choices=tuple(GRAPH_MODES)),
    "threads": Flag(integer(1, 1024), "CPU threads of the engine (default: torch's choice)", "N"),
    "seed": Flag(int, "of the sampling where a request has none", "N"),
}
ENGINE_FLAGS = {
    "max_num_seqs": Flag(int, "requests that run at the same time", "N"),
    "max_num_batched_tokens": Flag(
        int, "tokens computed in one step (default: --max-model-len, but at least 4096)", "N"
    ),
    "max_num_queued_reqs": Flag(integer(0), "requests that may wait; more get a 503 with Retry-After", "N"),
    "max_num_branches": Flag(int, "lookahead branches that a request may ask for", "N"),
    "kv_cache_memory": Flag(
        size,
        "bytes of the KV pages, or e.g. 512MiB (default: what fits, at most 4GiB and half of the free memory; on an "
        "NPU four fifths of it)",
        "SIZE",
    ),
    "enable_prefix_caching": Flag(bool, "keep the KV pages of whole prompts for equal ones; changes no token"),
    "approximate_prefix_caching": Flag(
        bool, "reuse KV pages of equal beginnings of prompts as well: changes tokens, for other text followed them"
    ),
}
PARALLEL_FLAGS = {
    "tensor_parallel_size": Flag(int, "ranks that split each branch's forward pass", "N"),
    "branch_parallel_size": Flag(int, "groups of such ranks, each of which takes some of the branches", "N"),
    "distributed_timeout_seconds": Flag(float, "how long a rank may hang before the others end", "SECONDS"),
    "agreement_interval": Flag(int, "steps between two checks that all ranks have decided the same; 0: none", "N"),
}
GRAPH_FLAGS = {
    "graph_mode": Flag(
        str,
        "how a decoding step runs, on an NPU npugraph_ex, ge or eager, on a CPU eager or inductor (default: the first)",
        choices=("eager", "npugraph_ex", "ge", "inductor"),
    ),
    "graph_num_branches": Flag(int, "lookahead branches that graphs have room for (default: --num-branches)", "N"),
    "graph_block_size": Flag(int, "longest block that graphs have room for (default: --block-size)", "N"),
    "graph_window_blocks": Flag(int, "blocks of the largest window that there is a graph for", "N"),
    "graph_window_attention": Flag(
        str, "what blocks see of each other in graphs (default: --window-attention)", choices=WINDOW_ATTENTIONS
    ),
    "graph_confidence": Flag(str, "what branches are scored by in graphs (default: --confidence)", choices=CONFIDENCES),
    "graph_cache": Flag(str, "where compiled graphs are kept for the next start (default: nowhere)", "DIR"),
    "async_scheduling": Flag(bool, "launch a compiled step before the last one was read; changes no token"),
    "attention_layout": Flag(
        str, "of attention on an NPU: what scripts/npu_selftest.py recommends there", choices=ATTENTION_LAYOUTS
    ),
    "debug_kv": Flag(bool, "check page ids and cache positions at every write (NPU, eager): slow"),
}
HTTP_FLAGS = {
    "host": Flag(str, "address to listen on", "ADDRESS"),
    "port": Flag(integer(0, 65535), "0 takes a free one", "N"),
    "api_key": Flag(
        str, "key that clients must send; better in the environment as LOPA_API_KEY, where ps does not show it", "KEY"
    ),
    "root_path": Flag(str, "path under which a proxy shows this server", "PATH"),
    "max_body_size": Flag(size, "largest body of a request, in bytes or e.g. 8MiB", "SIZE"),
    "request_timeout": Flag(
        seconds(0.001), "longest time a request may take before it gets a 504 (default: none)", "SECONDS"
    ),
    "watchdog_timeout": Flag(
        seconds(2), "longest silence of the engine, e.g. in one step, before /health says 503", "SECONDS"
    ),
    "shutdown_timeout": Flag(
        seconds(0), "how long running requests may go on after Ctrl-C or SIGTERM before they are ended", "SECONDS"
    ),
    "enable_log_requests": Flag(bool, "write prompts and parameters of requests to the log"),
    "uvicorn_log_level": Flag(
        str, "what the HTTP server logs", choices=("critical", "error", "warning", "info", "debug", "trace")
    ),
}
TLS_FLAGS = {
    "ssl_certfile": Flag(str, "certificate, PEM", "FILE"),
    "ssl_keyfile": Flag(str, "its private key, PEM", "FILE"),
    "ssl_keyfile_password": Flag(str, "the private key's password", "PASSWORD"),
    "ssl_ca_certs": Flag(str, "certificates that a client's own certificate is checked against", "FILE"),
}
# Every field of DecodingParams but ``seed``, whose default is the engine's --seed.
DECODING_FLAGS = {
    "decoding": Flag(str, '"lopa": lookahead branches beside the anchor; "d2f": the anchor alone', choices=DECODINGS),
    "num_branches": Flag(int, "k, lookahead branches beside the anchor (default: 3 with lopa, 0 with d2f)", "N"),
    "block_size": Flag(int, "positions in a diffusion block", "N"),
    "tau_add": Flag(float, "fraction of the last block filled before the next block is added", "X"),
    "tau_act": Flag(float, "fraction of a block filled before the block after it must fill a position a step", "X"),
    "tau_conf": Flag(float, "probability above which a position is filled; lower is faster and less accurate", "X"),
    "confidence": Flag(str, "what a branch is scored by", choices=CONFIDENCES),
    "branch_score": Flag(str, "how the confidences still masked become a branch's score", choices=BRANCH_SCORES),
    "tail_fraction": Flag(float, 'share of the least confident positions for --branch-score "tail"', "X"),
    "score_window": Flag(int, 'positions in a window for --branch-score "window"', "N"),
    "creation_weight": Flag(float, "weight of a lookahead token's own confidence in its branch's score", "X"),
    "window_attention": Flag(str, "what masked blocks see of each other", choices=WINDOW_ATTENTIONS),
    "max_active_blocks": Flag(int, "at most so many blocks from the first unfinished one on (default: no limit)", "N"),
    "max_new_tokens": Flag(int, "length of an answer, where --max-model-len leaves room for it", "N"),
    "min_new_tokens": Flag(int, "positions in which neither EOS nor a stop string ends the answer", "N"),
    "stop": Flag(str, "strings that end the answer", many=True),
    "temperature": Flag(float, "0: the most probable token", "X"),
    "top_p": Flag(float, "sample from the most probable tokens with this mass (needs --temperature)", "X"),
    "top_k": Flag(int, "sample from the so many most probable tokens (needs --temperature)", "N"),
    "eos_token_id": Flag(int, "ids that end an answer (default: the model's)", "N", many=True),
    "ignore_eos": Flag(bool, "go on after EOS"),
    "finish_at_eos": Flag(bool, "end as soon as the visible answer is final; off: fill every open block, as published"),
}
GROUPS = {
    "model": ("", MODEL_FLAGS),
    "engine": ("", ENGINE_FLAGS),
    "ranks": (
        "Starts tensor x branch processes on this machine; under torchrun, which starts them, joins them.",
        PARALLEL_FLAGS,
    ),
    "compiled steps and NPU": ("", GRAPH_FLAGS),
    "server": ("", HTTP_FLAGS),
    "TLS": ("", TLS_FLAGS),
    "decoding defaults": (
        "What a request does not say itself; it may set each by the same name, e.g. tau_conf.",
        DECODING_FLAGS,
    ),
}
FLAGS = {name: flag for _, flags in GROUPS.values() for name, flag in flags.items()}
