"""The server's flags, made from the declared settings of the engine, the server and the decoding."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.config.kinds import Boolean, Bytes, Choice, exact_size
from lopa_ascend.config.settings import Section, Setting, settings
from lopa_ascend.serve.config import ServeConfig


@dataclass(frozen=True)
class Flag:
    name: str
    """With underscores: the name in a configuration file, and in what argparse returns."""
    owner: type[Any]
    """The dataclass whose field the flag sets."""
    field: str
    setting: Setting

    def parse(self, text: str) -> Any:
        """EngineConfig and DecodingParams check numbers and lists. Raises ValueError, which says what is allowed."""
        value = self.setting.kind.parse(text)
        if self.owner is ServeConfig or isinstance(self.setting.kind, Choice):
            self.setting.kind.checked(value)
        return value

    def help_text(self) -> str:
        text = self.setting.help
        if (default := self._shown_default()) is not None:
            text += f" (default: {default})"
        # Declarations name other settings in backquotes; here these become flags.
        return re.sub(r"`(\w+)`", lambda match: option(match[1]), text).replace("`", "").replace("%", "%%")

    def _shown_default(self) -> str | None:
        if self.setting.default_text is not None:
            return self.setting.default_text
        if self.setting.default in (None, ""):
            return None
        if isinstance(self.setting.kind, Bytes):
            return exact_size(self.setting.default)
        if isinstance(self.setting.default, bool):
            return "on" if self.setting.default else "off"
        return f"{self.setting.default:g}" if isinstance(self.setting.default, float) else str(self.setting.default)


def option(name: str) -> str:
    """A flag as it is written on the command line."""
    name = next((flag.name for flag in ENGINE_FLAGS.values() if flag.field == name), name)
    return "--" + name.replace("_", "-")


def _flags(owner: type[Any], declared: Mapping[str, Setting]) -> dict[str, Flag]:
    flags = {}
    for field, setting in declared.items():
        if setting.group is not None:
            name = setting.flag or field
            flags[name] = Flag(name, owner, field, setting)
    return flags


ENGINE_FLAGS = _flags(EngineConfig, settings(EngineConfig))
SERVE_FLAGS = _flags(ServeConfig, settings(ServeConfig))
DECODING_FLAGS = _flags(DecodingParams, DecodingParams.parameters())
FLAGS = {**ENGINE_FLAGS, **SERVE_FLAGS, **DECODING_FLAGS}

USUAL = frozenset((
    "model", "lora_path", "dtype", "device", "max_model_len", "served_model_name", "chat_template",
    "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "gpu_memory_utilization", "seed",
    "tensor_parallel_size", "branch_parallel_size", "replicas",
    "graph_mode",
    "host", "port", "api_key", "allowed_origins", "root_path", "request_timeout", "shutdown_timeout",
    "enable_log_requests", "ssl_certfile", "ssl_keyfile",
    "preset", "decoding", "num_branches", "block_size", "tau_conf", "max_new_tokens", "temperature",
))  # fmt: skip
"""The flags that people use, which --help shows, one line for each group; --help-all shows the others too."""


def add_flags(
    parser: argparse.ArgumentParser, flags: Mapping[str, Flag] = FLAGS, shown: Collection[str] | None = None
) -> None:
    """Adds flags in groups; --help shows those in ``shown``, None: all. A flag that is not given is None."""
    for group in Section:
        members = [flag for flag in flags.values() if flag.setting.group is group]
        if not members:
            continue
        is_shown = shown is None or any(flag.name in shown for flag in members)
        arguments = parser.add_argument_group(group.title, group.description) if is_shown else parser
        for flag in members:
            _add_flag(arguments, flag, flag.help_text() if shown is None or flag.name in shown else argparse.SUPPRESS)


def field_values(given: Mapping[str, Any], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Those of the given values that belong to these flags, by names of fields."""
    return {
        flag.field: tuple(given[name]) if flag.setting.kind.many else given[name]
        for name, flag in flags.items()
        if name in given
    }


def _add_flag(arguments: argparse._ActionsContainer, flag: Flag, text: str) -> None:
    kind = flag.setting.kind
    if isinstance(kind, Boolean):
        arguments.add_argument(option(flag.name), action=argparse.BooleanOptionalAction, help=text)
        return
    arguments.add_argument(
        option(flag.name),
        type=argument_type(flag),  # refuses an unknown choice, in the words of all other ways to give it
        choices=kind.known if isinstance(kind, Choice) else None,
        metavar=None if isinstance(kind, Choice) else flag.setting.metavar or kind.metavar,
        nargs="+" if kind.many else None,
        action="extend" if kind.many else "store",
        help=text,
    )


def argument_type(flag: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return flag.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
