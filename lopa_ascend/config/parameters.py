"""The decoding parameters that all decodings have, each declared once. A decoding declares its own with its class."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.decodings import DecodingName
from lopa_ascend.config.kinds import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    Boolean,
    Integer,
    IntegerOrAuto,
    Number,
    Strings,
    StructuredOutputs,
    TokenIds,
    TokenNumbers,
    Words,
)
from lopa_ascend.config.settings import DERIVED, GraphSupport, parameter
from lopa_ascend.types import Grammar

AUTO_BRANCHES = 3
"""Lookahead branches of a pass with ``num_branches`` "auto", if it has any."""
AUTO_REQUESTS = 2
"""With more running requests drafts cost more than they save. The planner's cost of a step of Dream-7B on a 910C die:
three drafts make two requests 1.2 times as fast, and three requests slower."""
MIN_TEMPERATURE = 0.01
"""Lower temperatures count as 0: logits divided by them leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class UsualParams:
    decoding: str = parameter("lopa", DecodingName(), "see ``Strategy.description``", graphs=GraphSupport.DECODING)
    num_branches: int | str = parameter(
        DERIVED,
        IntegerOrAuto(0, 255),
        "the paper's k: lookahead branches beside the anchor branch, each with one more position filled; "
        f'"auto": {AUTO_BRANCHES}, but none where they do not pay: with `branch_acceptance` "verified" and "exact" '
        f'while more than {AUTO_REQUESTS} requests run, with "published" after a pass in which a rule accepted '
        "positions",
        default_text='3 with "lopa", otherwise 0',
        graphs=GraphSupport.BUCKET,
    )
    block_size: int = parameter(32, Integer(1, 4096), "positions in a block", graphs=GraphSupport.BUCKET)
    tau_add: float = parameter(0.1, Number(0, 1), "a new block is added once this fraction of the last block is filled")
    tau_act: float = parameter(
        0.95,
        Number(0, 1),
        "a block must fill at least one position in every step once this fraction of the block before it is filled",
    )
    tau_conf: float = parameter(
        0.9,
        Number(0, 1),
        "a position is filled when the probability of its token is above this; a lower value is faster and "
        "less accurate",
    )
    max_new_tokens: int = parameter(
        256,
        Integer(1),
        "most tokens to generate; together with the prompt they must fit into `max_model_len`",
        aliases=("max_tokens", "max_completion_tokens", "max_output_tokens"),
    )
    min_new_tokens: int = parameter(
        0,
        Integer(0),
        "within this many generated tokens no EOS is produced and no stop string ends the answer",
        aliases=("min_tokens",),
        graphs=GraphSupport.DEFAULT,
    )
    stop: tuple[str, ...] = parameter(
        (), Strings(), "strings that end the answer; they are cut off", default_text="none"
    )
    temperature: float = parameter(
        0.0,
        Number(0, 100),
        f"below {MIN_TEMPERATURE}: take the most probable token; from there on sample, reproducibly by `seed`",
        graphs=GraphSupport.DEFAULT,
    )
    top_p: float | None = parameter(
        None,
        Number(0, 1),
        "sample from the most probable tokens whose probabilities sum up to this; no effect without `temperature`",
        default_text="off",
        off=(1,),
    )
    top_k: int | None = parameter(
        None,
        Integer(1, INT32_MAX),
        "sample from this many most probable tokens; no effect without `temperature`",
        default_text="off",
        off=(0, -1),
    )
    min_p: float = parameter(
        0.0,
        Number(0, 1),
        "sample from the tokens whose probability is at least this share of the largest one; no effect without "
        "`temperature`",
        graphs=GraphSupport.DEFAULT,
    )
    seed: int | None = parameter(
        None,
        Integer(INT64_MIN, INT64_MAX),
        "seed of this request's sampling; the same request with the same seed gets the same answer",
        group=None,  # the flag --seed is the engine's, from which requests draw theirs
        default_text="a new one for each answer, which the answer names",
    )
    presence_penalty: float = parameter(
        0.0,
        Number(-2, 2),
        "subtracted from the logit of every token that the committed part of the answer holds",
        graphs=GraphSupport.DEFAULT,
    )
    frequency_penalty: float = parameter(
        0.0,
        Number(-2, 2),
        "subtracted from a token's logit for each time that the committed part of the answer holds the token",
        graphs=GraphSupport.DEFAULT,
    )
    repetition_penalty: float = parameter(
        1.0,
        Number(0.01, 100),
        "positive logits are divided and negative ones multiplied by this, for tokens of the prompt and of the "
        "committed part of the answer",
        graphs=GraphSupport.DEFAULT,
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (),
        TokenNumbers(Number(-100, 100)),
        "numbers that are added to the logits of tokens, by token id",
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    bad_words: tuple[str | tuple[int, ...], ...] = parameter(
        (),
        Words(max_texts=256, max_characters=64),
        "words that the answer does not contain, as texts or as lists of token ids",
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    structured_outputs: Grammar | None = parameter(
        None,
        StructuredOutputs(max_characters=2**17, max_choices=4096),
        "grammar that the answer keeps to: {json: a JSON schema}, {json_object: true}, {regex: an expression}, "
        "{choice: a list of texts} or {grammar: in the syntax of Lark}",
        group=None,
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    max_thinking_tokens: int | None = parameter(
        None,
        Integer(0, INT32_MAX),
        "most tokens that a model which thinks before its answer thinks in a conversation",
        default_text="no limit",
        aliases=("thinking_token_budget",),
        graphs=GraphSupport.DEFAULT,
    )
    top_logprobs: int = parameter(
        0,
        Integer(0, 20),
        "most probable tokens that are recorded for a position when it is filled",
        group=None,  # each request that shows them asks for them
        graphs=GraphSupport.DEFAULT,
        own_field=True,
    )
    eos_token_id: int | tuple[int, ...] | None = parameter(
        None,
        TokenIds(),
        "token ids that end the answer; the model's are those of generation_config.json or config.json, and the "
        "tokenizer's pad_token unless it is the mask",
        default_text="the model's",
        graphs=GraphSupport.BUCKET,
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (),
        TokenIds(),
        "further token ids that end the answer, even if `ignore_eos` is set; a stop string that is a special token "
        "counts as one",
        default_text="none",
        graphs=GraphSupport.BUCKET,
    )
    ignore_eos: bool = parameter(False, Boolean(), "go on after an EOS")
    finish_at_eos: bool = parameter(
        True,
        Boolean(),
        "end as soon as the text up to the EOS is final; otherwise fill every open block first, as the published "
        "code does",
        group=None,
    )
