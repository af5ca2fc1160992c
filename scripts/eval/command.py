"""What the commands share: defaults in --help, one loaded model at a time, and refusals in plain words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, EngineConfig, GraphParams, ParameterError
from lopa_ascend.config.presets import LIST, presets_text
from lopa_ascend.serve.flags import Flag, option
from scripts.arguments import is_refusal

if TYPE_CHECKING:
    from lopa_ascend import LLM


SEED = 0
"""Seed of the engine where none is given, so that a command with sampled answers can be repeated."""


def with_defaults(flags: Mapping[str, Flag], shown: Mapping[str, str]) -> dict[str, Flag]:
    """The flags with other defaults in --help, where a command chooses other ones than the server.

    Args:
        flags: by name.
        shown: by name of a flag what --help says of its default.
    """
    changed = {
        name: replace(flags[name], setting=replace(flags[name].setting, default_text=text))
        for name, text in shown.items()
    }
    return {**flags, **changed}


class Loader:
    """Loads one model at a time, and closes the last one at the end of its ``with`` block."""

    def __init__(self) -> None:
        self._loaded: tuple[dict[str, Any], LLM] | None = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None

    def load(self, engine: Mapping[str, Any]) -> LLM:
        """The model of these settings, in place of the one before it if that has others."""
        if self._loaded is None or self._loaded[0] != engine:
            from lopa_ascend import LLM  # imports torch, which takes seconds

            self.close()
            self._loaded = dict(engine), LLM(**engine)
        return self._loaded[1]


def graphs_for(params: DecodingParams, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of an engine that compiles its graphs for these parameters; none where steps are eager, so that a
    loaded model can be shared.

    Args:
        engine: the settings that were given.
    """
    return {} if EngineConfig(**engine).graph_mode == "eager" else {"graph_params": GraphParams.of(params)}


def run_command(
    parser: argparse.ArgumentParser,
    argv: list[str] | argparse.Namespace | None,
    body: Callable[[argparse.Namespace, Mapping[str, Any]], None],
) -> None:
    """Runs a command, or prints the presets if ``--preset list`` asks for them. Where an argument or a file turns out
    to be wrong, the command ends with a message.

    Args:
        parser: of its arguments.
        argv: the arguments; None for those of the process.
        body: what it does with all arguments and, by name, with those that were given or have a default.
    """
    args = argv if isinstance(argv, argparse.Namespace) else parser.parse_args(argv)
    if getattr(args, "preset", None) == LIST:
        sys.stdout.write(presets_text())
        return
    try:
        body(args, {name: value for name, value in vars(args).items() if value is not None})
    except ParameterError as error:
        parser.error(f"argument {error.at(option(error.param))}")
    except (ValueError, OSError) as error:
        if not is_refusal(error):
            raise
        parser.error(str(error))
