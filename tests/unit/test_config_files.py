"""The readers of text and JSON files: what they accept, and errors of the caller's class that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_ascend.config.files import read_json_object, read_text


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory), expected a JSON object"),
        (
            b"{",
            "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)), expected",
        ),
        (
            b'{"a": "\xff"}',
            "is not valid JSON ('utf-8' codec can't decode byte 0xff in position 7: invalid start byte)",
        ),
        (b"[1]", "expected a JSON object, found list"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OwnError) as caught:
        read_json_object(file, OwnError)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_a_file_that_may_be_missing(tmp_path: Path):
    file = tmp_path / "x.json"
    assert read_json_object(file, OwnError, optional=True) == {}
    file.write_text('{"a": [1]}')
    assert read_json_object(file, OwnError, optional=True) == read_json_object(file, OwnError) == {"a": [1]}
    file.write_text('\ufeff{"a": [1]}')
    assert read_json_object(file, OwnError) == {"a": [1]}
    file.write_text("5")
    with pytest.raises(OwnError, match="found int"):
        read_json_object(file, OwnError, optional=True)


def test_a_file_that_cannot_be_looked_at_is_refused_even_if_it_may_be_missing(tmp_path: Path):
    with pytest.raises(OwnError, match=r"cannot be read \(File name too long\)"):
        read_json_object(tmp_path / ("x" * 300), OwnError, optional=True)


def test_a_path_that_no_file_can_have(tmp_path: Path):
    for read in (read_json_object, read_text):
        with pytest.raises(OwnError, match=r"a\\x00b': embedded null byte"):
            read(tmp_path / "a\0b", OwnError)


def test_text(tmp_path: Path):
    file = tmp_path / "x.txt"
    file.write_text("caf\u00e9", encoding="utf-8")
    assert read_text(file, OwnError) == "caf\u00e9"
    file.write_text("\ufeffcaf\u00e9", encoding="utf-8")  # as some editors begin a file
    assert read_text(file, OwnError) == "caf\u00e9"
    file.write_bytes(b"\xff")
    with pytest.raises(OwnError, match=r"x\.txt: is not UTF-8 text \("):
        read_text(file, OwnError)
    with pytest.raises(OwnError, match=r"none: cannot be read \(No such file or directory\)"):
        read_text(tmp_path / "none", OwnError)
