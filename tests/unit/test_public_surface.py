"""What users rely on by name is as recorded in tests/data/public_surface.json, and documented in docs/decoding.md."""

import json
from typing import Any

import pytest

from ci import card_table, decoding_table, public_surface
from ci.decoding_table import with_table


@pytest.fixture(scope="module")
def current() -> dict[str, Any]:
    return public_surface.surface()


@pytest.mark.parametrize("part", public_surface.PARTS)
def test_the_surface_is_as_recorded(current: dict[str, Any], part: str):
    recorded = json.loads(public_surface.FILE.read_text("utf-8"))
    assert recorded.keys() == current.keys() == set(public_surface.PARTS)
    assert current[part] == recorded[part], "if this is meant: python -m ci.public_surface --write"


def test_the_tables_of_decoding_parameters_are_those_of_the_declarations():
    page = decoding_table.PAGE.read_text("utf-8")
    for research in (False, True):
        assert decoding_table.table(research=research) in page, "python -m ci.decoding_table --write"
    assert decoding_table.rules_table() in page
    assert decoding_table.with_tables(page) == page


def test_the_page_on_gpus_has_the_sizes_of_today() -> None:
    assert card_table.table() in card_table.PAGE.read_text("utf-8"), "python -m ci.card_table --write"


def test_a_table_takes_the_place_of_the_one_before_it():
    page = "<!-- table: one; written by x -->\n\n| old |\n\n<!-- table: other -->\n\n| kept |\n"
    assert with_table(page, "one", "| a |\n| b |\n") == page.replace("| old |\n", "| a |\n| b |\n")
    with pytest.raises(ValueError, match="has no comment"):
        with_table(page, "on", "")


def test_a_wrong_flag_is_refused_before_the_surface_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(public_surface, "surface", lambda: pytest.fail("made in vain"))
    monkeypatch.setattr("sys.argv", ["public_surface", "--no-such-flag"])
    with pytest.raises(SystemExit):
        public_surface.main()
