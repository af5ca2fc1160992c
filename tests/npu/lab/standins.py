"""Builds stand-ins for the CANN libraries, so that torch_npu imports on a machine without them.

    python tests/npu/lab/standins.py DIRECTORY

The functions of ``acl.c`` work over the memory of the host. Every other symbol that torch_npu needs becomes a function
that returns 0, which is ACL's success. This needs gcc and binutils, and torch and torch_npu in the same environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SYSTEM = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))[.-]")
GCC = ("gcc", "-shared", "-fPIC", "-O1", "-fno-builtin")
LIST = "sonames.txt"


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def defined_symbols(libraries: Iterable[Path]) -> set[str]:
    """The symbols that any of the libraries defines."""
    lines = (run("nm", "-D", "--defined-only", library).splitlines() for library in libraries)
    return {line.split()[-1].partition("@")[0] for group in lines for line in group}


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    """The symbols that the libraries need, except for those of system libraries and of the Python interpreter.

    System symbols are recognised by their version; weak symbols may stay undefined.
    """
    found = set()
    for library in libraries:
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            kind, name = line.split()[-2:]
            if kind == "U" and "@" not in name and not name.startswith(("Py", "_Py")):
                found.add(name)
    return found


def needed_libraries(library: Path) -> set[str]:
    """Sonames of the libraries that a library is linked to."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library)))


def build(packages: Path, directory: Path) -> None:
    """Builds the stand-in libraries.

    Args:
        packages: site-packages of the environment.
        directory: where the libraries are written, with a list of their sonames in the order to load them.
    """
    # The library for the kernels of ATB is opened on first use only, so its symbols need no stand-ins.
    npu = [p for p in (packages / "torch_npu").rglob("*.so") if "op_plugin_atb" not in p.name]
    others = [p for folder in ("torch/lib", "torch_npu.libs") for p in (packages / folder).glob("*.so*")]
    present = {p.name for p in npu + others}
    needed = set().union(*map(needed_libraries, npu))
    sonames = sorted(name for name in needed - present if not SYSTEM.match(name))

    directory.mkdir(parents=True, exist_ok=True)
    main = directory / "libcann_standins.so"
    runtime = directory / "acl.o"
    run("gcc", "-c", "-fPIC", "-O1", "-fno-builtin", "-o", runtime, Path(__file__).with_name("acl.c"))
    written = {line.split()[-1] for line in run("nm", "--defined-only", runtime).splitlines()}
    missing = sorted(undefined_symbols(npu) - defined_symbols(npu + others) - written)
    # C++ vtables and type information are data, not functions.
    lines = [f"char {s}[4096];" if re.match("_ZT[ISV]", s) else f"long {s}(void) {{ return 0; }}" for s in missing]
    source = directory / "succeeding.c"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(*GCC, f"-Wl,-soname,{main.name}", "-o", main, runtime, source)
    for name in sonames:
        # Each library is linked to the main one, since torch_npu also looks functions up by name in each of them.
        run(*GCC, "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", directory / name, main)
    (directory / LIST).write_text("\n".join([main.name, *sonames]) + "\n", encoding="utf-8")
    print(f"npu: {len(missing) + len(written)} symbols stand in for {', '.join(sonames)}")


if __name__ == "__main__":
    build(Path(sysconfig.get_path("purelib")), Path(sys.argv[1]))
