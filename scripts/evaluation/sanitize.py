"""Takes from a text the Python program that it holds, as Dream's evaluation does."""

from __future__ import annotations

import ast

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
    for node in ast.parse(_longest_valid(text.splitlines()[:MAX_LINES])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif (name := _defined_name(node)) is not None:
            definitions[name] = node
    needed = set(definitions) if not entry_point else _reachable(entry_point, definitions)
    kept = [node for name, node in definitions.items() if name in needed]
    try:
        return "\n".join(ast.unparse(node) for node in [*imports, *kept])
    except RecursionError:  # such as hundreds of attributes of attributes; no answer to any problem
        return ""


def _longest_valid(lines: list[str]) -> str:
    """The consecutive lines that are valid Python and have most lines that are not blank; of equal ones the first."""
    best, best_count = "", 0
    for begin in range(len(lines)):
        for end in range(len(lines), begin, -1):
            part = lines[begin:end]
            count = sum(bool(line.strip()) for line in part)
            if count <= best_count:
                break  # shorter parts have no more lines
            if _is_valid(code := "\n".join(part)):
                best, best_count = code, count
                break
    return best


def _is_valid(code: str) -> bool:
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


def _reachable(entry_point: str, definitions: dict[str, ast.stmt]) -> set[str]:
    """The entry point, and all names that it uses, directly or not."""
    reached: set[str] = set()
    waiting = [entry_point]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        if name in definitions:
            waiting += _used_names(definitions[name])
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
