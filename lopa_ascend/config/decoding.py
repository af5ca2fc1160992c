"""How one request is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lopa_ascend.config.combinations import check_combinations, declaration, values_taken
from lopa_ascend.config.decodings import (
    Decodings,
    all_decodings,
    built_in_decodings,
    find_decoding,
    own_parameters,
    variants_of,
    with_graphs,
)
from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.kinds import AUTO
from lopa_ascend.config.parameters import AUTO_BRANCHES, MIN_TEMPERATURE, UsualParams
from lopa_ascend.config.presets import find_preset
from lopa_ascend.config.settings import (
    GraphSupport,
    Parameter,
    check_settings,
    checked_value,
    refuse_unknown,
    settings,
)


@dataclass(frozen=True, init=False)
class DecodingParams(UsualParams):
    """How one request is decoded. Defaults: the paper's for GSM8K (Table 5), but with three lookahead branches.

    A decoding's own parameters are given and read by name like all others. With another decoding such a parameter
    reads as what that one does, or as the default.

    Raises:
        ParameterError: a name is unknown, a value is not allowed, or two values do not go together; ``param`` names the
            field.
    """

    own: tuple[tuple[str, Any], ...] = ()
    """The decoding's own parameters, by name; see ``Strategy.parameters``."""

    def __init__(self, **values: Any) -> None:
        refuse_unknown([name for name in values if name != "own"], tuple(self.all_parameters()))
        usual = settings(UsualParams)
        own = dict(values.get("own", ())) | {name: values[name] for name in values if name not in {*usual, "own"}}
        for name, setting in usual.items():
            object.__setattr__(self, name, values.get(name, setting.default))
        object.__setattr__(self, "own", tuple(own.items()))
        self.__post_init__()

    def __post_init__(self) -> None:
        check_settings(self)
        usual = {name: getattr(self, name) for name in settings(UsualParams)}
        declared = own_parameters(all_decodings())
        own = {name: checked_value(name, value, declared[name]) for name, value in self.own}
        strategy = find_decoding(self.decoding, own)
        assert strategy is not None, "the check of its name has found it"
        if taken := settings(strategy.parameters).keys() & usual:
            raise ParameterError("decoding", f'"{self.decoding}" declares {min(taken)}, a parameter of all decodings')
        if self.num_branches is None:
            object.__setattr__(self, "num_branches", strategy.default_branches)
        if self.temperature < MIN_TEMPERATURE:
            # Nothing is sampled. Equal parameters let equal requests be scored together.
            for name, value in (("temperature", 0.0), ("top_p", None), ("top_k", None), ("min_p", 0.0)):
                object.__setattr__(self, name, value)
        check_combinations(strategy, {name: getattr(self, name) for name in usual} | own)
        kept = {name: own.get(name, setting.default) for name, setting in settings(strategy.parameters).items()}
        object.__setattr__(self, "own", tuple(kept.items()))
        object.__setattr__(self, "strategy", strategy)
        strategy.check(self)

    def __getattr__(self, name: str) -> Any:
        """A decoding's own parameter."""
        own = dict(self.__dict__.get("own", ()))
        if name in own:
            return own[name]
        if name not in own_parameters(all_decodings()):
            raise AttributeError(f"DecodingParams has no parameter {name!r}")
        taken = values_taken(self.strategy, name)
        return taken[0] if taken else declaration(name).default

    @property
    def lookaheads(self) -> int:
        return self.num_branches if isinstance(self.num_branches, int) else AUTO_BRANCHES

    @property
    def is_auto(self) -> bool:
        """The number of lookahead branches is chosen for each pass."""
        return self.num_branches == AUTO

    @property
    def follows_load(self) -> bool:
        """The number of lookahead branches depends on how many requests run. Not with "published": there a winning
        branch changes tokens, so they would depend on other requests."""
        return self.is_auto and self.branch_acceptance != "published"

    @property
    def is_pipelined(self) -> bool:
        """A window of blocks moves over the canvas and commits keys and values behind it. Otherwise the whole canvas
        is open from the beginning, and its keys and values are computed again."""
        commits: bool = self.strategy.commits
        return commits

    @property
    def max_window(self) -> int | None:
        """Most positions that several rows of a pass compute; None: any number."""
        size: int = self.block_size
        return size if self.strategy.has_one_open_block else None

    @property
    def most_rows(self) -> int:
        return self.block_size if self.strategy.has_row_of_each_position else 1 + self.lookaheads

    @property
    def row_length(self) -> int:
        """Positions of a row in a compiled forward pass: a block, or one."""
        return 1 if self.strategy.fills_one else self.block_size

    @property
    def eager_parameter(self) -> str | None:
        """A field with a value that no compiled step can decode, whatever it is compiled for; None: there is none.
        Each field declares what compiled steps support."""
        if self.strategy.decides_on_host:
            return None
        for name, parameter in self.all_parameters().items():
            value = getattr(self, name)
            if parameter.graphs is GraphSupport.DECODING and not with_graphs(value):
                return name
            if parameter.graphs is GraphSupport.DEFAULT and value != parameter.default:
                return name
        is_exact = self.branch_acceptance == "exact"
        # A compiled step cannot choose the number of branches; only with "exact" any number gives the same answer.
        if self.is_auto and not is_exact:
            return "num_branches"
        # A block may open in every pass, and compiled steps do not look two blocks ahead.
        if is_exact and self.lookaheads and not self.tau_add:
            return "tau_add"
        return None

    @property
    def ranking(self) -> str:
        """The confidence that a pass reports beside the probability; usually ``confidence``."""
        ranking: str = self.strategy.ranked_by(self)
        return ranking

    @property
    def is_random(self) -> bool:
        """The answer depends on the seed."""
        return self.temperature > 0 or self.strategy.draws(self)

    def eos_ids_or(self, models: tuple[int, ...]) -> tuple[int, ...]:
        """The request's own EOS ids, or else ``models``."""
        own = self.eos_token_id
        return models if own is None else (own,) if isinstance(own, int) else own

    def ends(self, eos: Iterable[int]) -> frozenset[int]:
        """Token ids that end the answer: stop ids, and ``eos`` unless ``ignore_eos``."""
        stop_ids = frozenset(self.stop_token_ids)
        return stop_ids if self.ignore_eos else stop_ids | frozenset(eos)

    @classmethod
    def preset(cls, name: str, **options: Any) -> DecodingParams:
        """The parameters of a published evaluation, e.g. "S13" of the LoPA paper (docs/decoding.md), but for
        ``options``. Raises ParameterError for an unknown preset or an option that is not allowed."""
        found = find_preset(name)
        refuse_unknown(options, cls.names())
        return cls(**found.merged(options))

    @classmethod
    def of(cls, **values: Any) -> DecodingParams:
        """The same as ``DecodingParams``."""
        return cls(**values)

    def for_continuations(self, longest: int) -> DecodingParams:
        """How continuations of at most ``longest`` tokens are scored: with this decoding's attention and blocks."""
        return DecodingParams(
            decoding=self.strategy.scored_by,
            block_size=self.block_size,
            window_attention=self.window_attention,
            max_new_tokens=longest,
        )

    def changed(self, **values: Any) -> DecodingParams:
        """A copy with other values, also of the decoding's own parameters. Raises ParameterError as the class does."""
        return replace(self, **values)

    def with_valid(self, **values: Any) -> DecodingParams:
        """A copy with other values, which are valid, fit the rest, and are in their stored form: nothing is checked.
        With checks the copies for a thousand choices take most of a second."""
        changed = copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of ``parameters``."""
        return tuple(cls.parameters())

    @classmethod
    def parameters(cls) -> Mapping[str, Parameter]:
        """The declarations by name, in order, without those of other packages' decodings."""
        return _declarations(all_decodings(), built_in=True)

    @classmethod
    def all_parameters(cls) -> Mapping[str, Parameter]:
        """``parameters``, and after them those of other packages' decodings."""
        return _declarations(all_decodings())


