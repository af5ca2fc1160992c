"""Writes the answers that a CPU gives, which a server repeats at start: lopa_ascend.serve --check-answers FILE.

    python -m scripts.eval answers FILE --model Dream-v0-Instruct-7B --lora-path ADAPTER
    python -m scripts.eval answers FILE --model DIR --quantization w8a8 --decoding lopa --num-branches 3
    python -m scripts.eval answers FILE --model DIR --prompts prompts.txt --max-new-tokens 32

Give the decoding that the server is to have by default, so that its compiled steps are what is compared. The server
must have the same model, adapter and quantisation; its device, dtype, graph mode and ranks may differ. Each line of
--prompts is a text, a message if the model has a chat template, or a JSON list of token ids.

Near-ties may be decided otherwise on another device. So an answer is compared up to the first token that is less than
1.28 times as probable as the second (e to the power of 0.25), or that changes in one of four repetitions with noise:
all norms and biases are then multiplied by 1 + x, x normal with deviation 1/32, far more than rounding to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.files import read_text
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from lopa_ascend.hub import on_this_machine
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from lopa_ascend.text.tokenizer_files import load_template
from scripts.arguments import InputError, new_file
from scripts.eval.command import run_command, with_defaults

if TYPE_CHECKING:
    from torch import Tensor

    from lopa_ascend import LLM
    from lopa_ascend.engine.answers import Answer
    from lopa_ascend.types import TokenRun

PROMPTS = (
    "Question: A farmer has 17 sheep and buys 25 more. How many sheep does he have?\nAnswer:",
    "def fibonacci(n):\n",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7,",
)
FIXED = {"device": "cpu", "graph_mode": "eager", "enable_prefix_caching": False, "seed": 0}
"""The engine that writes answers."""
LENGTH = 64
"""``max_new_tokens`` where nothing is said of it."""
MARGIN = 0.25
"""Nats between the probabilities of a token and of the second one."""
NOISE = 2**-5
"""Deviation of the noise, as a share of each value."""
REPETITIONS = 4
_TAKEN = {"model", "lora_path", "dtype", "quantization", "quantization_exclude", "threads", "max_model_len"}
_LEFT_OUT = {"stop", "bad_words", "logit_bias", "temperature", "top_p", "top_k", "min_p", "max_thinking_tokens"}
"""Flags of text, and of sampling."""
_ENGINE = {name: flag for name, flag in ENGINE_FLAGS.items() if name in _TAKEN}
_DECODING = {name: flag for name, flag in DECODING_FLAGS.items() if name not in _LEFT_OUT}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval answers",
        usage="%(prog)s FILE [--prompts FILE] [FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=new_file, metavar="FILE", help="file to write")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: four short texts)")
    add_flags(parser, with_defaults({**_ENGINE, **_DECODING}, {"max_new_tokens": str(LENGTH)}))
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, run)


def run(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Writes the file, and prints a line for each prompt.

    Args:
        args: all arguments.
        given: by name, the arguments that were given or have a default.
    """
    config = on_this_machine(EngineConfig(**{**FIXED, **field_values(given, _ENGINE)}))
    fields = {"max_new_tokens": LENGTH, **field_values(given, _DECODING), "temperature": 0.0}
    params = {**fitting_defaults(recommended_decoding(config.model or DEMO_MODEL), fields), **fields}
    if DecodingParams(**params).is_random:
        raise ParameterError("decoding", "depends on a seed with these parameters; answers that are repeated may not")
    prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    from lopa_ascend import LLM  # imports torch, which takes seconds
    from lopa_ascend.engine.answers import MAX_ANSWERS, MAX_TOKENS, Identity, encode

    if params["max_new_tokens"] > MAX_TOKENS:
        raise ParameterError("max_new_tokens", f"must be at most {MAX_TOKENS} here, got {params['max_new_tokens']}")
    if len(prompts) > MAX_ANSWERS:
        raise InputError(f"{args.prompts}: has {len(prompts)} prompts, expected at most {MAX_ANSWERS}")
    options = {name: getattr(config, name) for name in ("model", "lora", *FIXED, *field_values(given, _ENGINE))}
    with LLM(**options) as llm:
        has_template = load_template(config.model or DEMO_MODEL) is not None
        answers = answered(llm, prompts, params, has_template=has_template)
        identity = Identity.of(config, Path(config.model or DEMO_MODEL))
        content = encode(identity, llm.engine.model_name, answers)
    args.file.write_text(json.dumps(content, indent=1) + "\n")
    print("| prompt | tokens | compared | smallest margin of these, nats |\n" + "|---" * 4 + "|")
    for answer in answers:
        name = answer.prompt or f"{len(answer.prompt_token_ids)} token ids"
        margin = min(answer.margins[: answer.exact], default=math.nan)
        print(f"| {json.dumps(name)[:40]} | {len(answer.token_ids)} | {answer.exact} | {margin:.2f} |")


