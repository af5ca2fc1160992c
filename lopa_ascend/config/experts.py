"""Mixtures of experts: the fields of ``config.json`` that describe them, checked."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.files import ConfigError, Fields

ONLY: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "score_function": ("sigmoid", None),
    "moe_router_enable_expert_bias": (True, None),
    "norm_topk_prob": (True, None),
    "router_dtype": ("fp32", None),
    "use_qk_norm": (True, None),
    "use_qkv_bias": (False, None),
    "use_bias": (False, None),
    "use_rmsnorm": (True, None),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "using_split_qkv_in_self_attention": (False, None),
}
"""Fields of LLaDA2 beside its sizes, with the values that can be computed. None is a missing field."""
SIZES = frozenset(
    {
        *("first_k_dense_replace", "moe_intermediate_size", "n_group", "num_experts", "num_experts_per_tok"),
        *("num_shared_experts", "routed_scaling_factor", "topk_group", "partial_rotary_factor", "rotary_dim"),
        "expert_capacity",
    }
)
"""The fields that are read here."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The MLPs of a model whose layers have many, of which each token takes a few."""

    num_experts: int
    per_token: int
    """Experts that a token takes."""
    num_groups: int
    """Groups of consecutive experts, all of one size."""
    kept_groups: int
    """Groups from which a token takes its experts."""
    scale: float
    """What the weights of a token's experts are multiplied by; their sum is 1 before."""
    inner: int
    """Width of an expert."""
    shared_inner: int
    """Width of the MLP that every token takes beside its experts."""
    first_layer: int
    """The layers before this one have one MLP, as in a dense model."""

    @classmethod
    def read(cls, fields: Fields, num_layers: int) -> ExpertsConfig:
        """The mixture of experts that the fields of a ``config.json`` describe.

        Raises:
            ConfigError: a field is missing or malformed, or does not go with another one.
        """
        if fields.has("expert_capacity"):
            capacity = fields.get("expert_capacity")
            raise ConfigError(
                f"{fields.source}: expert_capacity is {capacity}, expected no such field: LLaDA2.2 routes blocks, "
                "and its decoding inserts and deletes tokens, so positions would move under keys and values that are "
                "final; LLaDA2.0 and 2.1 are supported"
            )
        num_experts, groups = fields.integer("num_experts", 2**12), fields.integer("n_group", 2**12, default=1)
        kept = fields.integer("topk_group", 2**12, default=groups)
        if num_experts % groups or num_experts // groups < 2:
            raise fields.error("n_group", f"a number that divides num_experts {num_experts} into groups of at least 2")
        if kept > groups:
            raise fields.error("topk_group", f"at most n_group {groups}")
        per_token, choice = fields.integer("num_experts_per_tok", 2**12), kept * (num_experts // groups)
        if per_token > choice:
            kept_by = f"the {choice} of {num_experts} experts that {kept} of {groups} groups have"
            raise fields.error("num_experts_per_tok", f"at most {kept_by}")
        first = fields.get("first_k_dense_replace", 0)
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < num_layers:
            raise fields.error("first_k_dense_replace", f"a number below num_hidden_layers {num_layers}")
        inner = fields.integer("moe_intermediate_size", 2**22)
        return cls(
            num_experts=num_experts,
            per_token=per_token,
            num_groups=groups,
            kept_groups=kept,
            scale=fields.number("routed_scaling_factor", 1.0),
            inner=inner,
            shared_inner=inner * fields.integer("num_shared_experts", 2**10),
            first_layer=first,
        )


def rotary_dim(fields: Fields, head_dim: int) -> int:
    """Elements of a head that are rotated: the first ones, by ``partial_rotary_factor``, else by ``rotary_dim``.

    Raises:
        ConfigError: the two contradict each other, or the number is odd or larger than a head.
    """
    named = fields.integer("rotary_dim", 2**14, default=head_dim)
    factor = fields.number("partial_rotary_factor", named / head_dim, at_most=1.0)
    found = int(head_dim * factor)
    if found % 2 or not found:
        raise fields.error("partial_rotary_factor", f"a share of head_dim {head_dim} that is an even number")
    if fields.has("rotary_dim") and named != found:
        raise fields.error("rotary_dim", f"{found}, which is head_dim {head_dim} x partial_rotary_factor {factor:g}")
    return found
