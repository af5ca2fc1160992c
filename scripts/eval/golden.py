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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

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


class SdarParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``block_diffusion_generate`` of SDAR, greedy."""

    remasking_strategy: str
    block_length: int
    denoising_steps: int
    gen_length: int
    confidence_threshold: float = 0.85
    stop_at_eos: bool = False

    STRATEGIES: ClassVar = ("low_confidence_static", "low_confidence_dynamic", "sequential")

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. As published a block with a stop id is filled to its end."""
        if self.remasking_strategy not in self.STRATEGIES:
            raise ValueError(
                f"remasking_strategy: unknown value {self.remasking_strategy!r}, {_one_of(self.STRATEGIES)}"
            )
        return {
            "decoding": "d2f",
            "block_size": self.block_length,
            "tau_add": 1.0,
            "tau_conf": self.confidence_threshold if self.remasking_strategy == "low_confidence_dynamic" else 1.0,
            "acceptance": "sequential" if self.remasking_strategy == "sequential" else "threshold",
            "denoising_steps": self.denoising_steps,
            "finish_at_eos": False,
        }


class FastDllm2Params(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``generate`` of Fast-dLLM v2, greedy. Its ``max_new_tokens`` counts blocks."""

    max_new_tokens: int
    threshold: float = 1.0
    small_block_size: int = 8
    use_block_cache: bool = False
    stop_at_eos: bool = False

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names."""
        return {
            "decoding": "fast_dllm_v2",
            "block_size": recommended_decoding(model)["block_size"],
            "sub_block_size": self.small_block_size,
            "tau_conf": self.threshold,
            "sub_block_cache": self.use_block_cache,
        }


class LladaParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``generate`` of LLaDA ("gsai") and of Fast-dLLM's three for LLaDA ("fastdllm"), greedy."""

    variant: Literal["gsai", "fastdllm"]
    steps: int
    gen_length: int
    block_length: int
    cache: Literal["none", "prefix", "dual"] = "none"
    threshold: float | None = None
    factor: float | None = None
    cfg_scale: float = 0.0

    stop_at_eos: ClassVar = False

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. As published the whole canvas is filled."""
        if self.cfg_scale:
            raise ValueError(
                f"cfg_scale: is {self.cfg_scale:g}, expected 0: there is no classifier-free guidance, whose every pass "
                "also computes the canvas behind a prompt of masks"
            )
        found: dict[str, Any] = {"decoding": "parallel", "block_size": self.block_length, "finish_at_eos": False}
        if self.cache != "none":
            found |= {"decoding": "fast_dllm", "block_cache": self.cache}
        if self.factor is not None:
            return found | {"acceptance": "factor", "acceptance_factor": self.factor}
        if self.threshold is not None:
            return found | {"tau_conf": self.threshold}
        return found | {"tau_conf": 1.0, "denoising_steps": self.steps * self.block_length // self.gen_length}


class D3llmParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``generate_multi_block`` of d3LLM for LLaDA, and of ``_sample_multi_block`` for Dream, greedy."""

    max_new_tokens: int
    block_size: int
    threshold: float
    block_add_threshold: float
    decoded_token_threshold: float
    early_stop: bool = False

    @property
    def stop_at_eos(self) -> bool:
        return self.early_stop

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. There is no limit of blocks."""
        return {
            "decoding": "parallel",
            "block_size": self.block_size,
            "acceptance": "entropy",
            "confidence": "neg_entropy",
            "max_entropy": self.threshold,
            "tau_add": self.block_add_threshold,
            "tau_act": self.decoded_token_threshold,
            "max_active_blocks": self.max_new_tokens,
        }


class Llada2Params(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``generate`` of LLaDA2.0, and with ``editing_threshold`` of LLaDA2.1, greedy."""

    block_length: int
    steps: int
    gen_length: int
    threshold: float
    eos_early_stop: bool = False
    stop_at_eos: bool = True
    editing_threshold: float | None = None
    max_post_steps: int = 16
    num_to_transfer: int = 1

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. Without editing a block with an EOS is filled to its end, but for
        ``eos_early_stop``. With it ``steps`` has no effect."""
        found = {"decoding": "d2f", "block_size": self.block_length, "tau_add": 1.0, "tau_conf": self.threshold}
        if self.editing_threshold is None:
            return found | {"denoising_steps": self.steps, "finish_at_eos": self.eos_early_stop}
        steps, remainder = divmod(self.block_length, self.num_to_transfer)
        if remainder:
            raise ValueError(
                f"num_to_transfer: {self.num_to_transfer} does not divide block_length {self.block_length}"
            )
        editing = {"editing_threshold": self.editing_threshold, "max_post_steps": self.max_post_steps}
        return found | {"denoising_steps": steps, **editing}


class CausalParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of the modes of Nemotron-Labs-Diffusion, openPangu-R-7B-Diffusion and Orthrus, greedy."""

    mode: Literal["ar", "block", "linear_spec"]
    max_new_tokens: int
    block_length: int = 1
    num_small_blocks: int = 1
    alg: Literal["origin", "confidence_threshold", "entropy"] = "confidence_threshold"
    threshold: float | None = None
    stop_at_eos: bool = False
    max_thinking_tokens: int | None = None
    end_think_token_id: int | None = None
    lora: bool = False

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names."""
        if self.mode == "ar":
            return {"decoding": "ar"}
        if self.mode == "linear_spec":
            return {
                "decoding": "linear_spec",
                "block_size": self.block_length,
                "draft_threshold": self.threshold or 0.0,
            }
        found: dict[str, Any] = {
            "decoding": "causal_blocks",
            "block_size": self.block_length,
            "sub_block_size": self.block_length // self.num_small_blocks,
            "tau_conf": 1.0 if self.threshold is None or self.alg != "confidence_threshold" else self.threshold,
        }
        if self.alg == "entropy":
            found["confidence"] = "neg_entropy"
        if self.max_thinking_tokens is not None:
            if self.end_think_token_id is None:
                raise ValueError("end_think_token_id: is missing, expected an id, because of max_thinking_tokens")
            # The thoughts have begun. There is no tokenizer, which would know the marks.
            thinking = Thinking(True, (), (self.end_think_token_id,), self.max_thinking_tokens)
            found["structured_outputs"] = Grammar("any", "", thinking)
        return found


class A2dParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of dLLM's samplers for Tiny-A2D, greedy."""

    max_new_tokens: int
    block_size: int
    steps: int

    stop_at_eos: ClassVar = False

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. As published a block with an EOS is filled to its end."""
        num_blocks = -(-self.max_new_tokens // self.block_size)
        return {
            "decoding": "parallel",
            "block_size": self.block_size,
            "tau_conf": 1.0,
            "denoising_steps": -(-self.steps // num_blocks),
            "finish_at_eos": False,
        }


class A2dBlockParams(A2dParams):
    """The same in blocks, where a block with an EOS is the last."""

    stop_at_eos: ClassVar = True

    def decoding(self, model: Path) -> dict[str, Any]:
        return super().decoding(model) | {"decoding": "d2f", "tau_add": 1.0}


class DiffCoderParams(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``generate_block`` of Stable-DiffCoder, greedy."""

    gen_length: int
    block_length: int
    steps: int
    threshold: float | None
    stop_at_eos: bool = False

    def decoding(self, model: Path) -> dict[str, Any]:
        """The parameters by our names. The plan has no effect beside a threshold, if it is long enough."""
        steps = self.steps * self.block_length // self.gen_length
        pace = {"denoising_steps": steps, "tau_conf": 1.0} if self.threshold is None else {"tau_conf": self.threshold}
        return {"decoding": "d2f", "block_size": self.block_length, "tau_add": 1.0, "finish_at_eos": False, **pace}


class S2d2Params(msgspec.Struct, forbid_unknown_fields=True):
    """S2D2's beside those of the function that drafts. ``top_p`` has no effect here at temperature 0."""

    do_verify_policy: Literal["mask_span_length", "score_threshold", "score_hysteresis"]
    token_acceptance_estimator: Literal["soft_entropy_negexp"]
    do_verify_score_type: Literal["difference_static", "difference_dynamic"] = "difference_dynamic"
    do_verify_score_threshold: float = 0.0
    score_penalty_coef: float = 1.0
    hysteresis_threshold_on: float = 0.0
    hysteresis_threshold_off: float = 0.0
    min_ssd_span_length: int = 1
    cache_ver: bool = False
    draft_ver: bool = False
    top_p: float = 0.95

    def decoding(self, drafting: dict[str, Any]) -> dict[str, Any]:
        """The parameters by our names, with those of the drafts."""
        if self.cache_ver != self.draft_ver:
            raise ValueError("cache_ver: goes with draft_ver, expected both or none")
        found = drafting | {"decoding": "s2d2", "base": drafting["decoding"]}
        if self.cache_ver:
            found["window_attention"] = "causal"
        if self.do_verify_policy == "mask_span_length":
            return found | {"routing": "run", "routing_run": self.min_ssd_span_length}
        cost_of = "check" if self.do_verify_score_type == "difference_static" else "confident"
        found |= {"routing_cost": self.score_penalty_coef, "routing_cost_of": cost_of}
        if self.do_verify_policy == "score_threshold":
            return found | {"routing": "score", "routing_on": self.do_verify_score_threshold}
        on, off = self.hysteresis_threshold_on, self.hysteresis_threshold_off
        return found | {"routing": "hysteresis", "routing_on": on, "routing_off": off}


FAMILIES = {
    "sdar": SdarParams,
    "fastdllm2": FastDllm2Params,
    "llada": LladaParams,
    "llada2": Llada2Params,
    "d3llm": D3llmParams,
    "nemotron": CausalParams,
    "pangu": CausalParams,
    "orthrus": CausalParams,
    "a2d_mdlm": A2dParams,
    "a2d_bd3lm": A2dBlockParams,
    "diffcoder": DiffCoderParams,
    "sdar_s2d2": SdarParams,
    "fastdllm2_s2d2": FastDllm2Params,
}
"""The published parameters of each family that can be compared."""


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
        found, decoding = _in_our_terms(trace, model)
        output = trace.output_ids
        if trace.mask_token_id in output:  # after a stop the published code leaves masks
            output = output[: output.index(trace.mask_token_id)]
        passes, with_adapter = trace.trace, True
        if isinstance(found, CausalParams) and found.mode == "linear_spec":
            output, limit = output[: found.max_new_tokens], len(trace.prompt_ids) + found.max_new_tokens
            passes, with_adapter = [each for each in passes if each.start + each.len <= limit], found.lora
        decoding["max_new_tokens"], end = len(output), None
        if "structured_outputs" not in decoding:  # which ends at an EOS
            decoding["ignore_eos"] = not found.stop_at_eos
        if found.stop_at_eos:
            if trace.eos_token_id is None:
                raise ValueError("eos_token_id: is missing, expected an id, because of stop_at_eos")
            decoding["eos_token_id"] = trace.eos_token_id
            if decoding.get("finish_at_eos", True) and trace.eos_token_id in output:
                output = output[: output.index(trace.eos_token_id)]
                end = len(trace.prompt_ids) + len(output)
        fills = [sorted(forward.fills) for forward in passes if forward.fills]
        while end is not None and fills[-1][0][0] > end:  # the published code goes on behind an EOS
            fills.pop()
        way, params = trace.family.partition("_")[2], DecodingParams(**decoding)
        return cls(file.parent.name, model, trace.prompt_ids, params, output, fills, with_adapter, way)

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


def _in_our_terms(trace: Trace, model: Path) -> tuple[Any, dict[str, Any]]:
    """The published parameters of a trace, and the decoding parameters that they stand for.

    Raises:
        ValueError: a name or a value is unknown.
    """
    published = FAMILIES[trace.family]
    checked = (S2d2Params,) if trace.family.endswith("_s2d2") else ()
    names = [name for each in (published, *checked) for name in each.__struct_fields__]
    if unknown := sorted(trace.params.keys() - {*names}):
        raise ValueError(f"params: unknown name {unknown[0]!r}, {_one_of(names)}")
    found = _taken(published, trace.params)
    decoding = found.decoding(model)
    for each in checked:
        decoding = _taken(each, trace.params).decoding(decoding)
    return found, decoding


def _changes(record: StepRecord) -> Fills:
    """What a pass fills and edits."""
    fills: Fills = [(fill.position, fill.token) for fill in (*record.fills, *record.forced)]
    return sorted([*fills, *((edit.position, edit.token, edit.replaced) for edit in record.edits)])


def _taken(struct: Any, params: Mapping[str, Any]) -> Any:
    """A struct of those parameters that it has."""
    return msgspec.convert({name: params[name] for name in struct.__struct_fields__ if name in params}, struct)


def _one_of(names: Any) -> str:
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
