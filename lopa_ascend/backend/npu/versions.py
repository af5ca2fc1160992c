"""Which versions of torch_npu, CANN and the driver can run the NPU backend: the one table, and the checks against it.

Importing this loads neither torch nor torch_npu, so the checks before a launch run on a machine where neither loads.

The table was read off the wheels of torch_npu from 2.9.0 to 2.13.0. The functions that the backend calls are the same
in all of them except ``npu_scatter_pa_kv_cache``, which writes keys and values into the cache. It first wrote caches of
the NZ format only; the argument that selects the ND format came with CANN 9.0, together with npugraph_ex, and
torchair's converter for that argument came later.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

FIRST_POST_RELEASES: dict[str, dict[str, int | None]] = {
    "eager": {"2.9.0": 2, "2.9.1": 0, "2.10.0": 0},
    "npugraph_ex": {"2.9.0": 2, "2.9.1": 0, "2.10.0": 0},
    "ge": {"2.9.0": 6, "2.9.1": None, "2.10.0": 4},
}
"""By graph mode and release of torch_npu: the first post-release that can run the mode, 0 for the release itself, None
if none can. Releases that are missing here and older than FIRST_COMPLETE_RELEASE run no mode."""
FIRST_COMPLETE_RELEASE = "2.11"
"""torch_npu runs every graph mode from this release on."""
OLDEST_CANN = "9.0"
"""The CANN of torch_npu 2.9.0.post2, the oldest version that runs a mode."""
CANN_OF_TORCH_NPU = {
    "2.12.0": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0.post4": "9.1.0",
    "2.10.0.post2": "9.0.1",
    "2.9.0.post6": "9.1.0",
    "2.9.0.post2": "9.0.0",
}
"""By version of torch_npu: the CANN that it is made for, from torch_npu's own table, and for 2.10.0.post2 from
vllm-ascend's images. Versions that run no mode are left out; 2.13.0 and newer ones are not in that table yet."""
CAPTURING_MODES = ("npugraph_ex",)
"""Graph modes that capture ACL graphs, and change tasks of a captured graph."""
OLDEST_DRIVER = "25.0.RC1"
"""The first driver that can change tasks of a captured graph on A2 and A3 (CANN, aclmdlRICaptureTaskUpdateBegin)."""
ADVISED_DRIVER = "25.5.1"
"""Below this driver captures can fail with "Alloc sq cq fail": vllm-ascend then asks for this one (its PR 10555)."""
INSTALL_INFO = Path("/etc/ascend_install.info")
"""Where the driver's installer notes its folder."""


class UnsupportedStackError(ValueError):
    """The installed software cannot run the NPU backend; the message says what is needed."""


def check_installed(graph_mode: str) -> None:
    """Refuses an installation of torch, torch_npu, CANN and the driver that cannot run a graph mode, with an
    UnsupportedStackError that says what is needed. A driver whose version no file tells is taken, and so is a CANN
    whose version torch_npu cannot find out."""
    try:
        check_versions(metadata.version("torch"), metadata.version("torch_npu"), graph_mode)
        cann = cann_version()
    except metadata.PackageNotFoundError as error:
        raise UnsupportedStackError(f"device npu needs {error.name}, which is not installed") from None
    except ImportError as error:
        raise UnsupportedStackError(
            f"torch_npu cannot be loaded ({error}); is CANN installed, and its set_env.sh sourced?"
        ) from error
    if cann[:1].isdigit():  # torch_npu returns an empty text, or arbitrary bytes, where it finds no version
        check_cann(cann)
    driver = driver_version()
    if driver is not None:
        check_driver(driver, graph_mode)


def cann_version() -> str:
    """The version of CANN that torch_npu has found. ImportError if torch_npu cannot be loaded."""
    from torch_npu.npu.utils import get_cann_version

    version: str = get_cann_version()
    return version


def check_versions(torch: str, torch_npu: str, graph_mode: str) -> None:
    """Raises UnsupportedStackError for versions of torch ("2.13.0+cpu") and torch_npu ("2.9.0.post6") that do not fit
    each other or cannot run a graph mode, ValueError for an unknown mode."""
    if graph_mode not in FIRST_POST_RELEASES:
        raise ValueError(f"graph mode: unknown value {graph_mode!r}; choose one of {', '.join(FIRST_POST_RELEASES)}")
    if release_of(torch) != release_of(torch_npu):
        raise UnsupportedStackError(
            f"torch {torch} and torch_npu {torch_npu} are not of one release; "
            "install the torch_npu whose first three numbers are those of torch"
        )
    if not can_run(torch_npu, graph_mode):
        other_modes = [mode for mode in FIRST_POST_RELEASES if can_run(torch_npu, mode)]
        raise UnsupportedStackError(
            f"torch_npu {torch_npu} cannot write keys and values in {graph_mode} mode; install {_needed(graph_mode)}"
            + (f", or choose another mode: {', '.join(other_modes)}" if other_modes else "")
        )


