"""What users rely on by name is as recorded in tests/data/public_surface.json, and documented in docs/decoding.md."""

import json
from typing import Any

import pytest

from scripts import decoding_table, public_surface


@pytest.fixture(scope="module")
def current() -> dict[str, Any]:
    return public_surface.surface()


@pytest.mark.parametrize("part", public_surface.PARTS)
def test_the_surface_is_as_recorded(current: dict[str, Any], part: str):
    recorded = json.loads(public_surface.FILE.read_text("utf-8"))
    assert recorded.keys() == current.keys() == set(public_surface.PARTS)
    assert current[part] == recorded[part], "if this is meant: python -m scripts.public_surface --write"


def test_the_tables_of_decoding_parameters_are_those_of_the_declarations():
    page = decoding_table.PAGE.read_text("utf-8")
    for research in (False, True):
        assert decoding_table.table(research=research) in page, "python -m scripts.decoding_table --write"
    assert decoding_table.with_tables(page) == page
