"""What npu-smi and hccn_tool say of dies, and what a launch and /metrics make of it.

The tables are those of real machines, from reports in vllm-ascend's issues and from others' documents, shortened to a
few dies. No report shows a die that is Critical or has bad pages: these words are put into a real table.
"""

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lopa_ascend.backend.npu.health import Die, gauges, parse_link, parse_memory, parse_table, read_dies
from lopa_ascend.serve.observe.dies import Dies
from lopa_ascend.serve.observe.metrics import metrics_text
from scripts.launch.arguments import Launch
from scripts.launch.npu import check_health

HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
"""
CONTAINER_OF_910B4 = f"""\
{HEAD}| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 3     910B4               | OK            | 87.1        48                0    / 0             |
| 0                         | 0000:02:00.0  | 0           0    / 0          3034 / 32768         |
+===========================+===============+====================================================+
| 6     910B4               | OK            | 90.6        45                0    / 0             |
| 0                         | 0000:82:00.0  | 0           0    / 0          2912 / 32768         |
+===========================+===============+====================================================+
"""
CONTAINER_OF_910C = f"""\
{HEAD}| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 2     Ascend910           | OK            | 176.3       36                0    / 0             |
| 0     4                   | 0000:95:00.0  | 0           0    / 0          3411 / 65536         |
+------------------------------------------------------------------------------------------------+
| 2     Ascend910           | OK            | -           36                0    / 0             |
| 1     5                   | 0000:97:00.0  | 0           0    / 0          3208 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 2       0                 | 632268        | python3.1                | 197                     |
+===========================+===============+====================================================+
"""
ALARM = f"""\
{HEAD}| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | Alarm         | 161.8       34                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3165 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Alarm         | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2886 / 65536         |
+===========================+===============+====================================================+
"""
NEWER = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 7     Ascend910           | OK            | -                    35                      0    / 0                |
| 1     15                  | 0000:83:00.0  | 0                    0    / 0                31877/ 65536            |
+===========================+===============+======================================================================+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| No running processes found in NPU 7                                                                              |
+===========================+===============+======================================================================+
"""
MEMORY = """\
        NPU ID                                   : 0
        HBM Single Bit Error Count               : 2
        HBM Double Bit Error Count               : {errors}
        HBM Single Bit Aggregate Total Err Cnt   : 4
        HBM Double Bit Aggregate Total Err Cnt   : 6
        HBM Single Bit Isolated Pages Count      : 0
        HBM Double Bit Isolated Pages Count      : 6
        HBM Single Bit Next-Isolated Pages Count : 0
        HBM Double Bit Next-Isolated Pages Count : {pages}
"""


def node_of_910c(health: dict[int, str] | None = None) -> str:
    """The table of 16 dies, all OK but these."""
    rows = []
    for die in range(16):
        state = (health or {}).get(die, "OK")
        rows.append(f"| {die // 2}     Ascend910           | {state:<13} | 166.5   {38 + die}   0    / 0   |")
        rows.append(f"| {die % 2}     {die:<2}                  | 0000:9D:00.0  | 0  0    / 0  3131 / 65536 |")
    return "\n".join(rows)


def driver(
    table: str, errors: int = 0, pages: int = 0, link: str = "UP", bad: tuple[str, str] = ("0", "0")
) -> Callable[[Sequence[str]], str]:
    """Answers as the tools do; only the die ``bad``, a card and a chip, has errors."""

    def ask(command: Sequence[str]) -> str:
        match tuple(command):
            case ("npu-smi", "info"):
                return table
            case ("npu-smi", "info", "-t", "ecc", "-i", card, "-c", chip):
                is_bad = (card, chip) == bad
                return MEMORY.format(errors=errors if is_bad else 0, pages=pages if is_bad else 0)
            case ("hccn_tool", "-i", _, "-link", "-g"):
                return f"link status: {link}\n"
        raise AssertionError(command)

    return ask


def test_tables():
    assert parse_table(CONTAINER_OF_910B4) == [Die(0, 3, 0, 3, "OK", 48), Die(1, 6, 0, 6, "OK", 45)]
    assert parse_table(CONTAINER_OF_910C) == [Die(0, 2, 0, 4, "OK", 36), Die(1, 2, 1, 5, "OK", 36)]
    assert [die.health for die in parse_table(ALARM)] == ["Alarm", "Alarm"]
    assert parse_table(NEWER) == [Die(0, 7, 1, 15, "OK", 35)]
    assert [die.physical for die in parse_table(node_of_910c())] == list(range(16))
    with pytest.raises(ValueError, match="shows no die"):
        parse_table("DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005")


