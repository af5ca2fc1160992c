"""Frozen configuration: a request's, an engine's and the model's. Values are checked once, on construction."""

from lopa_ascend.config.checks import ParameterError
from lopa_ascend.config.decoding import (
    BRANCH_SCORES,
    CONFIDENCES,
    DECODINGS,
    MIN_TEMPERATURE,
    WINDOW_ATTENTIONS,
    DecodingParams,
)
from lopa_ascend.config.engine import ATTENTION_LAYOUTS, GRAPH_MODES, EngineConfig
from lopa_ascend.config.limits import Limits
from lopa_ascend.config.model import ConfigError, ModelConfig

__all__ = [
    "ATTENTION_LAYOUTS",
    "BRANCH_SCORES",
    "CONFIDENCES",
    "DECODINGS",
    "GRAPH_MODES",
    "MIN_TEMPERATURE",
    "WINDOW_ATTENTIONS",
    "ConfigError",
    "DecodingParams",
    "EngineConfig",
    "Limits",
    "ModelConfig",
    "ParameterError",
]