def cann_of(torch_npu: str) -> str | None:
    """The CANN that a version of torch_npu is made for, listed for its newest post-release up to it; None if there is
    none. UnsupportedStackError if this is no version."""
    release, post_release = _parse(torch_npu)
    listed = {_parse(version)[1]: cann for version, cann in CANN_OF_TORCH_NPU.items() if release_of(version) == release}
    up_to_it = [post for post in listed if post <= post_release]
    return listed[max(up_to_it)] if up_to_it else None


def check_cann(cann: str) -> None:
    """Raises UnsupportedStackError for a version of CANN, e.g. "9.0.RC1", that is too old for every supported
    torch_npu, or is no version."""
    if release_of(cann)[:2] < release_of(OLDEST_CANN):
        raise UnsupportedStackError(f"CANN {cann} is too old: it must be {OLDEST_CANN} or newer")


def check_driver(driver: str, graph_mode: str) -> None:
    """Raises UnsupportedStackError for a version of the driver, e.g. "24.1.rc3", that is too old for a graph mode, or
    is no version."""
    if graph_mode in CAPTURING_MODES and driver_order(driver) < driver_order(OLDEST_DRIVER):
        raise UnsupportedStackError(
            f"driver {driver} cannot change tasks of captured graphs, as graph mode {graph_mode} does; "
            f"install Ascend HDK {ADVISED_DRIVER} or newer (at least {OLDEST_DRIVER}), or serve with --graph-mode eager"
        )


def driver_version(install_info: Path = INSTALL_INFO) -> str | None:
    """The installed driver's version, found as CANN's runtime finds it; None if no file tells it. The installer's file
    names the driver's folder; without it the usual folder counts."""
    folder = _value(install_info, "Driver_Install_Path_Param") or "/usr/local/Ascend"
    return _value(Path(folder, "driver/version.info"), "Version")


def driver_order(version: str) -> tuple[int, ...]:
    """Sorts versions of the driver as torch_npu does: 25.0.T1, 25.0.RC1, 25.0.RC1.1, 25.0.0, 25.0.0.1.
    UnsupportedStackError if this is no version of a driver."""
    found = re.match(r"(\d+)\.(\d+)\.(T|RC|)(\d+)(?:\.(\d+))?", version, re.IGNORECASE)
    if found is None:
        raise UnsupportedStackError(
            f"{version!r} is not a version of the driver; expected one such as {ADVISED_DRIVER}"
        )
    stage = ("t", "rc", "").index(found[3].lower())
    return int(found[1]), int(found[2]), stage, int(found[4]), int(found[5] or 0)


def can_run(torch_npu: str, graph_mode: str) -> bool:
    release, post_release = _parse(torch_npu)
    if release >= release_of(FIRST_COMPLETE_RELEASE):
        return True
    first = FIRST_POST_RELEASES[graph_mode].get(".".join(map(str, release)))
    return first is not None and post_release >= first


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a release: (2, 9, 0) of "2.9.0.post6", (8, 3) of "8.3.RC1". UnsupportedStackError if the text does
    not begin with a number."""
    return _parse(version)[0]


def _parse(version: str) -> tuple[tuple[int, ...], int]:
    """Release and post-release: ((2, 9, 0), 6) of "2.9.0.post6", ((2, 9, 0), 0) of "2.9.0"."""
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?", version)
    if found is None:
        raise UnsupportedStackError(f"{version!r} is not a version; expected numbers with dots, such as 2.13.0")
    return tuple(int(part) for part in found[1].split(".")), int(found[2] or 0)


def _value(file: Path, key: str) -> str | None:
    """The value in the line ``key=value`` of a file; None if there is no such file or line."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{key}=(\S+)\s*$", text, re.MULTILINE)
    return found and found[1]


def _needed(graph_mode: str) -> str:
    names = [
        f"{release}.post{post_release}" if post_release else release
        for release, post_release in FIRST_POST_RELEASES[graph_mode].items()
        if post_release is not None
    ]
    return f"{', '.join(names)} or {FIRST_COMPLETE_RELEASE}, or newer"