def test_memory_and_links():
    assert parse_memory(MEMORY.format(errors=3, pages=1)) == (3, 1)
    assert parse_memory("\tSingle-bit Error Count   : 0\n\tDouble-bit Error Count   : 2\n") == (2, None)
    assert parse_memory("This device does not support querying ecc.") == (None, None)
    assert (parse_link("link status: UP\n"), parse_link("link status: DOWN"), parse_link("")) == ("UP", "DOWN", None)


def test_what_a_driver_does_not_tell_is_not_known():
    def ask(command: Sequence[str]) -> str:
        if command[-1] == "info":
            return NEWER
        raise subprocess.CalledProcessError(1, command) if command[0] == "npu-smi" else FileNotFoundError(command[0])

    assert read_dies(ask, with_links=True) == [Die(0, 7, 1, 15, "OK", 35)]
    assert read_dies(driver(NEWER), with_links=True) == [Die(0, 7, 1, 15, "OK", 35, 0, 0, "UP")]


NODE = Launch(device="npu", tp=4, bp=4)
HALF = replace(NODE, bp=2)
RESET = "or reset it while nothing runs on this node (npu-smi set -t reset -i 0 -c 0)"


@pytest.mark.parametrize(
    ("launch", "visible", "ask", "lines"),
    [
        (NODE, None, driver(node_of_910c()), ["ok    health: no fault of 16 dies, at most 53 C"]),
        (HALF, None, driver(node_of_910c()), ["ok    health: no fault of 8 dies, at most 45 C"]),
        (
            HALF,
            None,
            driver(node_of_910c({0: "Critical"})),
            [f"FAIL  health: die 0: health Critical; set ASCEND_RT_VISIBLE_DEVICES=2,3,4,5,6,7,8,9, {RESET}"],
        ),
        # The broken die is not among those of the launch.
        (
            HALF,
            "8,9,10,11,12,13,14,15",
            driver(node_of_910c({0: "Critical"})),
            ["ok    health: no fault of 8 dies, at most 53 C"],
        ),
        (
            NODE,
            None,
            driver(node_of_910c({0: "UNKNOWN"})),
            [
                "FAIL  health: die 0: health UNKNOWN; lower --bp, because 15 dies are left, and set "
                f"ASCEND_RT_VISIBLE_DEVICES=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15, {RESET}"
            ],
        ),
        (
            replace(NODE, tp=1, bp=1),
            None,
            driver(node_of_910c(), errors=1, pages=1),
            [
                "FAIL  health: die 0: memory pages with errors of several bits that are in use until a reset: 1; "
                f"set ASCEND_RT_VISIBLE_DEVICES=2, {RESET}"
            ],
        ),
        # Whole machines serve with an alarm, such as that of a network without cables.
        (
            replace(NODE, tp=2, bp=1),
            None,
            driver(ALARM),
            [f"note  health: die {die}: health Alarm; after an error on it leave it out" for die in (0, 1)],
        ),
        (
            replace(NODE, tp=1, bp=1),
            None,
            driver(NEWER, errors=2, bad=("7", "1")),
            ["note  health: die 0: memory errors of several bits: 2; after an error on it leave it out"],
        ),
        (
            replace(NODE, tp=1, bp=2, nnodes=2),
            None,
            driver(NEWER, link="DOWN"),
            ["note  health: die 0: its RoCE link between nodes is down; nodes of one super-pod do without it"],
        ),
    ],
)
def test_what_a_launch_finds(
    launch: Launch, visible: str | None, ask: Callable[[Sequence[str]], str], lines: list[str]
):
    assert [str(finding) for finding in check_health(launch, visible, ask)] == lines


def test_a_machine_without_npu_smi():
    def ask(_: Sequence[str]) -> str:
        raise FileNotFoundError(2, "No such file or directory", "npu-smi")

    (found,) = check_health(NODE, None, ask)
    assert str(found).startswith("note  health: unknown ([Errno 2] No such file or directory: 'npu-smi')")


def test_metrics():
    ask = driver(node_of_910c({3: "Warning", 5: "UNKNOWN"}), errors=2)

    async def read() -> tuple[str, str]:
        dies = Dies(lambda: gauges(read_dies(ask, with_links=True)))
        before = metrics_text([], dies).decode()
        dies.refresh()
        assert dies._reading is not None
        await dies._reading
        dies.refresh()  # it still holds
        assert dies._reading.done()
        return before, metrics_text([], dies).decode()

    before, after = asyncio.run(read())
    assert before == ""
    for line in (
        'lopa:die_alarm{die="0"} 0.0',
        'lopa:die_alarm{die="3"} 1.0',
        'lopa:die_alarm{die="5"} 4.0',
        'lopa:die_temperature_celsius{die="15"} 53.0',
        'lopa:die_memory_errors{die="0"} 2.0',
        'lopa:die_link_up{die="1"} 1.0',
    ):
        assert line in after.splitlines()
