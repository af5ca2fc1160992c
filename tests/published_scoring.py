"""The published scripts' scoring, restated plainly: what lm-eval and Dream's postprocess_code.py do with an answer.

Nothing of the evaluation is used. Programs run in a plain subprocess, as in the published code.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys


def gsm8k(target: str, response: str) -> dict[str, float]:
    """lm-eval 0.4.8: gsm8k.yaml's two filters, and exact_match with ignore_case and regexes_to_ignore."""
    strict = re.findall(r"#### (\-?[0-9\.\,]+)", response)
    groups = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", response)
    flexible = [part for group in groups[-1:] for part in group if part]
    found = {"strict_match": strict[:1], "flexible_extract": flexible[:1]}
    scores = {}
    for name, match in found.items():
        sides = [match[0].strip() if match else "[invalid]", target]
        for regex in (",", "\\$", "(?s).*#### ", "\\.$"):
            sides = [re.sub(regex, "", side) for side in sides]
        scores[name] = float(sides[0].lower() == sides[1].lower())
    return scores


def humaneval(problem: dict[str, str], response: str) -> float:
    """Dream's postprocess_code.py with its sanitize.py, then code_eval."""
    completion = response.split("```python\n", 1)[-1].split("```")[0]
    program = sanitize(problem["prompt"] + "\n" + completion, problem["entry_point"])
    return code_eval(program, problem["test"] + f"\ncheck({problem['entry_point']})")


def mbpp(problem: dict, response: str) -> float:
    """lm-eval's mbpp.yaml: cut at [DONE], then code_eval."""
    return code_eval(response.split("[DONE]")[0], "\n".join(problem["test_list"][:3]))


def code_eval(program: str, test: str) -> float:
    child = [sys.executable, "-c", "import sys; exec(sys.argv[1], {})", program + "\n" + test]
    done = subprocess.run(child, capture_output=True, timeout=60, check=False)
    return float(done.returncode == 0)


def valid(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, MemoryError, ValueError):
        return False
    return True


def sanitize(text: str, entry_point: str) -> str:  # noqa: C901
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    lines = text.splitlines()[:100]
    best, most = "", 0
    for i in range(len(lines)):
        for j in range(i, len(lines)):
            snippet = "\n".join(lines[i : j + 1])
            if valid(snippet):
                count = sum(1 for line in lines[i : j + 1] if line.strip())
                if count > most:
                    best, most = snippet, count
    imports: list[ast.stmt] = []
    definitions: dict[str, ast.stmt] = {}
    for node in ast.parse(best).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.FunctionDef):
            if any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
                definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
    calls: dict[str, set[str]] = {}
    for name, node in definitions.items():
        used: set[str] = set()
        stack: list[ast.AST] = [node]
        while stack:
            for child in ast.iter_child_nodes(stack.pop()):
                if isinstance(child, ast.Name):
                    used.add(child.id)
                elif isinstance(child, ast.Attribute):
                    used.add(child.attr)
                else:
                    stack.append(child)
        calls[name] = used
    reached: set[str] = set()
    waiting = [entry_point]
    while waiting:
        name = waiting.pop(0)
        if name not in reached:
            reached.add(name)
            waiting += calls.get(name, set()) - reached
    kept = [ast.unparse(node) for node in imports]
    return "\n".join(kept + [ast.unparse(node) for name, node in definitions.items() if name in reached])


def nv_statistics(samples: list[tuple[int, int, float]]) -> dict[str, float]:
    """eval_dream_stat.py's dataset statistics, of (tokens, steps, seconds after the first round)."""
    tps = [tokens / seconds if seconds > 0 else 0.0 for tokens, _, seconds in samples]
    fastest = sorted(tps, reverse=True)[:10]
    return {
        "avg_tps": sum(tps) / len(tps),
        "peak_tps": max(tps),
        "top10_tps_mean": sum(fastest) / len(fastest),
        "overall_tpf": sum(tokens for tokens, _, _ in samples) / sum(steps for _, steps, _ in samples),
    }
