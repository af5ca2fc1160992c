"""Builds stand-ins for the CANN libraries, so that torch_npu imports on a machine without them.

    python tests/npu/lab/standins.py DIRECTORY

The functions of ``acl.c`` do what they say over host memory; every other symbol that torch_npu needs is a function that
returns 0, ACL's success. Needs gcc and binutils, and torch and torch_npu in this Python's environment.
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
    lines = (run("nm", "-D", "--defined-only", library).splitlines() for library in libraries)
    return {line.split()[-1].partition("@")[0] for group in lines for line in group}


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    """Those that no system library and not the interpreter has: system symbols carry a version, weak ones may stay
    undefined."""
    found = set()
    for library in libraries:
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            kind, name = line.split()[-2:]
            if kind == "U" and "@" not in name and not name.startswith(("Py", "_Py")):
                found.add(name)
    return found


def needed_libraries(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library)))


def build(packages: Path, directory: Path) -> None:
    """Writes the libraries and the list of their sonames, in the order in which to load them. ``packages`` is
    site-packages."""
    # What is opened on first use alone, for the kernels of ATB, stays as it is.
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
    # Names of C++ vtables and type information are data.
    lines = [f"char {s}[4096];" if re.match("_ZT[ISV]", s) else f"long {s}(void) {{ return 0; }}" for s in missing]
    source = directory / "succeeding.c"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(*GCC, f"-Wl,-soname,{main.name}", "-o", main, runtime, source)
    for name in sonames:
        # Linked to the first one: torch_npu also looks functions up in these by name.
        run(*GCC, "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", directory / name, main)
    (directory / LIST).write_text("\n".join([main.name, *sonames]) + "\n", encoding="utf-8")
    print(f"npu: {len(missing) + len(written)} symbols stand in for {', '.join(sonames)}")


if __name__ == "__main__":
    build(Path(sysconfig.get_path("purelib")), Path(sys.argv[1]))
