"""What the server prints when it is ready."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Sequence

from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.config.kinds import format_size
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import ignored_sampling, recommendations
from lopa_ascend.kv.pages import slots_for
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.types import RankReport

MAIN_PARAMETERS = (
    "decoding", "num_branches", "block_size", "tau_add", "tau_act", "tau_conf", "max_new_tokens", "temperature",
)  # fmt: skip
"""Shown whatever their values; /server_info shows all."""
QUESTION = "What is 12 + 30?"
"""Short, as its answer is, from the bundled model and from others."""


def make_greeting(client: EngineClient, config: ServeConfig, listener: socket.socket) -> str:
    """Model, ranks, memory, decoding, URL and an example request."""
    url, through = _address(config, listener)
    ready, params = client.ready, DecodingParams(**config.decoding)
    route, body, place = _example(client)
    view = "a live view; " if config.ui else ""
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $LOPA_API_KEY"'
    return (
        f"\nmodel     {config.served_model_name or ready.model_name}, max_model_len {ready.limits.max_model_len}, "
        f"{ready.dtype} on {ready.device}\n"
        f"{_ranks_line(config.engine, params)}"
        f"{_memory_lines(config.engine, ready.ranks)}"
        f"{_decoding_line(params)}"
        f"{_recommended_lines(config)}"
        f"{_blocks_line(config, params)}"
        f"{_sampling_line(config, params)}"
        f"{_graphs_line(config.engine, params)}"
        f"serving   {config.uds or f'{url}  ({view}API documentation: {url}/docs)'}\n"
        f"example   the answer is in choices[0].{place}:\n\n"
        f"curl {through}{url}{route}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n\n"
    )


def _address(config: ServeConfig, listener: socket.socket) -> tuple[str, str]:
    """The server's URL, and the option with which curl reaches it, if one is needed, with a space behind it."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost", f"--unix-socket {shlex.quote(config.uds)} "
    host, port = listener.getsockname()[:2]
    return (f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"), ""


def _decoding_line(params: DecodingParams) -> str:
    """The main parameters, and all others that the operator has changed."""
    defaults = DecodingParams()
    names = [
        name
        for name in DecodingParams.names()
        if name in MAIN_PARAMETERS or getattr(params, name) != getattr(defaults, name)
    ]
    return f"decoding  {' '.join(f'{name}={getattr(params, name)}' for name in names)}\n"


def _recommended_lines(config: ServeConfig) -> str:
    """Which parameters are recommended for the model, and by whom."""
    lines = []
    for source, values in recommendations(config.engine.model or DEMO_MODEL).items():
        kept = [name for name, value in values.items() if config.decoding.get(name) == value]
        if kept:
            lines.append(f"          {', '.join(kept)}: as {source} recommend{'' if ' and ' in source else 's'}\n")
    return "".join(lines)


def _blocks_line(config: ServeConfig, params: DecodingParams) -> str:
    """A doubt whether the model can decode in blocks; none if it has an adapter or recommends a decoding."""
    engine = config.engine
    if not params.is_pipelined or engine.lora is not None or recommendations(engine.model or DEMO_MODEL):
        return ""
    return (
        "note      no --lora-path: a model that was not trained to decode in blocks answers badly; for a Dream without "
        "the adapter of D2F take --decoding parallel, or --base parallel\n"
    )


def _sampling_line(config: ServeConfig, params: DecodingParams) -> str:
    """Defaults for sampling in the model's files that the server does not use."""
    ignored = ignored_sampling(config.engine.model or DEMO_MODEL)
    if params.temperature:
        ignored.pop("do_sample", None)
    found = [f"{name} {shown(value)}" for name, value in ignored.items() if getattr(params, name, None) != value]
    if not found:
        return ""
    return (
        f"note      not used: {', '.join(found)} of generation_config.json; give them as flags or in requests, or in "
        'that file under "lopa_ascend"\n'
    )


def _graphs_line(engine: EngineConfig, params: DecodingParams) -> str:
    """A note that no graph can decode what the server decodes by default."""
    name = params.eager_parameter
    if engine.graph_mode == "eager" or name is None:
        return ""
    return (
        f"note      no graph can decode {name} {getattr(params, name)}, so such requests run eagerly; if there are no "
        "others, --graph-mode eager starts sooner\n"
    )


def _ranks_line(engine: EngineConfig, params: DecodingParams) -> str:
    """The mesh of ranks, and idle slots for branches; nothing for one rank."""
    if engine.world_size == 1:
        return ""
    tp, bp = engine.tensor_parallel_size, engine.branch_parallel_size
    branches = 1 + params.lookaheads
    slots = slots_for(branches, bp) * bp
    idle = "" if slots == branches else f": {slots - branches} of {slots} slots idle; more branches would cost nothing"
    return f"ranks     tensor parallel {tp} x branch parallel {bp}, {branches} branches{idle}\n"


def _memory_lines(engine: EngineConfig, ranks: Sequence[RankReport]) -> str:
    """What each rank holds in memory, and where the rank runs if there are several."""
    lines = []
    for number, rank in enumerate(ranks):
        bp, tp = divmod(number, engine.tensor_parallel_size)
        place = "" if len(ranks) == 1 else f"rank {number} (bp {bp}, tp {tp}) on {rank.host} {rank.device}: "
        pages = f"{rank.num_pages} x {format_size(rank.page_bytes)} = {format_size(rank.num_pages * rank.page_bytes)}"
        graphs = f", {rank.num_graphs} graphs {format_size(rank.graphs)}" if rank.num_graphs else ""
        lines.append(
            f"{place}weights {format_size(rank.weights)}, KV pages {pages}{graphs}, free {format_size(rank.free)}"
        )
    titles = ["memory"] + [""] * (len(lines) - 1)
    return "".join(f"{title:<10}{line}\n" for title, line in zip(titles, lines, strict=True))


def _example(client: EngineClient) -> tuple[str, dict[str, object], str]:
    """Route and body of a request that works, and where its answer stands."""
    if client.prompts.tokenizer is None:
        return "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 32}, "text"
    messages = [{"role": "user", "content": QUESTION}]
    try:
        client.prompts.encode_chat(messages)
    except ParameterError:
        return "/v1/completions", {"prompt": QUESTION, "max_tokens": 64}, "text"
    return "/v1/chat/completions", {"messages": messages}, "message.content"
