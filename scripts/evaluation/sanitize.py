"""Takes from a text the Python program that it holds, as Dream's evaluation does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

MAX_LINES = 100
"""Lines of a text that are looked at."""


def sanitize(text: str, entry_point: str | None = None) -> str:
    """Imports and definitions of the longest valid part of a text.

    Functions without a return statement are left out, and so are definitions that the entry point does not need. Of a
    program that is nested too deeply nothing is left.

    Args:
        text: a program, with or without other text around it.
        entry_point: name of the function that is tested; None: all definitions are kept.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    imports: list[ast.stmt] = []
    definitions: dict[str, ast.stmt] = {}
    for node in ast.parse(longest_valid(text.splitlines()[:MAX_LINES])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif (name := _defined_name(node)) is not None:
            definitions[name] = node
    needed = set(definitions)
    if entry_point:
        needed = reachable(entry_point, {name: _used_names(node) for name, node in definitions.items()})
    kept = [node for name, node in definitions.items() if name in needed]
    try:
        return "\n".join(ast.unparse(node) for node in [*imports, *kept])
    except RecursionError:  # such as hundreds of attributes of attributes; no answer to any problem
        return ""


def longest_valid(lines: list[str], *, least: int = 1) -> str:
    """The consecutive lines that are valid Python and have most lines that are not blank; of equal ones the first.

    Args:
        lines: of a text.
        least: number of lines that the result has at least, blank ones counted; without such lines it is empty.
    """
    best, best_count = "", 0
    for begin in range(len(lines)):
        for end in range(len(lines), begin + least - 1, -1):
            part = lines[begin:end]
            count = sum(bool(line.strip()) for line in part)
            if count <= best_count:
                break  # shorter parts have no more lines
            if is_valid(code := "\n".join(part)):
                best, best_count = code, count
                break
    return best


def is_valid(code: str) -> bool:
    """Whether a text is a Python program."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _defined_name(node: ast.stmt) -> str | None:
    """The name that a statement defines, as far as it is kept."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.FunctionDef) and any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def reachable(entry_point: str, uses: Mapping[str, Iterable[str]]) -> set[str]:
    """The entry point, and all names that it uses, directly or not.

    Args:
        entry_point: the name to begin with.
        uses: by the name of each definition, the names that stand in it.
    """
    reached: set[str] = set()
    waiting = [entry_point]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += uses.get(name, ())
    return reached


def _used_names(node: ast.AST) -> list[str]:
    """Names and attributes inside a definition. As published, what stands under an attribute is not looked at."""
    names, waiting = [], [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.Name):
                names.append(child.id)
            elif isinstance(child, ast.Attribute):
                names.append(child.attr)
            else:
                waiting.append(child)
    return names
