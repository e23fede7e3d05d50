"""Help: the flags of a program under titles, its own first; rarer ones with `--help_all`.

A group is the dataclass that declares a flag, its title the first line of that class's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from lightrlhf.cli.fields import Flag, declared_flags

WIDTH, COLUMN = 100, 27
KINDS = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT"}
ALWAYS = {
    "config": ("FILE", "YAML file of flags; flags given after it win."),
    "print_config": ("", "Print the flags as YAML for --config, and exit."),
    "help": ("", "Print the common flags, and exit."),
    "help_all": ("", "Print all flags, rare ones too, and exit."),
}


def help_text(args_class: Any, program: str, everything: bool) -> str:
    """All of `--help`, or with `everything` of `--help_all`."""
    title = first_line(args_class)
    flags, docs = declared_flags(args_class), sentences(args_class)
    lines = [f"usage: {program} [flags]", "", title]
    hidden = 0
    for owner, names in group_flags(args_class).items():
        shown = [name for name in names if everything or flags[name].options.get("show") != "rarely"]
        hidden += len(names) - len(shown)
        if shown:
            lines += ["", "Flags of this program:" if owner is args_class else f"{first_line(owner).rstrip('.')}:"]
        for name in shown:
            lines += entry(name, kind_of(flags[name].hint), f"{docs.get(name, '')} {state_of(flags, name)}".strip())
    lines += ["", "Help and configuration:"]
    for name, (kind, sentence) in ALWAYS.items():
        lines += entry(
            name, kind, f"{sentence} Not shown here: {hidden}." if name == "help_all" and hidden else sentence
        )
    return "\n".join(lines) + "\n"


def sentences(args_class: type) -> dict[str, str]:
    """The sentence of each flag: the docstring of its field, in the last class that gives it one."""
    found = {}
    for owner in reversed(args_class.__mro__):
        own = _tree(inspect.getsourcefile(owner) or "").get(owner.__name__, []) if is_dataclass(owner) else []
        for field, text in zip(own, own[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


@cache
def _tree(file: str) -> dict[str, list[ast.stmt]]:
    """The statements of each class of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def group_flags(args_class: Any) -> dict[type, list[str]]:
    """Flags by the class that first declares them: the program's, then its inputs', then its bases'."""
    owners: list[Any] = [owner for owner in args_class.__mro__ if dataclasses.is_dataclass(owner)]
    groups: dict[Any, list[str]] = {owner: [] for owner in owners}
    by_title: dict[str, Any] = {}
    for field in dataclasses.fields(args_class):
        first = [owner for owner in owners if field.name in owner.__dict__.get("__annotations__", {})][-1]
        groups[by_title.setdefault(first_line(first), first)].append(field.name)
    flags = declared_flags(args_class)
    is_input = {owner: any(flags[name].options.get("show") == "first" for name in groups[owner]) for owner in owners}
    order = sorted(owners, key=lambda owner: (owner is not args_class, not is_input[owner]))
    return {owner: groups[owner] for owner in order if groups[owner]}


def first_line(owner: type) -> str:
    return (owner.__doc__ or "").strip().splitlines()[0]


def kind_of(hint: Any) -> str:
    """The name of a type in help."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is list:
        return f"{kind_of(get_args(hint)[0])}…"
    return KINDS.get(hint, "TEXT")


def state_of(flags: dict[str, Flag], name: str) -> str:
    """Default of a flag, or `required`."""
    if what := flags[name].options.get("required"):
        is_one_of = [one.options.get("required") for one in flags.values()].count(what) > 1
        return "[one is required]" if is_one_of else "[required]"
    default = flags[name].default
    if default is dataclasses.MISSING:
        return "[required]"
    return "" if default in (None, "") or isinstance(default, list) else f"[{default}]"


def entry(name: str, kind: str, sentence: str) -> list[str]:
    """Lines of one flag: `--name KIND`, then its sentence in the second column."""
    head = f"  --{name} {kind}".rstrip()
    if len(head) > COLUMN + 12 and kind.startswith("{"):  # long choices belong to the text
        head, sentence = f"  --{name}", f"{sentence} {kind.replace(',', ', ')}"
    indent = " " * COLUMN
    if len(head) < COLUMN - 1:
        return textwrap.wrap(sentence, WIDTH, initial_indent=head.ljust(COLUMN), subsequent_indent=indent) or [head]
    text = textwrap.wrap(sentence, WIDTH, initial_indent=f"{head}  ", subsequent_indent=indent)
    return text or [head]
