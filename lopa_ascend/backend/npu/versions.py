"""Which versions of torch_npu and CANN can do what the NPU backend needs.

As found in the wheels of torch_npu from 2.9.0 to 2.13.0: all that the backend calls is the same in them but the write
into a cache of keys and values. ``npu_scatter_pa_kv_cache`` at first wrote caches of the NZ format alone; the argument
that selects another one came with CANN 9.0, together with npugraph_ex, and torchair's converter for it later.
"""

from __future__ import annotations

import re
from importlib import metadata

# By release of torch_npu, the first post-release that has it, None for none. Releases from COMPLETE on have all.
GRAPH_MODES: dict[str, dict[str, int | None]] = {
    "eager": {"2.9.0": 2, "2.9.1": 0, "2.10.0": 0},
    "npugraph_ex": {"2.9.0": 2, "2.9.1": 0, "2.10.0": 0},
    "ge": {"2.9.0": 6, "2.9.1": None, "2.10.0": 4},
}
COMPLETE = "2.11"
OLDEST_CANN = "9.0"  # of torch_npu 2.9.0.post2


class UnsupportedStackError(ValueError):
    """What is installed cannot do what is asked for."""


def check_installed(graph_mode: str) -> None:
    """Refuses an installation on which ``graph_mode`` cannot run.

    Raises:
        UnsupportedStackError: something is missing or too old; the message says what is needed.
        ValueError: there is no such mode.
    """
    try:
        check(metadata.version("torch"), metadata.version("torch_npu"), graph_mode)
        cann = cann_version()
    except metadata.PackageNotFoundError as error:
        raise UnsupportedStackError(f"device npu needs {error.name}, which is not installed") from None
    except ImportError as error:
        raise UnsupportedStackError(
            f"torch_npu cannot be loaded ({error}); is CANN installed, and its set_env.sh sourced?"
        ) from error
    check_cann(cann)


def cann_version() -> str:
    """Raises ImportError: torch_npu cannot be loaded."""
    from torch_npu.npu.utils import get_cann_version

    version: str = get_cann_version()
    return version


def check(torch: str, torch_npu: str, graph_mode: str) -> None:
    """Refuses versions, such as "2.13.0+cpu" and "2.9.0.post6", as ``check_installed`` does."""
    if graph_mode not in GRAPH_MODES:
        raise ValueError(f"graph mode: unknown value {graph_mode!r}; choose one of {', '.join(GRAPH_MODES)}")
    release = _parsed(torch_npu)[0]
    if _parsed(torch)[0] != release:
        raise UnsupportedStackError(f"torch {torch} and torch_npu {torch_npu} are not of one release, as they must be")
    if not runs(torch_npu, graph_mode):
        modes = [mode for mode in GRAPH_MODES if runs(torch_npu, mode)]
        raise UnsupportedStackError(
            f"torch_npu {torch_npu} cannot write keys and values in {graph_mode} mode; take {_needed(graph_mode)}"
            + (f", or another mode: {', '.join(modes)}" if modes else "")
        )


def check_cann(cann: str) -> None:
    """Refuses a version of CANN, such as "9.0.RC1"."""
    if _parsed(cann)[0][:2] < _parsed(OLDEST_CANN)[0]:
        raise UnsupportedStackError(f"CANN {cann} is too old: it must be {OLDEST_CANN} or newer")


def runs(torch_npu: str, graph_mode: str) -> bool:
    """Whether this version of torch_npu can run a graph mode."""
    release, post = _parsed(torch_npu)
    if release >= _parsed(COMPLETE)[0]:
        return True
    first = GRAPH_MODES[graph_mode].get(".".join(map(str, release)))
    return first is not None and post >= first


def _needed(graph_mode: str) -> str:
    """The versions that run it, in words."""
    firsts = [(release, post) for release, post in GRAPH_MODES[graph_mode].items() if post is not None]
    names = [f"{release}.post{post}" if post else release for release, post in firsts]
    return f"{', '.join(names)} or {COMPLETE}, or newer"


def _parsed(version: str) -> tuple[tuple[int, ...], int]:
    """(release, number of the post-release): ((2, 9, 0), 6) of "2.9.0.post6". What follows is left out."""
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?", version)
    if found is None:
        raise UnsupportedStackError(f"{version!r} is no version")
    return tuple(int(part) for part in found[1].split(".")), int(found[2] or 0)
