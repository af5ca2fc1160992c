"""Models and adapters by their names on the Hugging Face hub, which huggingface_hub keeps in its cache.

Only safetensors, configurations and tokenizer files are downloaded. Code of a repository never is, so none can run.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lopa_ascend.config import EngineConfig

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_CACHED = "models--"
"""What the cache's folder of a model begins with: models--ORG--NAME/snapshots/COMMIT."""


class Name(NamedTuple):
    param: str
    """The setting: "model" or "lora"."""
    repository: str
    """ORG/NAME."""
    revision: str = "main"
    """A branch, tag or commit."""


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """Replaces names on the hub, ORG/NAME or ORG/NAME@REVISION, by directories of this machine. Downloads what is
    missing, if it fits into memory and onto the disk. A path that exists is no name.

    Raises:
        ParameterError: the hub cannot be reached or has no such repository, the model is of no known family, or it does
            not fit. No weight was downloaded.
    """
    names = [name for param in ("model", "lora") if (name := name_in(getattr(config, param), param)) is not None]
    if not names:
        return config
    from lopa_ascend.hub.fit import check_fit
    from lopa_ascend.hub.repository import Repository  # imports huggingface_hub, which takes long

    found = [Repository(name) for name in names]
    for repository in found:
        is_model = repository.name.param == "model"
        repository.download(partial(check_fit, repository.name.repository, config) if is_model else None)
    here: dict[str, Any] = {repository.name.param: str(repository.directory) for repository in found}
    return replace(config, **here)


def directory_of(text: str, param: str = "model", *, with_weights: bool = True) -> Path:
    """The directory that a path or a name on the hub means, for tools that do not decode with it. ``param`` is the
    setting that messages name, "model" or "lora"; without ``with_weights`` a model's JSON files are enough. Raises
    ParameterError as ``on_this_machine``; whether the model fits is not looked at."""
    if (name := name_in(text, param)) is None:
        return Path(text)
    from lopa_ascend.hub.repository import Repository  # imports huggingface_hub

    repository = Repository(name)
    if with_weights:
        repository.download()
    return repository.directory


def name_in(text: str | None, param: str = "model") -> Name | None:
    """What a value names on the hub; None if it is a path of something that exists, or no such name. A directory of the
    cache that is not here, since another machine has named it, is the name of its commit."""
    if text is None or os.path.exists(text):
        return None
    if (cached := repository_of(Path(text))) is not None:
        return Name(param, *cached)
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return Name(param, match[1], match[2] or "main")


def repository_of(directory: Path) -> tuple[str, str] | None:
    """ORG/NAME and the commit of a directory in the cache of the hub; None for another directory."""
    folder = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not folder.startswith(_CACHED):
        return None
    return folder.removeprefix(_CACHED).replace("--", "/"), directory.name


def model_name(config: EngineConfig) -> str:
    """What the configured model is called: ORG/NAME if it is from the hub, else the name of its directory."""
    if config.model is None:
        return "demo"
    path = Path(config.model).resolve()
    repository = repository_of(path)
    return path.name if repository is None else repository[0]
