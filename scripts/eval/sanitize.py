"""Takes from a text the Python program that it holds, as Dream's evaluation and evalplus do."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

MAX_LINES = 100
"""Lines of a text that are looked at."""


def sanitize_dream(text: str, entry_point: str | None = None) -> str:
    """Imports and definitions of the longest valid part of a text: Dream's way.

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
        elif (name := _dream_defines(node)) is not None:
            definitions[name] = node
    needed = set(definitions)
    if entry_point:
        needed = reachable(entry_point, {name: _dream_uses(node) for name, node in definitions.items()})
    kept = [node for name, node in definitions.items() if name in needed]
    try:
        return "\n".join(ast.unparse(node) for node in [*imports, *kept])
    except RecursionError:  # such as hundreds of attributes of attributes; no answer to any problem
        return ""


def _dream_defines(node: ast.stmt) -> str | None:
    """The name that a statement defines, as far as it is kept."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.FunctionDef) and any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _dream_uses(node: ast.AST) -> list[str]:
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


def sanitize_evalplus(text: str, entry_point: str | None = None) -> str:
    """Imports and definitions of the longest valid part of a text, as they are written there: evalplus's way.

    evalplus finds statements with tree-sitter, and this function with Python's own parser. Two things differ. Where no
    two lines in a row are valid Python, evalplus reads the first line even with a syntax error, and this function only
    a valid one. And ``(x) = 1`` defines ``x`` here.

    Only statements at the top level count. Of several definitions of a name the first is kept, and functions without a
    return statement, decorated functions and classes, and imports from ``__future__`` are left out.

    Args:
        text: a program, with or without other text around it.
        entry_point: name of the function that is tested; definitions that it does not need are left out. None: all
            definitions are kept.
    """
    code = _evalplus_extract(text)
    imports: list[ast.stmt] = []
    definitions: dict[str | None, ast.stmt] = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            imports.append(node)
        elif _evalplus_keeps(node):
            definitions.setdefault(_evalplus_defines(node), node)
    if entry_point:
        names = {name: list(_evalplus_uses(node)) for name, node in definitions.items() if name is not None}
        needed = reachable(entry_point, names)
        definitions = {name: node for name, node in definitions.items() if name in needed}
    return "\n".join(ast.get_source_segment(code, node) or "" for node in [*imports, *definitions.values()])


def _evalplus_extract(text: str) -> str:
    """The longest valid part of at least two lines; the first line if there is none, which may be valid or empty."""
    lines = text.split("\n")
    first = lines[0] if is_valid(lines[0]) else ""
    return longest_valid(lines, least=2) or first


def _evalplus_keeps(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return not node.decorator_list
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return not node.decorator_list and any(isinstance(inner, ast.Return) for inner in ast.walk(node))
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _evalplus_defines(node: ast.stmt) -> str | None:
    """The name under which a definition is kept.

    evalplus takes the first child of a statement that is a plain name. So ``a.b = c`` and ``x, y = c`` count as
    definitions of ``c``, and ``x, y = 1, 2`` as one of None, which no entry point needs.
    """
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.Assign):
        sides = [node.targets[0], node.value] if len(node.targets) == 1 else [node.targets[0]]
    else:
        assert isinstance(node, ast.AnnAssign)
        sides = [node.target, *([node.value] if node.value else [])]
    return next((side.id for side in sides if isinstance(side, ast.Name)), None)


def _evalplus_uses(node: ast.AST) -> Iterator[str]:
    """Every identifier in a definition, whatever it stands for: also names of attributes, parameters and keywords."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant):  # whose text is no identifier
            continue
        for _, value in ast.iter_fields(inner):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str):
                    yield from part.split(".")  # modules of imports have dotted names


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
