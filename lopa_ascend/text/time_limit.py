"""Ends Python code that takes too long, in whatever thread it runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLongError(BaseException):
    """Raised in code that has used up its time. No Exception, so that the code cannot handle it by mistake."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context whose Python code ends with TookTooLongError after ``seconds``.

    The exception comes between two instructions of Python, so one long call of a C function is not cut short. Put a
    loop into a function and call that inside the `with` block. If the loop stands in the block itself, Python 3.13 may
    raise the exception where neither the block's end nor a surrounding `except` sees it.
    """
    thread, lock, is_over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def expire() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLongError))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True
        # Takes back an exception that was set too late to be raised inside.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
