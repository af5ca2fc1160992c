"""Settings that must stand before torch is imported, the hypothesis profile of all tests, and their garbage collection.

This file imports no torch but for those who ask, and neither do the tests in ``unit/``.
"""

import gc
import os
import signal
from collections.abc import Iterator

# With the torch_npu wheel installed but no CANN, a plain `import torch` fails unless this is off.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# OpenMP's default, spinning, collapses as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The tests' models are so small that a second thread takes time. What it could change, tests with ``threads`` ask.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each engine writes its whole KV pool once. With huge pages that takes a third of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import Phase, settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
# For ci/check.sh without --slow: fewer examples.
settings.register_profile("ordinary", settings.get_profile("repeatable"), max_examples=15)
# For ci/mutants.py, which asks whether tests fail, not for the smallest example.
settings.register_profile("first-failure", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Spares the garbage collector the objects of all imported modules, which live as long as the process. Each full
    collection would look at a million of them, and one precedes every capture of a graph for NPUs."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def children_heed_signals() -> None:
    """Lets what tests start end by Ctrl-C and when the terminal closes, however the tests themselves were started.

    What a script starts in the background ignores SIGINT, under nohup also SIGHUP. Its children would ignore them too;
    they do not inherit handlers.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # the tests go on


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many of torch's threads as the test's parameter says."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
