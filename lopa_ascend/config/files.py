"""Reads the text and JSON files of a model directory, with errors that name the file and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_text(file: Path, error_class: type[ValueError]) -> str:
    """The text of a UTF-8 file.

    Args:
        file: what to read.
        error_class: the caller's error for files that cannot be used.

    Raises:
        error_class: the file cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise error_class(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise error_class(f"{file}: is not UTF-8 text ({error})") from error


def read_json_object(file: Path, error_class: type[ValueError], *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        file: what to read.
        error_class: the caller's error for files that cannot be used.
        optional: a file that does not exist counts as an empty object.

    Raises:
        error_class: the file cannot be read, is not JSON, or holds something else than an object.
    """
    if optional and not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_class(f"{file}: cannot be read ({error.strerror}), expected a JSON object") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise error_class(f"{file}: is not valid JSON ({error}), expected a JSON object") from error
    if not isinstance(value, dict):
        raise error_class(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
