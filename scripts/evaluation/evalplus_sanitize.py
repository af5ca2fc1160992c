"""Takes from a text the Python program that it holds, as evalplus does before it tests answers.

evalplus finds statements with tree-sitter, and this module with Python's own parser. Two things differ. Where no two
lines in a row are valid Python, evalplus reads the first line even with a syntax error, and this module only a valid
one. And ``(x) = 1`` defines ``x`` here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.evaluation.sanitize import is_valid, longest_valid, reachable


def sanitize(text: str, entry_point: str | None = None) -> str:
    """Imports and definitions of the longest valid part of a text, as they are written there.

    Only statements at the top level count. Of several definitions of a name the first is kept, and functions without a
    return statement, decorated functions and classes, and imports from ``__future__`` are left out.

    Args:
        text: a program, with or without other text around it.
        entry_point: name of the function that is tested; definitions that it does not need are left out. None: all
            definitions are kept.
    """
    code = _extract(text)
    imports: list[ast.stmt] = []
    definitions: dict[str | None, ast.stmt] = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            imports.append(node)
        elif _is_kept(node):
            definitions.setdefault(_defined_name(node), node)
    if entry_point:
        names = {name: list(_identifiers(node)) for name, node in definitions.items() if name is not None}
        needed = reachable(entry_point, names)
        definitions = {name: node for name, node in definitions.items() if name in needed}
    return "\n".join(ast.get_source_segment(code, node) or "" for node in [*imports, *definitions.values()])


def _extract(text: str) -> str:
    """The longest valid part of at least two lines; the first line if there is none, which may be valid or empty."""
    lines = text.split("\n")
    first = lines[0] if is_valid(lines[0]) else ""
    return longest_valid(lines, least=2) or first


def _is_kept(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return not node.decorator_list
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return not node.decorator_list and any(isinstance(inner, ast.Return) for inner in ast.walk(node))
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _defined_name(node: ast.stmt) -> str | None:
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


def _identifiers(node: ast.AST) -> Iterator[str]:
    """Every identifier in a definition, whatever it stands for: also names of attributes, parameters and keywords."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant):  # whose text is no identifier
            continue
        for _, value in ast.iter_fields(inner):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str):
                    yield from part.split(".")  # modules of imports have dotted names
