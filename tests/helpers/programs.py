"""The programs of the library, their argument classes, and which of their fields the code reads."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers import ROOT, last_checkpoint, metrics, weights
from lightrlhf.programs import PROGRAMS
from lightrlhf.storage.checkpoint import checkpoints

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "lightrlhf").rglob("*.py")
}


def main_of(program: str) -> Callable[[list[str]], Any]:
    """The `main` of a program of the library."""
    return importlib.import_module(PROGRAMS[program].module).main


def trained(program: str, *flags: object) -> Path:
    """Run a training program in this process; returns its experiment dir."""
    return Path(main_of(program)([str(flag) for flag in flags]))


def assert_resumes(main: Callable[[list[str]], Any], run: str | Path, kept: int = 1) -> None:
    """Cut a run back to its first checkpoints and resume it: weights and metrics must be the same, bit by bit."""
    expected, rows = weights(last_checkpoint(run)), metrics(run)
    for later in checkpoints(Path(run))[kept:]:
        shutil.rmtree(later)
    main(["--resume_from", str(run)])
    assert weights(last_checkpoint(run)) == expected and metrics(run) == rows


def args_class(program: str) -> type:
    """The class of arguments of a program: by the table, or by its `main`."""
    known = next((one for one in PROGRAMS.values() if program in (one.module, f"lightrlhf.{one.name}")), None)
    if known:
        return known.args_class()
    module = importlib.import_module(program)
    (name,) = re.findall(r"\b\w+Args\b", inspect.getsource(module.main))
    return getattr(module, name)


def args_classes() -> dict[str, type]:
    """The class of arguments of each program of the library, by its module."""
    return {one.module: one.args_class() for one in PROGRAMS.values()}


def fields_of(program: str) -> set[str]:
    """The flags of a program."""
    return {field.name for field in dataclasses.fields(args_class(program))}


def small_flags(program: str, values: Mapping[str, object]) -> list[str]:
    """The words of those values whose flags a program has, as they make its runs small."""
    own = fields_of(program)
    return [str(word) for name, value in values.items() if name in own for word in (f"--{name}", value)]


def read_fields(program: str) -> set[str]:
    """Names that the files which the program imports, and its own, read from an args object.

    Reading a field in order to check it, in `__post_init__` or `check_*`, does not count.
    """
    done: set[str] = set()
    todo = [program]
    while todo:
        module = todo.pop()
        if module not in done:
            done.add(module)
            todo += _imports(module)
    return set().union(*(_reads(module) for module in done))


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def _imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & FILES.keys()


@functools.cache
def _reads(module: str) -> set[str]:
    """Attributes and `getattr`s of `args`, `….args`, names such as `args_now`, and `self` within an args class."""
    found = set()

    def visit(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef) and (node.name == "__post_init__" or "check_" in node.name):
            return
        if isinstance(node, ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_args(node.value, inside):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if isinstance(node.args[1], ast.Constant) and _is_args(node.args[0], inside):
                found.add(node.args[1].value)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(_tree(module), "")
    return found


def _is_args(node: ast.AST, inside: str) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "args" in name or (name == "self" and inside.endswith("Args"))
