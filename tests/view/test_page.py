"""The live view in a real Chromium: conversations, comparisons, scrubbing, keys, errors, files, and how it looks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.demo import EXAMPLES
from tests.e2e.conftest import ServerProcess, running
from tests.view.conftest import Pages
from tests.view.traces import START, branch, drafts, fill, large, lines, small, step

QUESTION = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"
SUMMARY = re.compile(r"(\d+) tokens in (\d+) pass(es)?, [\d.]+ a pass\.")


def ask(page: Any, question: str) -> None:
    page.wait_for_selector("#send:enabled")
    page.fill("#question", question)
    page.press("#question", "Enter")


def finished(page: Any) -> None:
    page.wait_for_selector("#stop", state="hidden")
    until(page, lambda: "pass" in page.inner_text("#status"))


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Waits for a condition. Playwright's own waiting for functions needs a laxer content policy."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, page.inner_text("body")
        page.wait_for_timeout(30)


def passes_of(page: Any) -> int:
    """Passes that the page has."""
    return int(page.get_attribute("#scrub", "max"))


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_inner_texts()
    return found


def open_file(page: Any, name: str, content: bytes) -> None:
    page.set_input_files("#file", {"name": name, "mimeType": "application/jsonl", "buffer": content})


def picture(page: Any) -> str:
    shown: str = page.evaluate("document.querySelector('canvas').toDataURL()")
    return shown


def problem_has(page: Any, text: str) -> bool:
    return text in (page.text_content("#problem") or "")


def press(page: Any, *keys: str) -> str:
    """What the page says of the pass after some keys."""
    page.locator("#scrub").focus()
    for key in keys:
        page.keyboard.press(key)
    said: str = page.inner_text(".sentence")
    return said


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_newcomer_asks_an_example_and_sees_passes_above_settings(demo: ServerProcess, pages: Pages):
    page = pages(demo.url, viewport={"width": 390, "height": 844})
    page.wait_for_selector("#send:enabled")
    assert texts(page, "#examples button") == [*EXAMPLES, f"With two settings: {EXAMPLES[0]}"]
    page.click("#examples button >> nth=2")
    finished(page)
    assert texts(page, "#log .you span") == [EXAMPLES[2]]
    assert "#### 8" in page.inner_text("#log .model")
    assert page.is_hidden("#examples")
    tops = [page.locator(part).bounding_box()["y"] for part in ("#ask", "#panels", "#settings")]
    assert tops == sorted(tops)
    page.click("#new")
    assert page.is_visible("#examples")


def test_a_newcomer_with_another_model_tries_each_example(model_dir: Path, pages: Pages):
    with running("--model", str(model_dir), "--max-new-tokens", "24", "--tau-conf", "0.1") as server:
        page = pages(server.url)
        page.wait_for_selector("#send:enabled")
        labels = texts(page, "#examples button")
        assert [label.partition(":")[0] for label in labels[1:]] == ["With two settings", "As JSON", "Fill the gap"]
        sent = []
        for number in (3, 2, 0, 1):  # the comparison last: it stays
            with page.expect_request("**/v1/diffusion/**") as request:
                page.click(f"#examples button >> nth={number}")
            finished(page)
            assert page.is_hidden("#problem"), page.inner_text("#problem")
            sent.append((request.value.url.removeprefix(server.url), request.value.post_data_json))
            page.click("#new")
        (gap_route, gap), (_, form), (_, chat), (route, _) = sent
        assert (gap_route, gap["decoding"], gap["suffix"][:3]) == ("/v1/diffusion/completions", "parallel", ". I")
        assert form["structured_outputs"]["json"]["required"] == ["city", "country"]
        assert chat == {"messages": [{"role": "user", "content": labels[0]}]}
        assert route == "/v1/diffusion/chat/completions"
        assert texts(page, ".panel h2") == ["A: d2f", "B: lopa"]


def test_a_conversation_of_two_questions(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    ask(page, QUESTION)
    finished(page)
    first = texts(page, "#log .model span")[0]
    plain = demo.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]}).json()
    assert first == plain["choices"][0]["message"]["content"].strip()
    tokens, passes = map(int, SUMMARY.search(page.inner_text("#status")).groups()[:2])
    assert (tokens, passes) == (plain["usage"]["completion_tokens"], plain["lopa"]["num_forwards"])
    assert texts(page, ".counts dd")[:2] == [str(passes), str(tokens)]
    with page.expect_request("**/v1/diffusion/chat/completions") as sent:
        ask(page, "And if Tom gives 7 to Ann?")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    finished(page)
    assert len(texts(page, "#log .model")) == 2
    assert page.title() == "demo"


def test_a_comparison_by_passes_and_by_the_clock(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    page.wait_for_selector("#send:enabled")
    page.check("#compare")
    page.get_by_label("tau_conf").nth(1).fill("0.9")
    ask(page, QUESTION)
    finished(page)
    assert texts(page, ".panel h2") == ["A: d2f", "B: lopa, tau_conf 0.9"]
    passes = [int(n) for n in re.findall(r"in (\d+) pass", page.inner_text("#status"))]
    assert len(passes) == 2
    assert passes[0] > passes[1]
    press(page, "End")
    assert texts(page, ".counts div:first-child dd") == [*map(str, passes)]
    press(page, "Home", "ArrowRight")
    assert texts(page, ".counts div:first-child dd") == ["1", "1"]
    page.select_option("#by", "clock")
    press(page, "Home", "ArrowRight")
    assert sorted(texts(page, ".counts div:first-child dd")) == ["0", "1"]
    press(page, "End")
    assert texts(page, ".counts div:first-child dd") == [*map(str, passes)]


def test_the_link_holds_settings_and_question(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    page.wait_for_selector("#send:enabled")
    page.check("#compare")
    page.get_by_label("block size").first.fill("8")
    page.fill("#question", "1 & 2?")
    page.click("#link")
    other = pages(page.url)
    other.wait_for_selector("#send:enabled")
    assert other.is_checked("#compare")
    assert other.input_value("#question") == "1 & 2?"
    assert other.get_by_label("block size").first.input_value() == "8"
    assert [other.get_by_label("decoding").nth(side).input_value() for side in (0, 1)] == ["d2f", "lopa"]
    assert other.get_by_label("branches (k)").first.is_disabled()


def test_a_link_with_a_setting_that_the_server_lacks_is_told(demo: ServerProcess, pages: Pages):
    page = pages(f"{demo.url}/#a.decoding=other")
    page.wait_for_selector("#problem:visible")
    assert "sets decoding to other, which this server does not have" in page.inner_text("#problem")


def test_controls_come_from_the_server(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    page.wait_for_selector("#send:enabled")
    info, field = demo.http.get("/server_info").json()["decoding"], page.get_by_label("block size").first
    assert field.get_attribute("placeholder") == str(info["block_size"])
    assert "Positions in a block" in field.get_attribute("title")
    choices = page.get_by_label("decoding").first.locator("option").all_inner_texts()
    assert choices[0] == f"({info['decoding']})"
    assert {"lopa", "d2f", "vanilla"} < set(choices)


# ---- passes ----------------------------------------------------------------------------------------------------------


def test_every_pass_can_be_looked_at(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    open_file(page, "small.jsonl", lines(small()))
    until(page, lambda: passes_of(page) == 3)
    assert press(page, "Home").startswith("Before the first pass")
    empty = picture(page)
    assert press(page, "ArrowRight") == "Pass 1 of 3: 4 positions filled, there was no branch; 4 of 16 filled."
    assert texts(page, ".blocks span") == ["0\u20137 activated", "8\u201315 activated"]
    assert press(page, "ArrowRight").startswith(
        "Pass 2 of 3: 5 positions filled, branch 1 won with \u201c\u00b7t9\u201d at 9"
    )
    assert texts(page, ".blocks span") == ["0\u20137 filled", "8\u201315 activated"]
    assert texts(page, "tbody th") == ["anchor", "1 wins", "2"]
    assert texts(page, "tbody tr:nth-child(3) td") == ["\u00b7t12", "12", " 0.2500", "1"]
    second = picture(page)
    for position, said in (
        (9, "filled by pass 2 as the winning branch's own token"),
        (12, "masked"),
        (0, "filled by pass 1"),
    ):
        columns = page.evaluate("Math.floor(document.querySelector('.grid').clientWidth / 58)")
        where = {"x": 58 * (position % columns) + 9, "y": 25 * (position // columns) + 9}
        page.hover("canvas", position=where)
        assert page.inner_text(".detail").startswith(f"Position {position}: ")
        assert page.inner_text(".detail").endswith(said)
    assert press(page, "End").endswith("14 tokens in 3 passes, 4.7 a pass.")
    assert texts(page, ".blocks span") == ["0\u20137 committed", "8\u201315 filled"]
    assert len({empty, second, picture(page)}) == 3
    press(page, "ArrowLeft")
    assert picture(page) == second
    assert "branch 1 won" in page.get_attribute("#scrub", "aria-valuetext")
    page.mouse.click(5, 5)
    page.keyboard.press(" ")
    until(page, lambda: page.inner_text("#play") == "Play")
    assert texts(page, ".counts dd")[0] == "3"


def test_drafts_and_those_that_are_accepted_can_be_told(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    open_file(page, "drafts.jsonl", lines(drafts()))
    until(page, lambda: passes_of(page) == 2)
    empty = (press(page, "Home"), picture(page))[1]
    assert press(page, "ArrowRight") == "Pass 1 of 2: 0 positions filled, 8 drafts to check; 0 of 8 filled."
    assert picture(page) != empty
    assert "4 positions filled, 3 of 8 drafts accepted; 4 of 8 filled." in press(page, "ArrowRight")
    for position, said in ((2, "filled by pass 2 as drafted"), (3, "filled by pass 2"), (4, "masked")):
        page.hover("canvas", position={"x": 58 * position + 9, "y": 9})
        assert page.inner_text(".detail").endswith(said)


def test_a_position_that_is_masked_again_is_shown_as_masked(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    anchor = [branch(0, 0.5, None)]
    again = {**step(1, [fill(1)], anchor, 0, 4), "remasked": [1, 2]}
    open_file(
        page,
        "again.jsonl",
        lines([START, step(0, [fill(0), fill(1), fill(2)], anchor, 0, 4), again, step(2, [fill(2)], anchor, 0, 4)]),
    )
    until(page, lambda: passes_of(page) == 3)
    for key, number in (("Home", None), ("ArrowRight", 3), ("ArrowRight", 2), ("ArrowRight", 3)):
        sentence = press(page, key)
        assert number is None or f"{number} of 4 filled" in sentence
        page.hover("canvas", position={"x": 2 * 58 + 9, "y": 9})
        assert page.inner_text(".detail").endswith("masked") == (number in (None, 2))


def test_a_token_that_is_changed_is_shown_from_its_pass_on(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    anchor = [branch(0, 0.5, None)]
    changed = {**step(1, [fill(1)], anchor, 0, 4), "edits": [{**fill(0), "token": "new", "replaced": 0}]}
    open_file(page, "changed.jsonl", lines([START, step(0, [fill(0)], anchor, 0, 4), changed]))
    until(page, lambda: passes_of(page) == 2)
    press(page, "Home")
    for key, number, token in (("ArrowRight", 1, "t0"), ("ArrowRight", 2, "new")):
        assert f"{number} of 4 filled" in press(page, key)
        page.hover("canvas", position={"x": 9, "y": 9})
        assert f"{token}\u201d" in page.inner_text(".detail")


def test_a_pass_is_drawn_in_less_than_a_thirtieth_of_a_second(demo: ServerProcess, pages: Pages):
    """4,096 positions and 16 branches; another state in every frame. CPU time counts, as other processes may run."""
    page = pages(demo.url, viewport={"width": 1600, "height": 1000})
    open_file(page, "large.jsonl", lines(large(4096, 16, 14)))
    until(page, lambda: passes_of(page) == 293)
    scrub = """() => new Promise((resolve) => {
        const scrub = document.querySelector("#scrub"), begun = performance.now();
        let frames = 0;
        const next = (now) => {
            if (now - begun > 2000) return resolve([frames, (now - begun) / 1000]);
            scrub.value = (++frames * 97) % 293;
            scrub.dispatchEvent(new Event("input"));
            requestAnimationFrame(next);
        };
        requestAnimationFrame(next);
    })"""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(scrub)  # compiles the scripts
    before = cpu_seconds(session)
    frames, seconds = page.evaluate(scrub)
    cpu = (cpu_seconds(session) - before) / frames
    print(f"{frames / seconds:.0f} frames a second, {1000 * cpu:.1f} ms of CPU each")
    assert cpu < 1 / 30
    assert len(texts(page, "tbody tr")) == 16


def cpu_seconds(session: Any) -> float:
    """CPU time of the page's main thread."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_trace_shows_the_same_run_to_a_colleague(demo: ServerProcess, pages: Pages, tmp_path: Path):
    page = pages(demo.url)
    ask(page, QUESTION)
    finished(page)
    said = press(page, "End")
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "run.jsonl")
    other, name = pages(demo.url), "run.jsonl"
    drop = """(text) => {
        const data = new DataTransfer();
        data.items.add(new File([text], "run.jsonl"));
        dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
    }"""
    other.evaluate(drop, (tmp_path / name).read_text(encoding="utf-8"))
    other.wait_for_selector(".panel")
    assert press(other, "End") == said
    assert QUESTION in texts(other, "#log .you span")
    body = {"messages": [{"role": "user", "content": QUESTION}], "trace": True}
    open_file(other, "two.jsonl", demo.http.post("/v1/diffusion/chat/completions", json=body).content)
    until(other, lambda: texts(other, ".panel h2")[0].startswith("two.jsonl"))
    assert press(other, "End") == said


