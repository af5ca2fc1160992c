"""Decodes recorded requests, and compares tokens and fills with what the published code of the model's family did.

    python -m scripts.eval golden tests/data/golden/models/sdar        prints a row for each case
    python -m scripts.eval golden DIR --json                           prints the last line alone

Each folder of DIR with a trace.json is a case. The file has the family, the model's directory, the prompt, the
parameters by their published names, the output, and for each forward pass of the published code the tokens that it
filled. Passes that fill nothing count for nothing: the server computes such a pass together with another one.
The last line is JSON: {"cases": n, "equal": n, "different": [{"case": name, "first": what differs first}]}.
A case that cannot be read or run is different. The exit status is 1 if any case is different.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import msgspec

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.families import recommended_decoding
from lopa_ascend.types import Grammar, Thinking

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from lopa_ascend.types import GenerationOutput, StepRecord

OPTIONS: dict[str, Any] = {"dtype": "float32", "graph_mode": "eager", "threads": 1, "enable_prefix_caching": False}
"""Options of the engine: what the traces were recorded with."""
Decoding = dict[str, Any]
"""Decoding parameters by our names."""
Fills = list[tuple[int, ...]]
"""(position, token id) of each fill of a forward pass, and (position, token id, replaced one) of each edit, by
position."""


class Forward(msgspec.Struct):
    """A recorded forward pass."""

    fills: list[tuple[int, ...]]
    """(position, token id), and for an edit the token id that it replaced."""
    start: int = 0
    """Position of its first row."""
    len: int = 0
    """Rows."""


class Draws(msgspec.Struct, frozen=True):
    """How drafts were accepted."""

    kind: str = "greedy"


class Trace(msgspec.Struct):
    """A recorded request. Other fields of the file have no effect."""

    family: str
    model_dir: str
    """Relative to the folder of the case."""
    prompt_ids: list[int]
    params: dict[str, Any]
    """By their published names."""
    output_ids: list[int]
    trace: list[Forward]
    mask_token_id: int
    eos_token_id: int | None = None
    draws: Draws = Draws()


class Published:
    """The parameters of a trace, which are taken one by one.

    Args:
        params: by their published names.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self.names: list[str] = []
        """Those that were asked for."""

    def take(self, name: str, default: Any = ..., known: Collection[Any] = ()) -> Any:
        """A parameter.

        Args:
            default: without it the parameter must be there.
            known: the values that it may have, if not all.

        Raises:
            ValueError: it is missing, or has an unknown value.
        """
        self.names.append(name)
        value = self._params.get(name, default)
        if value is ...:
            raise ValueError(f"params: {name} is missing")
        if known and value not in known:
            raise ValueError(f"{name}: unknown value {value!r}, {_one_of(known)}")
        return value

    def check(self) -> None:
        """Raises ValueError if there is a parameter that nothing has asked for."""
        if unknown := sorted(self._params.keys() - {*self.names}):
            raise ValueError(f"params: unknown name {unknown[0]!r}, {_one_of(self.names)}")


# Each of these takes the published parameters and the model's directory, and returns the decoding parameters that they
# stand for, with ``stop_at_eos`` if the answer may end at an EOS.


def sdar(params: Published, model: Path) -> Decoding:
    """Of ``block_diffusion_generate`` of SDAR, greedy. As published a block with a stop id is filled to its end."""
    strategies = ("low_confidence_static", "low_confidence_dynamic", "sequential")
    strategy = params.take("remasking_strategy", known=strategies)
    threshold = params.take("confidence_threshold", 0.85)
    params.take("gen_length")
    return {
        "decoding": "d2f",
        "block_size": params.take("block_length"),
        "tau_add": 1.0,
        "tau_conf": threshold if strategy == "low_confidence_dynamic" else 1.0,
        "acceptance": "sequential" if strategy == "sequential" else "threshold",
        "denoising_steps": params.take("denoising_steps"),
        "finish_at_eos": False,
        "stop_at_eos": params.take("stop_at_eos", False),
    }


def fast_dllm_v2(params: Published, model: Path) -> Decoding:
    """Of ``generate`` of Fast-dLLM v2, greedy. Its ``max_new_tokens`` counts blocks."""
    params.take("max_new_tokens")
    return {
        "decoding": "fast_dllm_v2",
        "block_size": recommended_decoding(model)["block_size"],
        "sub_block_size": params.take("small_block_size", 8),
        "tau_conf": params.take("threshold", 1.0),
        "sub_block_cache": params.take("use_block_cache", False),
        "stop_at_eos": params.take("stop_at_eos", False),
    }


