"""Makes the tables of decoding parameters in docs/decoding.md, and the one of what goes with what.

    python -m ci.decoding_table            print the tables
    python -m ci.decoding_table --write    put them into docs/decoding.md

They follow from the declarations of the parameters and the rules in lopa_ascend/config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import FILLER, LIKE, RULES, Rule, listed
from lopa_ascend.config.parameters import ResearchParams
from lopa_ascend.config.settings import HelpFormatter, Parameter

PAGE = Path(__file__).resolve().parents[1] / "docs" / "decoding.md"
TITLES = ("parameter", "default", "allowed values", "meaning", "in compiled steps")
RULE_TITLES = ("parameter", "needs", "except with")


def table(*, research: bool) -> str:
    """One table in Markdown.

    Args:
        research: the parameters that select variants of the decoding; else all others.
    """
    rows: list[tuple[str, ...]] = [TITLES]
    for name, parameter in DecodingParams.parameters().items():
        if hasattr(ResearchParams, name) == research:
            default, allowed = _default(parameter), parameter.kind.allowed()
            rows.append((f"`{name}`", default, allowed, _meaning(parameter), parameter.graphs.value))
    return _markdown(rows)


def rules_table() -> str:
    """The table of ``RULES`` in Markdown."""
    rows = [(f"`{rule.param}`", _needs(rule), listed(rule.free_values) or "none") for rule in RULES]
    return _markdown([RULE_TITLES, *dict.fromkeys(rows)])


def _needs(rule: Rule) -> str:
    if rule.needs in (LIKE, FILLER):
        return f"`decoding` {listed(rule.decodings())}"
    return f"`{rule.needs}` {listed(rule.choices)}"


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    titles, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ("---",) * len(titles), *others))


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if parameter.default_text is not None:
        return parameter.default_text
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _meaning(parameter: Parameter) -> str:
    names = ", ".join(f"`{alias}`" for alias in parameter.aliases)
    off = " or ".join(map(str, parameter.off))
    parts = [parameter.help, f"HTTP also: {names}" if names else "", f"HTTP: {off} is off" if off else ""]
    return "; ".join(part for part in parts if part)


def with_table(page: str, name: str, table: str) -> str:
    """A page in Markdown with one of its tables made anew.

    Args:
        page: the page. The table, which may be missing yet, follows the comment "<!-- table: NAME ... -->" after an
            empty line.
        name: of the table.
        table: its lines, each with a newline at its end.

    Raises:
        ValueError: the page has no such comment.
    """
    place = re.compile(rf"(<!-- table: {re.escape(name)}\b.*-->\n\n)(?:\|.*\n)*")
    page, count = place.subn(lambda found: found[1] + table, page)
    if not count:
        raise ValueError(f'the page has no comment "<!-- table: {name} ... -->" with an empty line after it')
    return page


def with_tables(page: str) -> str:
    """The page with all tables made anew."""
    page = with_table(page, "usual", table(research=False))
    page = with_table(page, "research", table(research=True))
    return with_table(page, "rules", rules_table())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ci.decoding_table", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/decoding.md instead of printing")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
    else:
        print(table(research=False), table(research=True), rules_table(), sep="\n")


if __name__ == "__main__":
    main()
