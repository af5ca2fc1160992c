"""How one request is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

from lopa_ascend.config.combinations import COMMITTING, check_combinations, filled_by
from lopa_ascend.config.decodings import PIPELINED, all_own_parameters, built_in_like, checked_own, needed_confidence
from lopa_ascend.config.kinds import AUTO
from lopa_ascend.config.parameters import ALGS, AUTO_BRANCHES, MIN_TEMPERATURE, ResearchParams, UsualParams
from lopa_ascend.config.presets import find_preset
from lopa_ascend.config.settings import (
    GraphSupport,
    Parameter,
    ParameterError,
    check_settings,
    refuse_unknown,
    settings,
)


@dataclass(frozen=True, kw_only=True)
class DecodingParams(ResearchParams, UsualParams):
    """How one request is decoded. Defaults: the paper's for GSM8K (Table 5), but with three lookahead branches.

    Raises:
        ParameterError: a value is not allowed, or two values do not go together; ``param`` names the field.
    """

    own: tuple[tuple[str, Any], ...] = ()
    """The parameters that a decoding of another package declares itself, by name; ``of`` takes them like all others."""

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "own", checked_own(self.decoding, dict(self.own)))
        if taken := [name for name, _ in self.own if name in self.names()]:
            raise ParameterError("decoding", f'"{self.decoding}" declares {taken[0]}, a parameter of all decodings')
        if self.num_branches is None:
            object.__setattr__(self, "num_branches", 3 if built_in_like(self.decoding) == "lopa" else 0)
        if self.window_attention is None:
            object.__setattr__(self, "window_attention", "block_causal" if self.is_pipelined else "full")
        if self.temperature < MIN_TEMPERATURE:
            # Nothing is sampled. Equal parameters let equal requests be scored together.
            for name, value in (("temperature", 0.0), ("top_p", None), ("top_k", None), ("min_p", 0.0)):
                object.__setattr__(self, name, value)
        check_combinations(self)

    @property
    def lookaheads(self) -> int:
        """Most lookahead branches of a pass."""
        return self.num_branches if isinstance(self.num_branches, int) else AUTO_BRANCHES

    @property
    def is_auto(self) -> bool:
        """Whether the number of lookahead branches is chosen for each pass."""
        return self.num_branches == AUTO

    @property
    def follows_load(self) -> bool:
        """Whether the number of lookahead branches depends on how many requests run.

        Not with "published", where a branch that wins changes tokens: they would depend on other requests.
        """
        return self.is_auto and self.branch_acceptance != "published"

    @property
    def is_pipelined(self) -> bool:
        """Whether a window of blocks moves over the canvas and commits keys and values behind it. If not, the whole
        canvas is there from the beginning, and keys and values are computed again."""
        return filled_by(self.decoding, self.base) in COMMITTING

    @property
    def eager_parameter(self) -> str | None:
        """A field whose value no compiled step can decode, whatever it is compiled for; None if some can.

        Which values compiled steps support is declared with each field.
        """
        for name, parameter in self.parameters().items():
            value = getattr(self, name)
            if parameter.graphs is GraphSupport.PIPELINED and value not in PIPELINED:
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
        """The confidence that a pass reports beside the probability: as a rule ``confidence``; with "vanilla" the one
        that ``alg`` ranks positions by; the one that a decoding of another package needs."""
        if built_in_like(self.decoding) == "vanilla":
            return ALGS[self.alg]
        return needed_confidence(self.decoding) or self.confidence

    @property
    def is_random(self) -> bool:
        """Whether the answer depends on the seed."""
        draws_positions = built_in_like(self.decoding) == "vanilla" and (self.alg == "origin" or self.alg_temp > 0)
        return self.temperature > 0 or draws_positions

    def eos_ids_or(self, models: tuple[int, ...]) -> tuple[int, ...]:
        """The EOS ids of the request: its own if it names any, else those of the model."""
        own = self.eos_token_id
        return models if own is None else (own,) if isinstance(own, int) else own

    def ends(self, eos: Iterable[int]) -> frozenset[int]:
        """Token ids that end the answer.

        Args:
            eos: EOS ids, which end it unless ``ignore_eos``.
        """
        stop_ids = frozenset(self.stop_token_ids)
        return stop_ids if self.ignore_eos else stop_ids | frozenset(eos)

    @classmethod
    def preset(cls, name: str, **options: Any) -> DecodingParams:
        """The parameters of a published evaluation, such as "S13" of the LoPA paper; see docs/decoding.md.

        Args:
            name: of the preset.
            options: parameters in place of the preset's.

        Raises:
            ParameterError: there is no such preset, or an option is not allowed.
        """
        found = find_preset(name)
        refuse_unknown(options, cls.names())
        return cls(**found.merged(options))

    @classmethod
    def of(cls, **values: Any) -> DecodingParams:
        """The parameters with these values, among them those that the decoding declares itself.

        Raises:
            ParameterError: a name is unknown, or a value is not allowed.
        """
        refuse_unknown(values, tuple(cls.all_parameters()))
        names = cls.names()
        own = tuple((name, value) for name, value in values.items() if name not in names)
        return cls(**{name: value for name, value in values.items() if name in names}, own=own)

    def for_continuations(self, longest: int) -> DecodingParams:
        """How continuations of a prompt are scored: in one pass over ``longest`` masks, with the attention and in the
        blocks of this decoding."""
        return DecodingParams(
            decoding="d2f" if self.is_pipelined else "parallel",
            block_size=self.block_size,
            window_attention=self.window_attention,
            max_new_tokens=longest,
        )

    def with_valid(self, **values: Any) -> DecodingParams:
        """A copy with other values, which are known to be valid and to go with the rest: nothing is checked again.
        Copies for a thousand choices would otherwise take most of a second.

        Args:
            values: by name, in the form in which they are stored.
        """
        changed = copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all parameters, in order, but for those that decodings of other packages declare."""
        return tuple(cls.parameters())

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """The declarations by name, in order."""
        return _declarations(cls)

    @classmethod
    def all_parameters(cls) -> dict[str, Parameter]:
        """The declarations by name, in order, and after them those of decodings of other packages."""
        found = cls.parameters()
        for declared in all_own_parameters().values():
            for name, parameter in _declarations(declared).items():
                found.setdefault(name, parameter)
        return found


