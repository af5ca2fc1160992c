"""The recorded traces of the published code (tests/data/golden) in our terms."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from lopa_ascend import DecodingParams

FOLDER = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))
MASK_CHOSEN = "quirk_mask_argmax"  # the published code fills a position with the mask here; ours never does
NO_GRAPH = "lopa_bf3_full_alpha_topp"  # scores branches by their tails, which no graph does


def read(case: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((FOLDER / f"{case}.json").read_text())
    return trace


def model_path(trace: dict[str, Any]) -> Path:
    return FOLDER / "models" / Path(trace["model_dir"]).name


def cases_by_kind() -> dict[tuple[str, str, str], list[str]]:
    """Cases by their model, window attention and confidence: what all graphs of one engine do alike."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for case in CASES:
        if case != MASK_CHOSEN:
            trace = read(case)
            params = decoding_params(trace)
            found[model_path(trace).name, params.window_attention, params.confidence].append(case)
    return found


def decoding_params(trace: dict[str, Any], **changes: Any) -> DecodingParams:
    h = trace["hyperparameters"]
    branches = h["branching_factor"] if trace["mode"] == "lopa" and not h["verification_force_base_winner"] else 0
    branches = branches if branches > 1 else 0
    values: dict[str, Any] = {
        "decoding": "lopa" if branches else "d2f",
        "num_branches": branches,
        "block_size": h["block_size"],
        "tau_add": h["block_add_threshold"],
        "tau_act": h["decoded_token_threshold"],
        "tau_conf": h["skip_threshold"],
        "max_new_tokens": h["max_new_tokens"] // h["block_size"] * h["block_size"],
        "confidence": "max_prob" if h["sampling_strategy"] == "default" else h["sampling_strategy"],
        "branch_score": "mean" if h["branch_topp"] == 1 else "tail",
        "tail_fraction": h["branch_topp"],
        "creation_weight": h["selection_conf_alpha"],
        "window_attention": "full" if h["use_full_attention"] else "block_causal",
        "ignore_eos": trace["eos_token_id"] < 0,
        "eos_token_id": max(trace["eos_token_id"], 0),
        "finish_at_eos": False,
    }
    return DecodingParams(**{**values, **changes})


def rounds(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The recorded rounds with a forward pass, D2F and LoPA in one form.

    Keys: span, cache_length, committed, winner (evaluation order), fills, branch_ends, masked (of the winner).
    """
    out = []
    for record in trace["trace"]:
        if not record.get("forwards", record.get("forward")):
            continue  # the closing round
        if trace["mode"] == "d2f":
            forwards, winner, masked = [record["forward"]], 0, record["masked"]
        else:
            forwards, winner, masked = record["forwards"], record["winner"]["eval_index"], record["winner_masked"]
            if trace["hyperparameters"]["verification_force_base_winner"]:
                forwards, winner = forwards[-1:], 0
        forward = forwards[winner]
        out.append(
            {
                "span": (forward["start_pos"], forward["start_pos"] + forward["input_len"]),
                "cache_length": forward["cache_len_before"],
                "committed": forward["update_kvcache"],
                "winner": winner,
                "fills": [tuple(fill) for fill in record["fills"]],
                "branch_ends": [f["start_pos"] + f["input_len"] for f in forwards],
                "masked": masked,
                "confidences": [c[2] for c in record.get("confidences", [])],
            }
        )
    return out


def rounds_of(output: Any) -> list[dict[str, Any]]:
    """The passes of an output with a trace in the form of ``rounds``, as far as ``first_difference`` reads it."""
    return [
        {
            "winner": record.winner,
            "fills": [(fill.position, fill.token) for fill in record.fills],
            "masked": [(fill.position, fill.token, fill.max_prob, fill.confidence) for fill in record.fills],
            "confidences": [branch.score for branch in record.branches],
        }
        for record in output.trace
    ]


def first_difference(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tau_conf: float
) -> dict[str, Any] | None:
    """The first pass that decides otherwise, and its margin: by how little the same decision was missed. None if all
    decide alike.

    Where the winner differs, the margin is the gap between the best two branches; where a position has other tokens,
    the difference of their probabilities; where only one side fills it, how far its confidence is from the threshold,
    or from the best one, which a block without any other has to fill.
    """
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        filled, expected = dict(mine["fills"]), dict(other["fills"])
        if (mine["winner"], filled) == (other["winner"], expected):
            continue
        margins = []
        if mine["winner"] != other["winner"]:
            best = sorted(other["confidences"] or mine["confidences"], reverse=True)
            margins += [best[0] - best[1]] if len(best) > 1 else []
        known = {position: (token, prob, conf) for position, token, prob, conf in (*mine["masked"], *other["masked"])}
        most = max((conf for _, _, conf in known.values()), default=0.0)
        mine_by, other_by = ({row[0]: row[1:] for row in each["masked"]} for each in (mine, other))
        for position in known:
            if position in mine_by and position in other_by and mine_by[position][0] != other_by[position][0]:
                margins.append(abs(mine_by[position][1] - other_by[position][1]))
            elif (position in filled) != (position in expected):
                conf = known[position][2]
                margins += [abs(conf - tau_conf), *([most - conf] if conf < most else [])]
        margin = min(margins, default=float("inf"))
        return {"pass": number, "ours": sorted(filled.items()), "recorded": sorted(expected.items()), "margin": margin}
    if len(ours) != len(theirs):
        return {"pass": min(len(ours), len(theirs)), "margin": float("inf")}
    return None