BAD_FILES = {
    b"\x89PNG\r\n": "is no trace: it does not hold JSON lines",
    b'{"a": 1}\n': 'is no trace. Make one with "trace": true',
    b"5\n": "is no trace. Make one",
    b"": "is empty",
    lines([{**START, "version": 2}]): "has version 2 of the format, and this page reads version 1: open it with",
    lines([START, START]): "has an event that is no pass",
    lines([START, {"object": "constructor"}]): "has an event that is no pass",
    lines(small())[:-40]: "breaks off or is damaged in line 5",
}


ANCHOR = branch(0, 0.5, None)
DAMAGED: dict[int, dict[str, list[Any]]] = {
    0: {
        "block_size": [0, 0.001, 1e-300, -8, "8", None, [8], 2**31],
        "first_block": [-8, 0.5, 1, "0"],
        "decoding": [None, "lopa", {"decoding": {}}, {"a": [[]]}, dict.fromkeys(map(str, range(100)), 1)],
        "prompt": [5, ["a"]],
        "id": [None, {}],
    },
    1: {
        "fills": [None, {}, [5], [None], [{**fill(0), "position": 10**9}], [{**fill(0), "position": 0.5}],
                  [{**fill(0), "token": {}}], [{**fill(0), "prob": None}], [fill(0)] * 20_000],
        "edits": [5, [None], [{"position": -1}]],
        "remasked": ["ab", {"length": 1e9}, [-1]],
        "canvas_length": [1e9, 16.5, -1, None, "16"],
        "committed": [None, "x"],
        "seconds": [None, "1", -1, [1]],
        "text": [None, {}],
        "winner": [1, -1, 0.5, "0", "length", None],
        "drafted": [5, [None], [{**fill(0), "prob": None}]],
        "accepted": [-1, 0.5, "1"],
        "branches": [None, {"0": ANCHOR}, [ANCHOR] * 2000, [{**ANCHOR, "score": "x"}], [{**ANCHOR, "further": [5]}],
                     [{**ANCHOR, "lookahead": {"position": 1}}]],
    },
    4: {
        "token_ids": [None, 5, {"length": 5}, [0.5]],
        "lopa": [None, {}, {"num_forwards": 3, "tokens_per_forward": "4"}],
        "text": [None, []],
        "finish_reason": [{}],
    },
}  # fmt: skip
"""Values of fields, by event, that no file may bring to the page."""