@dataclass(frozen=True)
class GraphParams:
    """The decoding that an engine compiles its graphs for. Requests with others, or that need more room, run eagerly.

    It follows the decoding defaults of a server or of a model, by ``of``.
    """

    num_branches: int = 3
    """Most lookahead branches that graphs have room for."""
    block_size: int = UsualParams.block_size
    """Largest block that graphs have room for."""
    window_attention: str = "block_causal"
    confidence: str = ResearchParams.confidence
    branch_acceptance: str = ResearchParams.branch_acceptance

    @classmethod
    def of(cls, params: DecodingParams) -> GraphParams:
        """Graphs for requests with these parameters; for those of other requests if no graph can decode these."""
        if not params.is_pipelined or params.lookahead_depth > 1:
            return cls()
        runs_eagerly = params.is_auto and params.branch_acceptance != "exact"
        return cls(
            num_branches=cls.num_branches if runs_eagerly else params.lookaheads,
            block_size=params.block_size,
            window_attention=params.window_attention,
            confidence=params.confidence,
            branch_acceptance=params.branch_acceptance,
        )


def _declarations(owner: type[Any]) -> dict[str, Parameter]:
    return {name: setting for name, setting in settings(owner).items() if isinstance(setting, Parameter)}


def banned_ids(params: DecodingParams) -> list[tuple[int, ...]]:
    """The entries of ``bad_words`` that are token ids rather than texts."""
    return [word for word in params.bad_words if not isinstance(word, str)]