def read_prompts(file: Path) -> list[str | list[int]]:
    """The prompts of a file.

    Raises:
        InputError: it cannot be read, has no prompt, or a list that is not of token ids.
    """
    found: list[str | list[int]] = []
    for number, line in enumerate(read_text(file, InputError).splitlines(), start=1):
        if not line.startswith("["):
            found += [line] if line else []
            continue
        try:
            found.append(msgspec.json.decode(line, type=list[int]))
        except msgspec.DecodeError as error:
            raise InputError(f"{file}: line {number}: {error}, expected a JSON list of token ids") from error
    if not found:
        raise InputError(f"{file}: has no prompt")
    return found


def answered(
    llm: LLM, prompts: Sequence[str | list[int]], params: Mapping[str, Any], *, has_template: bool
) -> list[Answer]:
    """The answers of a model, and how far other devices give them too.

    Args:
        has_template: the model has a chat template, so that texts are messages.
    """
    from lopa_ascend.engine.answers import Answer, first_difference, repeat

    def encoded(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str) and has_template:
            return llm.tokenize_chat([{"role": "user", "content": prompt}])
        return llm.tokenize(prompt)

    asked = [
        Answer(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(encoded(prompt)),
            params={**params, "top_logprobs": 2},
            token_ids=(0,),
            exact=0,
        )
        for prompt in prompts
    ]
    found = repeat(llm.engine, asked)
    margins = [_margins(run) for run in found]
    exact = [next((i for i, margin in enumerate(row) if margin < MARGIN), len(row)) for row in margins]
    for seed in range(REPETITIONS):
        with noisy(llm.engine.runner.model.weights, seed):
            others = repeat(llm.engine, asked)
        for index, (run, other) in enumerate(zip(found, others, strict=True)):
            exact[index] = min(exact[index], first_difference(run.ids, other.ids))
    if not any(exact):
        raise InputError("no answer begins with a token that is no near-tie; choose other prompts")
    return [
        msgspec.structs.replace(
            each, params=dict(params), token_ids=run.ids, margins=tuple(round(x, 3) for x in row), exact=number
        )
        for each, run, row, number in zip(asked, found, margins, exact, strict=True)
    ]


def _margins(run: TokenRun) -> list[float]:
    """For each token the logarithm of how much more probable it was than the most probable other one. Less than 0 for
    one that was not the best, as at the end of a draft."""
    margins = []
    for token, prob, best in zip(run.ids, run.probs, run.alternatives, strict=True):
        second = max((other for other_token, other in best if other_token != token), default=0.0)
        margins.append(math.log(max(prob, 1e-9) / max(second, 1e-9)))
    return margins


@contextmanager
def noisy(weights: Mapping[str, Tensor], seed: int) -> Iterator[None]:
    """Multiplies all vectors among some weights, norms and biases, by 1 + noise."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    vectors = [x for x in weights.values() if x.ndim == 1 and x.is_floating_point()]
    kept = [x.clone() for x in vectors]
    with torch.inference_mode():
        for vector in vectors:
            noise = torch.randn(vector.shape, generator=generator)
            vector.mul_((1 + NOISE * noise).to(vector.dtype))
        try:
            yield
        finally:
            for vector, before in zip(vectors, kept, strict=True):
                vector.copy_(before)
