"""Chat templates: where a model directory has one, and whether it is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_text, shown
from lopa_ascend.text.sandbox import ChatTemplate, LimitError, TemplateError
from lopa_ascend.text.tokenizer import TokenizerError


def read_template(path: Path, config_file: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    """The template in chat_template.jinja, or else the (default) one in tokenizer_config.json, whose content is
    ``config``; None if there is none. Also where it was found, for messages."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, TokenizerError), str(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {}
        for entry in template:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise TokenizerError(f"{config_file}: chat_template holds {shown(entry)}, expected name and template")
            by_name[entry["name"]] = entry.get("template")
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{config_file}: chat_template is {shown(template)}, expected a string")
    return template, f"{config_file}: chat_template"


def check_template(template: str, source: str) -> None:
    """Refuses what is no Jinja template, with a TokenizerError that names its ``source``."""
    try:
        ChatTemplate(template, {})
    except (TemplateError, LimitError) as error:
        raise TokenizerError(f"{source}: {error}, expected a Jinja template") from error
