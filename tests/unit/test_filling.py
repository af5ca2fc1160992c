"""The animated picture of an answer that is filled."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from scripts.eval.filling import Cell, Side, animations, drawn

SVG = "{http://www.w3.org/2000/svg}"


def test_every_cell_appears_with_the_pass_that_fills_it():
    cells = [Cell("<", 0.3, 1, False), Cell(" &b", 0.999, 3, True), Cell("\n", 0.9, 2, False)]
    picture = ElementTree.fromstring(
        drawn("1 < 2 & 3?", [Side("A", 3, cells), Side("B", 1, [Cell("c", 1.0, 1, False)])])
    )
    shown = [group for group in picture.iter(f"{SVG}g") if group.get("class")]
    assert [(group.get("class"), group[1].text) for group in shown] == [
        ("s1", "<"), ("s3", "\u00b7&b"), ("s2", "\u23ce"), ("s1", "c"),
    ]  # fmt: skip
    assert [group[0].get("class") for group in shown] == ["l0", "l5 own", "l2", "l5"]
    counts = [text.text for text in picture.iter(f"{SVG}text") if "soft" in text.get("class", "")]
    assert counts == [
        "pass 0: 0 of 3 tokens", "pass 1: 1 of 3 tokens", "pass 2: 2 of 3 tokens", "3 tokens in 3 passes",
        "pass 0: 0 of 1 tokens", "1 tokens in 1 passes",
    ]  # fmt: skip


def test_passes_follow_one_another():
    rules = "".join(animations(4))
    found = [re.findall(rf"@keyframes s{number}{{.*?([\d.]+)%,100%", rules) for number in range(5)]
    begins = [float(begin) for (begin,) in found]
    assert begins == sorted(set(begins))
    assert begins[0] == 0
    assert {float(seconds) for seconds in re.findall(r"([\d.]+)s infinite", rules)} == {4 * 0.8 + 4}
