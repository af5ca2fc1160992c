"""Checks the software that is installed on this machine against the versions that the NPU backend supports."""

from __future__ import annotations

from importlib import metadata

from lopa_ascend.config.npu_versions import (
    UnsupportedStackError,
    check_cann,
    check_driver,
    check_versions,
    driver_version,
)


def check_installed(graph_mode: str) -> None:
    """Refuses an installation of torch, torch_npu, CANN and the driver that cannot run a graph mode.

    A driver whose version no file tells is taken, and so is a CANN whose version torch_npu cannot find out.

    Raises:
        UnsupportedStackError: something is missing or too old; the message says what is needed.
        ValueError: there is no such mode.
    """
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
    """The version of CANN that torch_npu has found.

    Raises:
        ImportError: torch_npu cannot be loaded.
    """
    from torch_npu.npu.utils import get_cann_version

    version: str = get_cann_version()
    return version
