"""What a request may ask of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.checks import ParameterError
from lopa_ascend.config.decoding import DecodingParams
from lopa_ascend.kv.pages import slots_for, worst_case


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask of an engine. Its branches are spread over ``branch_parallel_size`` groups."""

    vocab_size: int
    mask_token_id: int
    max_model_len: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_branches: int
    max_top_k: int | None = None
    branch_parallel_size: int = 1
    graph_mode: str = "eager"

    def num_slots(self, params: DecodingParams) -> int:
        """Slots of a request in each group."""
        return slots_for(1 + params.lookaheads, self.branch_parallel_size)

    def check(self, prompt_tokens: int, params: DecodingParams) -> None:
        """Refuses what could never run.

        Raises:
            ParameterError: the request does not fit; ``param`` names the field and the message the numbers.
        """
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ParameterError("prompt", f"has {prompt_tokens} tokens; max_model_len is {self.max_model_len}")
        if params.max_new_tokens > room:
            raise ParameterError(
                "max_new_tokens",
                f"{params.max_new_tokens} does not fit: the prompt has {prompt_tokens} tokens and "
                f"max_model_len is {self.max_model_len}, which leaves {room}",
            )
        if params.lookaheads > self.max_num_branches:
            raise ParameterError(
                "num_branches", f"{params.lookaheads} exceeds this server's max_num_branches {self.max_num_branches}"
            )
        block = min(params.block_size, params.max_new_tokens)
        if prompt_tokens + block > self.max_num_batched_tokens:
            raise ParameterError(
                "prompt",
                f"has {prompt_tokens} tokens, with the first block of {block} more than max_num_batched_tokens "
                f"{self.max_num_batched_tokens}",
            )
        if params.window_attention == "full" and self.branch_parallel_size > 1 and self.graph_mode != "eager":
            message = (
                f'"full" and branch_parallel_size {self.branch_parallel_size} do not go together in graph mode '
                f'{self.graph_mode}; choose "block_causal", or a server with graph mode eager'
            )
            raise ParameterError("window_attention", message)
        if params.top_k is not None and self.max_top_k is not None and params.top_k > self.max_top_k:
            raise ParameterError("top_k", f"{params.top_k} exceeds this server's limit of {self.max_top_k}")
        pages = worst_case(prompt_tokens + params.max_new_tokens, self.num_slots(params), prompt_tokens)
        if pages > self.num_pages:
            raise ParameterError(
                "num_branches",
                f"{1 + params.lookaheads} branches of {prompt_tokens} + {params.max_new_tokens} positions can need "
                f"{pages} KV pages; there are {self.num_pages}",
            )
        for token in params.eos_token_ids or ():
            if token >= self.vocab_size:
                raise ParameterError("eos_token_id", f"{token} is not below the vocabulary size {self.vocab_size}")
