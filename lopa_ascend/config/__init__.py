"""Configuration of a request, of an engine and of a model, frozen and checked on construction.

Each setting is declared once, as ``config.settings`` describes.
"""

from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.decoding import DecodingParams, GraphParams
from lopa_ascend.config.decodings import add_decoding
from lopa_ascend.config.engine import (
    ATTENTION_LAYOUTS,
    GRAPH_MODES_BY_DEVICE,
    EngineConfig,
    divided_length,
)
from lopa_ascend.config.errors import ContextLengthError, ParameterError, context_length
from lopa_ascend.config.files import ConfigError
from lopa_ascend.config.model import ExpertsConfig, ModelConfig, YarnConfig
from lopa_ascend.config.parameters import MIN_TEMPERATURE
from lopa_ascend.config.presets import Preset, find_preset, presets
from lopa_ascend.config.settings import GraphSupport

__all__ = [
    "ATTENTION_LAYOUTS",
    "GRAPH_MODES_BY_DEVICE",
    "MIN_TEMPERATURE",
    "ConfigError",
    "ContextLengthError",
    "DecodingParams",
    "EngineConfig",
    "ExpertsConfig",
    "GraphParams",
    "GraphSupport",
    "ModelConfig",
    "YarnConfig",
    "ParameterError",
    "Preset",
    "add_decoding",
    "context_length",
    "divided_length",
    "find_preset",
    "fitting_defaults",
    "presets",
]