def test_each_field_of_a_file_is_checked_before_it_is_drawn(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    open_file(page, "good.jsonl", lines(small()))
    until(page, lambda: texts(page, ".panel h2")[0].startswith("good.jsonl"))
    number = 0
    for place, fields in DAMAGED.items():
        for name, values in fields.items():
            for value in values:
                number += 1
                events = small()
                events[place] = {**events[place], name: value}
                open_file(page, f"bad{number}.jsonl", lines(events))
                until(page, partial(problem_has, page, f"bad{number}.jsonl cannot be shown: in an event"))
                assert f" the field {name} is " in page.inner_text("#problem"), (name, value)
    assert texts(page, ".panel h2")[0].startswith("good.jsonl")


def test_what_a_file_may_hold_is_drawn_in_time_and_as_text(demo: ServerProcess, pages: Pages):
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    start, *rest = small()
    start |= {"block_size": 1, "prompt": hostile, "id": "../" + hostile, "decoding": {"decoding": hostile}}
    named = {**fill(0), "token": hostile}
    wide = step(0, [named], [branch(0, 0.5, named)] * 1024, 0, 2**14)
    end = {**rest[-1], "text": hostile, "edits": [named], "remasked": [0]}
    page = pages(demo.url)
    open_file(page, "wide.jsonl", lines([start, wide, end]))
    page.wait_for_selector(".panel h2")
    until(page, lambda: passes_of(page) == 1)
    assert page.locator("main img, main script").count() == 0
    assert hostile in page.inner_text("#log")
    deep = b'{"object": "diffusion.step", "more": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    open_file(page, "deep.jsonl", lines(small()[:2]) + deep)
    until(page, partial(problem_has, page, "deep.jsonl cannot be shown: in an event diffusion.step the field"))


def test_a_wrong_file_is_told_in_a_sentence(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    for content, said in BAD_FILES.items():
        open_file(page, "bad.jsonl", content)
        until(page, partial(problem_has, page, said))
        assert page.inner_text("#problem").startswith("bad.jsonl")
    open_file(page, "cut.jsonl", lines(small()[:3]))
    page.wait_for_selector(".panel .problem:visible")
    assert page.inner_text(".panel .problem") == "The trace ends after 2 passes, without the end of the answer."
    assert page.is_hidden("#problem")
    open_file(page, "failed.jsonl", lines([*small()[:2], {"error": {"message": "the engine has ended"}}]))
    until(page, lambda: texts(page, ".panel .problem") == ["the engine has ended"])


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_refused_setting_is_told_and_the_question_stays(demo: ServerProcess, pages: Pages):
    page = pages(f"{demo.url}/#a.tau_conf=7")
    ask(page, QUESTION)
    page.wait_for_selector("#problem:visible")
    assert "tau_conf" in page.inner_text("#problem")
    assert page.input_value("#question") == QUESTION
    page.get_by_label("tau_conf").first.fill("0.9")
    page.press("#question", "Enter")
    finished(page)
    assert page.is_hidden("#problem")
    assert SUMMARY.search(page.inner_text("#status"))


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(model_dir: Path, pages: Pages):
    with running("--model", str(model_dir), "--max-new-tokens", "12", "--api-key", "secret") as server:
        page = pages(server.url)
        page.wait_for_selector("#key:visible")
        assert page.inner_text("#problem") == "This server needs a key: type it here."
        for wrong, said in (
            ("wrong", "The server refuses this key"),
            ("\u00e9\u4e2d", "only letters, digits and signs"),
        ):
            page.get_by_label("API key").fill(wrong)
            page.click("#key button")
            until(page, partial(problem_has, page, said))
        page.get_by_label("API key").fill("secret")
        page.click("#key button")
        page.wait_for_selector("#key", state="hidden")
        ask(page, "hello")
        finished(page)
        page.reload()
        page.wait_for_selector("#send:enabled")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "secret" not in page.url
        other = pages(server.url)
        other.wait_for_selector("#key:visible")


def test_a_stopped_answer_is_shown_as_one(slow: ServerProcess, pages: Pages):
    page = pages(slow.url)
    ask(page, "hello")
    until(page, lambda: passes_of(page) > 5)
    os.kill(slow.engine_pid, signal.SIGSTOP)  # a page that draws slowly is not overtaken by the end of the answer
    page.click("#stop")
    os.kill(slow.engine_pid, signal.SIGCONT)
    page.wait_for_selector(".panel .problem:visible")
    said = page.inner_text(".panel .problem")
    assert re.fullmatch(r"The answer was stopped after \d+ passes: what is shown is not the whole answer\.", said)
    assert said in texts(page, "#log .problem")


@pytest.mark.parametrize("part", ["engine", "server"])
def test_a_server_that_dies_in_mid_answer_is_told(slow: ServerProcess, pages: Pages, part: str):
    page = pages(slow.url)
    ask(page, "hello")
    until(page, lambda: passes_of(page) > 5)
    engine = slow.engine_pid
    if part == "server":
        slow.process.kill()
    os.kill(engine, signal.SIGKILL)
    page.wait_for_selector(".panel .problem:visible")
    said = page.inner_text(".panel .problem")
    assert ("stopped in mid-answer after" if part == "server" else "SIGKILL") in said
    assert page.input_value("#question") == "hello"
    assert passes_of(page) > 5
    slow.process.wait(timeout=20)
    page.press("#question", "Enter")
    until(page, partial(problem_has, page, "cannot be reached"))


def test_a_model_without_a_tokenizer_can_still_show_files(poisoned_dir: Path, pages: Pages):
    with running("--model", str(poisoned_dir)) as server:
        page = pages(server.url)
        page.wait_for_selector("#problem:visible")
        assert "no tokenizer" in page.inner_text("#problem")
        assert page.is_disabled("#send")
        open_file(page, "small.jsonl", lines(small()))
        page.wait_for_selector(".panel")


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1600])
def test_it_fits_and_can_be_read(demo: ServerProcess, pages: Pages, width: int, scheme: str):
    page = pages(demo.url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.wait_for_selector("#send:enabled")
    page.check("#compare")
    open_file(page, "large.jsonl", lines(large(700, 16, 50)))
    until(page, lambda: passes_of(page) == 14)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    widths = page.evaluate("[...document.querySelectorAll('tbody tr:first-child > *')].map((cell) => cell.clientWidth)")
    assert min(widths) >= 40, widths
    colors = page.evaluate("""() => {
        const style = getComputedStyle(document.documentElement);
        const names = ["back", "text", "soft", "mask", "accent", "link", "bad", "l0", "l1", "l2", "l3", "l4", "l5"];
        return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
    }""")
    assert (luminance(colors["back"]) < 0.1) == (scheme == "dark")
    pairs = [("text", name) for name in ("back", "mask", "l0", "l1", "l2", "l3", "l4", "l5")]
    pairs += [(name, "back") for name in ("soft", "accent", "link", "bad")]
    for ink, paper in pairs:
        assert contrast(colors[ink], colors[paper]) >= 4.5, (ink, paper)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    digits = color.strip().removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_everything_has_a_name_for_screen_readers(demo: ServerProcess, pages: Pages):
    page = pages(demo.url)
    page.wait_for_selector("#send:enabled")
    assert page.get_by_role("log").count() == page.get_by_role("status").count() == 1
    assert page.get_by_role("slider", name="Pass", exact=True).is_visible()
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")]
        .filter((node) => !node.labels?.length && !node.getAttribute("aria-label") && !node.textContent.trim())
        .map((node) => node.outerHTML)""")
    assert unnamed == []
    page.keyboard.press("Tab")
    order = []
    for _ in range(30):
        order.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert order.index("question") < order.index("send") < order.index("file") < order.index("link")


def test_it_works_below_a_path_of_a_proxy(model_dir: Path, pages: Pages):
    with running("--model", str(model_dir), "--max-new-tokens", "12", "--root-path", "/models/tiny") as server:
        context = pages("about:blank").context
        page = context.new_page()
        strip = lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/models/tiny", "", 1)))  # noqa: E731
        page.route("**/models/tiny**", strip)
        page.route("**/models/tiny/**", strip)
        page.goto(f"{server.url}/models/tiny")
        ask(page, "hello")
        finished(page)
        assert SUMMARY.search(page.inner_text("#status"))


def test_all_events_come_as_they_are_made(slow: ServerProcess, pages: Pages):
    """The page shows passes while the answer is still being made."""
    page = pages(slow.url)
    ask(page, "hello")
    until(page, lambda: passes_of(page) > 5)
    assert page.is_visible("#stop")
    seen = passes_of(page)
    until(page, lambda: passes_of(page) > seen)
    assert texts(page, ".counts dd")[0] != "0"
    press(page, "Home")
    time.sleep(0.3)
    assert texts(page, ".counts dd")[0] == "0"  # who looks at a pass is not taken to the latest