@dataclass(frozen=True)
class GraphParams:
    """The decoding that an engine compiles its graphs for. Requests that differ, or need more room, run eagerly."""

    num_branches: int = 3
    """Most lookahead branches that graphs have room for."""
    block_size: int = UsualParams.block_size
    """Largest block that graphs have room for."""
    window_attention: str = "block_causal"
    confidence: str = "max_prob"
    branch_acceptance: str = "published"
    drafts: bool = False

    @classmethod
    def of(cls, params: DecodingParams) -> GraphParams:
        """Graphs for these decoding defaults; the usual graphs if none can decode them."""
        if not params.is_pipelined or params.lookahead_depth > 1:
            return cls()
        runs_eagerly = params.is_auto and params.branch_acceptance != "exact"
        return cls(
            num_branches=cls.num_branches if runs_eagerly else params.lookaheads,
            block_size=params.row_length,
            window_attention=params.window_attention,
            confidence=params.confidence,
            branch_acceptance=params.branch_acceptance,
            drafts=params.strategy.drafts,
        )


@cache
def _declarations(decodings: Decodings, built_in: bool = False) -> Mapping[str, Parameter]:
    declared = {**settings(UsualParams)}
    declared |= {
        name: own for name, own in own_parameters(decodings, built_in=built_in).items() if name not in declared
    }
    found = {name: setting for name, setting in declared.items() if isinstance(setting, Parameter)}
    texts = [f'"{name}": {variants_of(name)[0].description}' for name in built_in_decodings()]
    return {**found, "decoding": replace(found["decoding"], help="; ".join(texts))}


def banned_ids(params: DecodingParams) -> list[tuple[int, ...]]:
    """The entries of ``bad_words`` that are token ids, not texts."""
    return [word for word in params.bad_words if not isinstance(word, str)]
