"""The process in which one program runs; ``sandbox.run`` starts it and says what it does.

Reads from standard input five texts, each with its length in front (8 bytes): a token, seconds, bytes, the program, its
test. Imports nothing of this project.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOWED_CALLS = {
    "x86_64": (
        0xC000003E,
        # read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn select
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 23,
         # sched_yield mremap madvise nanosleep getitimer setitimer getpid exit gettimeofday getrusage times sigaltstack
         24, 25, 28, 35, 36, 38, 39, 60, 96, 98, 100, 131,
         # gettid time futex restart_syscall clock_gettime clock_getres clock_nanosleep exit_group pselect6 getrandom
         186, 201, 202, 219, 228, 229, 230, 231, 270, 318),
    ),
    "aarch64": (
        0xC00000B7,
        # close lseek read write pselect6 fstat exit exit_group futex nanosleep getitimer setitimer clock_gettime
        (57, 62, 63, 64, 72, 80, 93, 94, 98, 101, 102, 103, 113,
         # clock_getres clock_nanosleep sched_yield restart_syscall sigaltstack rt_sigaction rt_sigprocmask rt_sigreturn
         114, 115, 124, 128, 132, 134, 135, 139,
         # times getrusage gettimeofday getpid gettid brk munmap mremap mmap mprotect madvise getrandom
         153, 165, 169, 172, 178, 214, 215, 216, 222, 226, 233, 278),
    ),
}  # fmt: skip
"""By machine: its number in the kernel, and the numbers of the calls that a program may make. Every other one fails
with EPERM: opening files and sockets, starting processes and threads, sending signals."""
ALWAYS = (
    "math", "cmath", "re", "collections", "itertools", "functools", "heapq", "bisect", "string", "random", "typing",
    "copy", "operator", "datetime", "_strptime", "statistics", "fractions", "decimal", "json", "hashlib", "traceback",
    "encodings.idna", "unicodedata", "array", "struct", "time", "calendar", "textwrap", "dataclasses", "enum",
)  # fmt: skip
"""Modules that others import while they run."""
MAX_DOTS = 20
"""In the name of a module; each of them is a call inside another when it is imported."""
REFUSED = ("antigravity", "this", "idlelib", "turtledemo")


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    token, timeout, memory, program, test = (_read_text() for _ in range(5))
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(report + 1, 1024)
    try:
        _prepare_imports(program, test)
        _limit(float(timeout), int(memory))
        _seal()
    except Exception as error:  # noqa: BLE001  # reported to the process that started this one
        _finish(report, f"no sandbox {token}\n{error!r}")
    try:
        # Without a __name__, as the published code_eval runs programs, and without this file's __future__ imports.
        namespace: dict[str, object] = {}
        exec(compile(program, "<program>", "exec", dont_inherit=True), namespace)
        exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001  # whatever a program raises, SystemExit as well
        text = f"{type(error).__name__}: {error}".split("\n")[0][:500]
        _finish(report, f"failed {token}\n{text}")
    _finish(report, f"passed {token}")


def _read_text() -> str:
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    return sys.stdin.buffer.read(size).decode()


def _finish(report: int, text: str) -> None:
    os.write(report, text.encode(errors="replace"))
    os._exit(0)


def _prepare_imports(program: str, test: str) -> None:
    """Imports what the sources ask for: of the standard library for the program, installed packages for its test."""
    for name in [*ALWAYS, *(name for name in _imports(program) if name.partition(".")[0] in sys.stdlib_module_names)]:
        if name.partition(".")[0] not in REFUSED:
            _import(name)
    for name in _imports(test):
        _import(name)


def _imports(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _import(name: str) -> None:
    # What cannot be imported fails again where the program imports it. A __main__ would run before the limits hold.
    if "__main__" in name.split(".") or name.count(".") > MAX_DOTS:
        return
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(name)


def _limit(timeout: float, memory: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    seconds = max(1, round(timeout))
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, used + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 16),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout)


def _seal() -> None:
    """Lets the kernel refuse every call but the allowed ones from now on."""
    architecture, calls = ALLOWED_CALLS[platform.machine()]
    # A BPF program. An instruction has an operation, the instructions to skip if a comparison holds or fails, and a
    # value: the offset to load from in the kernel's seccomp_data, what is compared, or the verdict.
    load, equal, result = 0x20, 0x15, 0x06
    call_number, machine_number = 0, 4
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refuse: with the error EPERM, which is 1
    program = [(load, 0, 0, machine_number), (equal, 1, 0, architecture), (result, 0, 0, kill)]
    program += [(load, 0, 0, call_number)]
    program += [(equal, len(calls) - index, 0, call) for index, call in enumerate(calls)]  # skips to the end: allowed
    program += [(result, 0, 0, refuse), (result, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is not available")


if __name__ == "__main__":
    main()
