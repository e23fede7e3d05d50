"""How long a function, a class, a file, a program's loop and its imports may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

FUNCTION, CLASS, FILE, PROGRAM, IMPORTS, TRAIN = 60, 300, 450, 480, 30, 44  # lines
TRAIN_OF = {"reflect_rl": 50, "online_dpo": 60, "iterative_refuel": 60}


def lengths(path: Path) -> Iterator[tuple[str, int, int]]:
    """The name, lines and limit of all that a file of the library has a limit for."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    tree, is_program = ast.parse(text), path.parent == ROOT / "lightrlhf"
    yield name, len(text.splitlines()), PROGRAM if is_program else FILE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}:{node.name}", lines(node), FUNCTION
        if isinstance(node, ast.ClassDef):
            yield f"{name}:{node.name}", lines(node), CLASS
    if is_program and path.stem != "__init__":  # whose imports are written by `make lists`
        yield f"{name} imports", sum(map(lines, filter(is_import, ast.walk(tree)))), IMPORTS
    for node in tree.body if is_program else ():
        if isinstance(node, ast.FunctionDef) and node.name == "train":
            body = node.body[ast.get_docstring(node) is not None :]
            yield f"{name} loop", lines(body[0], body[-1]), TRAIN_OF.get(path.stem, TRAIN)


def lines(first: ast.stmt, last: ast.stmt | None = None) -> int:
    """Lines from the begin of a statement to its own end, or to that of another."""
    return ((last or first).end_lineno or first.lineno) - first.lineno + 1


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_each_part_is_within_its_limit():
    files = sorted(path for folder in ("lightrlhf", "datasets_prep") for path in (ROOT / folder).rglob("*.py"))
    found = [length for path in files for length in lengths(path)]
    assert not {name: number for name, number, limit in found if number > limit}