def llada(params: Published, model: Path) -> Decoding:
    """Of ``generate`` of LLaDA ("gsai") and of Fast-dLLM's three for LLaDA ("fastdllm"), greedy. As published the whole
    canvas is filled."""
    params.take("variant", known=("gsai", "fastdllm"))
    steps, length, block = (params.take(name) for name in ("steps", "gen_length", "block_length"))
    cache = params.take("cache", "none", known=("none", "prefix", "dual"))
    threshold, factor = params.take("threshold", None), params.take("factor", None)
    if scale := params.take("cfg_scale", 0.0):
        raise ValueError(
            f"cfg_scale: is {scale:g}, expected 0: there is no classifier-free guidance, whose every pass also "
            "computes the canvas behind a prompt of masks"
        )
    found: Decoding = {"decoding": "parallel", "block_size": block, "finish_at_eos": False}
    if cache != "none":
        found |= {"decoding": "fast_dllm", "block_cache": cache}
    if factor is not None:
        return found | {"acceptance": "factor", "acceptance_factor": factor}
    if threshold is not None:
        return found | {"tau_conf": threshold}
    return found | {"tau_conf": 1.0, "denoising_steps": steps * block // length}


def d3llm(params: Published, model: Path) -> Decoding:
    """Of ``generate_multi_block`` of d3LLM for LLaDA, and of ``_sample_multi_block`` for Dream, greedy. There is no
    limit of blocks."""
    return {
        "decoding": "parallel",
        "block_size": params.take("block_size"),
        "acceptance": "entropy",
        "confidence": "neg_entropy",
        "max_entropy": params.take("threshold"),
        "tau_add": params.take("block_add_threshold"),
        "tau_act": params.take("decoded_token_threshold"),
        "max_active_blocks": params.take("max_new_tokens"),
        "stop_at_eos": params.take("early_stop", False),
    }


def llada2(params: Published, model: Path) -> Decoding:
    """Of ``generate`` of LLaDA2.0, and with ``editing_threshold`` of LLaDA2.1, greedy. Without editing a block with an
    EOS is filled to its end, but for ``eos_early_stop``. With it ``steps`` has no effect."""
    block, steps, early = params.take("block_length"), params.take("steps"), params.take("eos_early_stop", False)
    editing, post_steps = params.take("editing_threshold", None), params.take("max_post_steps", 16)
    transfer = params.take("num_to_transfer", 1)
    params.take("gen_length")
    found = {
        "decoding": "d2f",
        "block_size": block,
        "tau_add": 1.0,
        "tau_conf": params.take("threshold"),
        "stop_at_eos": params.take("stop_at_eos", True),
    }
    if editing is None:
        return found | {"denoising_steps": steps, "finish_at_eos": early}
    steps, remainder = divmod(block, transfer)
    if remainder:
        raise ValueError(f"num_to_transfer: {transfer} does not divide block_length {block}")
    return found | {"denoising_steps": steps, "editing_threshold": editing, "max_post_steps": post_steps}


def causal(params: Published, model: Path) -> Decoding:
    """Of the modes of Nemotron-Labs-Diffusion, openPangu-R-7B-Diffusion and Orthrus, greedy."""
    mode = params.take("mode", known=("ar", "block", "linear_spec"))
    block, small_blocks = params.take("block_length", 1), params.take("num_small_blocks", 1)
    algorithm = params.take("alg", "confidence_threshold", known=("origin", "confidence_threshold", "entropy"))
    threshold = params.take("threshold", None)
    thoughts, end_of_thoughts = params.take("max_thinking_tokens", None), params.take("end_think_token_id", None)
    params.take("max_new_tokens")
    params.take("lora", False)
    found: Decoding = {"stop_at_eos": params.take("stop_at_eos", False)}
    if mode == "ar":
        return found | {"decoding": "ar"}
    if mode == "linear_spec":
        return found | {"decoding": "linear_spec", "block_size": block, "draft_threshold": threshold or 0.0}
    found |= {
        "decoding": "causal_blocks",
        "block_size": block,
        "sub_block_size": block // small_blocks,
        "tau_conf": 1.0 if threshold is None or algorithm != "confidence_threshold" else threshold,
    }
    if algorithm == "entropy":
        found["confidence"] = "neg_entropy"
    if thoughts is not None:
        if end_of_thoughts is None:
            raise ValueError("end_think_token_id: is missing, expected an id, because of max_thinking_tokens")
        # The thoughts have begun. There is no tokenizer, which would know the marks.
        found["structured_outputs"] = Grammar("any", "", Thinking(True, (), (end_of_thoughts,), thoughts))
    return found


def a2d(params: Published, model: Path) -> Decoding:
    """Of dLLM's samplers for Tiny-A2D, greedy. As published a block with an EOS is filled to its end."""
    block = params.take("block_size")
    num_blocks = -(-params.take("max_new_tokens") // block)
    return {
        "decoding": "parallel",
        "block_size": block,
        "tau_conf": 1.0,
        "denoising_steps": -(-params.take("steps") // num_blocks),
        "finish_at_eos": False,
    }


def a2d_blocks(params: Published, model: Path) -> Decoding:
    """The same in blocks, where a block with an EOS is the last."""
    return a2d(params, model) | {"decoding": "d2f", "tau_add": 1.0, "stop_at_eos": True}


def diffcoder(params: Published, model: Path) -> Decoding:
    """Of ``generate_block`` of Stable-DiffCoder, greedy. The plan has no effect beside a threshold, if it is long
    enough."""
    block, threshold = params.take("block_length"), params.take("threshold")
    steps = params.take("steps") * block // params.take("gen_length")
    pace = {"denoising_steps": steps, "tau_conf": 1.0} if threshold is None else {"tau_conf": threshold}
    stops = params.take("stop_at_eos", False)
    return {"decoding": "d2f", "block_size": block, "tau_add": 1.0, "finish_at_eos": False, "stop_at_eos": stops} | pace


def s2d2(drafting: Callable[[Published, Path], Decoding]) -> Callable[[Published, Path], Decoding]:
    """Of S2D2, with the parameters of the function that drafts. ``top_p`` has no effect here at temperature 0."""

    def decoding(params: Published, model: Path) -> Decoding:
        found = drafting(params, model)
        found |= {"decoding": "s2d2", "base": found["decoding"]}
        policies = ("mask_span_length", "score_threshold", "score_hysteresis")
        policy = params.take("do_verify_policy", known=policies)
        params.take("token_acceptance_estimator", known=("soft_entropy_negexp",))
        params.take("top_p", 0.95)
        scores = ("difference_static", "difference_dynamic")
        is_static = params.take("do_verify_score_type", "difference_dynamic", known=scores) == "difference_static"
        cost, threshold = params.take("score_penalty_coef", 1.0), params.take("do_verify_score_threshold", 0.0)
        on, off = (params.take(f"hysteresis_threshold_{name}", 0.0) for name in ("on", "off"))
        run, cached = params.take("min_ssd_span_length", 1), params.take("cache_ver", False)
        if cached != params.take("draft_ver", False):
            raise ValueError("cache_ver: goes with draft_ver, expected both or none")
        if cached:
            found["window_attention"] = "causal"
        if policy == "mask_span_length":
            return found | {"routing": "run", "routing_run": run}
        found |= {"routing_cost": cost, "routing_cost_of": "check" if is_static else "confident"}
        if policy == "score_threshold":
            return found | {"routing": "score", "routing_on": threshold}
        return found | {"routing": "hysteresis", "routing_on": on, "routing_off": off}

    return decoding


FAMILIES: Mapping[str, Callable[[Published, Path], Decoding]] = {
    "sdar": sdar,
    "fastdllm2": fast_dllm_v2,
    "llada": llada,
    "llada2": llada2,
    "d3llm": d3llm,
    "nemotron": causal,
    "pangu": causal,
    "orthrus": causal,
    "a2d_mdlm": a2d,
    "a2d_bd3lm": a2d_blocks,
    "diffcoder": diffcoder,
    "sdar_s2d2": s2d2(sdar),
    "fastdllm2_s2d2": s2d2(fast_dllm_v2),
}
"""By family, what its published parameters mean."""


@dataclass(frozen=True)
class Case:
    """A recorded request, in our terms."""

    name: str
    model: Path
    prompt: list[int]
    params: DecodingParams
    output: list[int]
    """Token ids of the answer, without the stop id at its end."""
    passes: list[Fills]
    """The fills of each forward pass that fills; of linear self-speculation without those of blocks that reach beyond
    ``max_new_tokens``, which end there here."""
    with_adapter: bool = True
    """Whether the adapter for drafts is used that the model may have."""
    way: str = ""
    """What the directory of the model must be named, if it decodes in one of two ways."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """A case from its trace.json.

        Raises:
            ValueError, OSError: the file cannot be read, or asks for something unknown.
        """
        trace = msgspec.json.decode(file.read_bytes(), type=Trace)
        if trace.family not in FAMILIES:
            raise ValueError(f"family: unknown value {trace.family!r}, {_one_of(FAMILIES)}")
        if trace.draws.kind != "greedy":
            raise ValueError(f"draws: is {trace.draws.kind!r}, expected 'greedy': draws cannot be given to an engine")
        model = file.parent / trace.model_dir
        if not (model / "config.json").is_file():
            raise ValueError(f"model_dir: {model} has no config.json, expected a model directory")
        params = Published(trace.params)
        decoding = FAMILIES[trace.family](params, model)
        params.check()
        output = trace.output_ids
        if trace.mask_token_id in output:  # after a stop the published code leaves masks
            output = output[: output.index(trace.mask_token_id)]
        passes, with_adapter = trace.trace, True
        if decoding["decoding"] == "linear_spec":
            output = output[: trace.params["max_new_tokens"]]
            limit = len(trace.prompt_ids) + trace.params["max_new_tokens"]
            passes = [each for each in passes if each.start + each.len <= limit]
            with_adapter = trace.params.get("lora", False)
        stops = decoding.pop("stop_at_eos", False)
        decoding["max_new_tokens"], end = len(output), None
        if "structured_outputs" not in decoding:  # which ends at an EOS
            decoding["ignore_eos"] = not stops
        if stops:
            if trace.eos_token_id is None:
                raise ValueError("eos_token_id: is missing, expected an id, because of stop_at_eos")
            decoding["eos_token_id"] = trace.eos_token_id
            if decoding.get("finish_at_eos", True) and trace.eos_token_id in output:
                output = output[: output.index(trace.eos_token_id)]
                end = len(trace.prompt_ids) + len(output)
        fills = [sorted(forward.fills) for forward in passes if forward.fills]
        while end is not None and fills[-1][0][0] > end:  # the published code goes on behind an EOS
            fills.pop()
        way = trace.family.partition("_")[2]
        return cls(
            file.parent.name, model, trace.prompt_ids, DecodingParams(**decoding), output, fills, with_adapter, way
        )

    def run(self, llm: LLM) -> str | None:
        """What differs first; None if nothing does."""
        (found,) = llm.generate([self.prompt], self.params, trace=True, quiet=True)
        return self.difference(found)

    def difference(self, found: GenerationOutput) -> str | None:
        """The first fills that differ; else the first token."""
        assert found.trace is not None
        ours = [changes for record in found.trace if (changes := _changes(record))]
        if self.params.decoding == "linear_spec":
            ours = ours[: len(self.passes)]
        for number, (mine, theirs) in enumerate(zip_longest(ours, self.passes)):
            if mine != theirs:
                return f"pass {number} that fills: {mine or 'none'}, recorded {theirs or 'none'}"
        for number, (token, recorded) in enumerate(zip_longest(found.token_ids, self.output)):
            if token != recorded:
                return f"output {number}: {token}, recorded {recorded}"
        return None


def _changes(record: StepRecord) -> Fills:
    """What a pass fills and edits."""
    fills: Fills = [(fill.position, fill.token) for fill in (*record.fills, *record.forced)]
    return sorted([*fills, *((edit.position, edit.token, edit.replaced) for edit in record.edits)])


def _one_of(names: Iterable[str]) -> str:
    return f"expected one of {', '.join(names)}"


def outcomes(folder: Path) -> Iterator[tuple[str, str | None]]:
    """(name of a case, what differs first), model by model. Only one model is in memory at a time."""
    cases: list[Case] = []
    for file in sorted(folder.glob("*/trace.json")):
        try:
            cases.append(Case.read(file))
        except (ValueError, OSError) as error:
            yield file.parent.name, f"{file}: {error}"

    def key(case: Case) -> tuple[str, str, bool]:
        return str(case.model.resolve()), case.way, case.with_adapter

    for (model, way, with_adapter), group in groupby(sorted(cases, key=key), key):
        with TemporaryDirectory() as temporary:
            named = Path(temporary) / (way or "model")
            named.mkdir()
            for file in Path(model).iterdir():
                if with_adapter or file.is_file():
                    named.joinpath(file.name).symlink_to(file)
            yield from _outcomes_of(named, list(group))


def _outcomes_of(model: Path, cases: list[Case]) -> Iterator[tuple[str, str | None]]:
    from lopa_ascend import LLM  # imports torch, which takes seconds

    try:
        llm = LLM(model, **OPTIONS)
    except (ValueError, OSError) as error:
        yield from ((case.name, str(error)) for case in cases)
        return
    with llm:
        for case in cases:
            try:
                yield case.name, case.run(llm)
            except ValueError as error:
                yield case.name, str(error)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval golden",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder with a folder for each case")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    different: list[Mapping[str, str]] = []
    num_cases = 0
    for name, first in outcomes(args.directory):
        num_cases += 1
        if first is not None:
            different.append({"case": name, "first": first})
        if not args.json:
            print(
                f"{'equal' if first is None else 'different':10s}{name}{'' if first is None else f'  {first}'}",
                flush=True,
            )
    if not num_cases:
        parser.error(f"argument DIR: {args.directory} has no */trace.json")
    print(json.dumps({"cases": num_cases, "equal": num_cases - len(different), "different": different}))
    sys.exit(1 if different else 0)
