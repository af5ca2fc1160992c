"""Makes the tables of decoding parameters in docs/decoding.md, and the one of what goes with what.

    python -m ci.decoding_table            print the tables
    python -m ci.decoding_table --write    put them into docs/decoding.md

They follow from what each decoding declares.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import declaration, decodings_that_take, listed, rules_of
from lopa_ascend.config.decodings import built_in_decodings, variants_of, with_graphs
from lopa_ascend.config.kinds import Choice
from lopa_ascend.config.parameters import UsualParams
from lopa_ascend.config.settings import GraphSupport, HelpFormatter, Parameter

PAGE = Path(__file__).resolve().parents[1] / "docs" / "decoding.md"
TITLES = ("parameter", "default", "allowed values", "meaning", "decodings", "in compiled steps")
RESEARCH_TITLES = ("parameter", "default", "decodings", "in compiled steps")
"""``--help-all`` has their allowed values and meanings."""
OTHER = "any value but the default"
RULE_TITLES = ("parameter", "needs", "except with")


def table(*, research: bool) -> str:
    """One table in Markdown.

    Args:
        research: the parameters that select variants of the decoding, in short; else all others.
    """
    rows: list[tuple[str, ...]] = [RESEARCH_TITLES if research else TITLES]
    for name, parameter in DecodingParams.parameters().items():
        if hasattr(UsualParams, name) != research:
            default, allowed = _default(parameter), parameter.kind.allowed()
            takers = _takers(name, parameter)
            said = (f"`{name}`", default, takers, _graphs(parameter))
            rows.append(said if research else (*said[:2], allowed, _meaning(parameter), *said[2:]))
    return markdown(rows)


def rules_table() -> str:
    """The table of what a decoding wants beside a parameter in Markdown."""
    rows = [RULE_TITLES]
    for strategy in chain.from_iterable(map(variants_of, built_in_decodings())):
        for rule in rules_of(strategy):
            free = tuple(value for value in (declaration(rule.param).default, *rule.free) if value is not None)
            rows.append((f"`{rule.param}`", f"`{rule.needs}` {listed(rule.choices)}", listed(free) or "none"))
    return markdown([RULE_TITLES, *dict.fromkeys(rows)])


def _takers(name: str, parameter: Parameter) -> str:
    """The decodings that take another value than the default; by value, if these differ."""
    built_in = {*built_in_decodings()}
    values = parameter.kind.known if isinstance(parameter.kind, Choice) else (OTHER,)
    values_of: dict[tuple[str, ...], list[str]] = {}
    for value in values:
        takers = tuple(known for known in decodings_that_take(name, value) if known in built_in)
        if value != parameter.default and name != "decoding":
            values_of.setdefault(takers, []).append(f'"{value}"')
    texts = {takers: _few(takers, built_in) for takers in values_of}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{', '.join(values_of[takers])}: {text}" for takers, text in texts.items())


def _few(takers: Sequence[str], built_in: set[str]) -> str:
    """Names of decodings, or of those that are missing if these are fewer."""
    missing = sorted(built_in - {*takers})
    if not missing:
        return "all"
    if len(missing) < len(takers):
        return f"all but {', '.join(missing)}"
    return ", ".join(takers) or "none"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    titles, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ("---",) * len(titles), *others))


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if parameter.default_text is not None:
        return parameter.default_text
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _graphs(parameter: Parameter) -> str:
    if parameter.graphs is GraphSupport.DECODING:
        return ", ".join(f'"{name}"' for name in built_in_decodings() if with_graphs(name))
    return parameter.graphs.value


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
