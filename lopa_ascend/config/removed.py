"""Flags, fields and values that earlier versions had, and what to use instead.

The command line, the YAML file, bodies of requests and the Python API refuse them in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

_RESEARCH = "is in examples/research_decodings: install that package, and choose its decoding"
_FOLLOWS = "graphs are compiled for the decoding defaults: set"

REMOVED: Mapping[str, str] = {
    # the server
    "max_total_body_size": "the connections limit the memory of bodies; set max_body_size",
    "max_queued_large_bodies": "bodies are small; set max_body_size",
    "max_stop_strings": "a request may have 64",
    "max_stop_characters": "the stop strings of a request may have 4096 characters together",
    "stream_block_size": "set block_size, in each request that streams or for all",
    "uvicorn_log_level": "the level is info",
    # the engine
    "approximate_prefix_caching": "prefixes are cached exactly: set enable_prefix_caching",
    "agreement_interval": "the interval is fixed",
    "async_scheduling": "steps overlap wherever they can",
    "debug_kv": "it was a seam of tests",
    "max_prefill_tokens": "max_num_batched_tokens limits prompts too",
    # what graphs are compiled for
    "graph_num_branches": f"{_FOLLOWS} num_branches",
    "graph_block_size": f"{_FOLLOWS} block_size",
    "graph_window_attention": f"{_FOLLOWS} window_attention",
    "graph_confidence": f"{_FOLLOWS} confidence",
    "graph_branch_acceptance": f"{_FOLLOWS} branch_acceptance",
    # decoding
    "acceptance_gamma": _RESEARCH,
    "acceptance_delta": _RESEARCH,
    "acceptance=entropy_bound": _RESEARCH,
    "acceptance=frechet": _RESEARCH,
    "branch_candidates": _RESEARCH,
    "pivot_mass": _RESEARCH,
    "pivot_weight": _RESEARCH,
    "branch_score=expected": _RESEARCH,
    "branch_score=entropy": _RESEARCH,
    "branch_score=pivot": _RESEARCH,
    "max_auto_branches": 'num_branches "auto" has a rule of its own; set num_branches to a number for another',
    "branches_by_load": 'num_branches "auto" has a rule of its own; set num_branches to a number for another',
    "whole_last_block": "set max_new_tokens to a multiple of block_size",
}
"""By name, or by name and value: what to use instead."""


def instead_of(name: str, value: object = None) -> str:
    """What to use instead of a setting, or of one of its values, as the end of a message; empty if it was never there.

    Args:
        name: of the setting, with underscores.
        value: the value that was refused; None if the setting itself was.
    """
    found = REMOVED.get(name if value is None else f"{name}={value}") if isinstance(value, str | None) else None
    return "" if found is None else f"; removed: {found}"
