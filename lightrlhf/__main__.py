"""The command `lightrlhf`: all programs under one name.

    lightrlhf                            list the programs
    lightrlhf ppo --data_dir data/cafe   the same as python -m lightrlhf.ppo --data_dir data/cafe
    lightrlhf --completion bash          print a completion script for the shell

Left out: the programs of `datasets_prep`, which are modules of another package.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

import lightrlhf
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.names import OTHER_PROGRAMS
from lightrlhf.programs import PROGRAMS, TOOLS, TRAINING, Program

SHELLS = ("bash", "zsh", "tcsh")
USAGE = "usage: lightrlhf PROGRAM [flags]     flags of a program: lightrlhf PROGRAM --help"


@one_line_errors
def main(argv: list[str] | None = None) -> Any:
    """Run the program that the first word names with the other words; returns what its `main` returns."""
    words = sys.argv[1:] if argv is None else argv
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first == "help" and rest:
        first, rest = rest[0], ["--help"]
    if first in ("--help", "-h", "--help_all", "help"):
        return print(overview(), end="")
    if first in ("--version", "-V", "version"):
        return print(f"lightrlhf {lightrlhf.__version__}")
    if first.partition("=")[0] == "--completion":
        return print(completion(first.partition("=")[2] or next(iter(rest), "")))
    return program(first)(rest)


def program(word: str) -> Any:
    """`main` of a program; `online-dpo` names it as `online_dpo` does. Raises: UsageError naming the nearest one."""
    name = word.lower().replace("-", "_")
    if name not in PROGRAMS:
        if word.startswith("-"):
            raise UsageError(f"{word} must follow a program: lightrlhf PROGRAM {word}; lightrlhf --help lists all")
        nearest = difflib.get_close_matches(name, PROGRAMS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "lightrlhf --help lists all"
        raise UsageError(f"no program {word}; " + (f"use {OTHER_PROGRAMS[name]}" if name in OTHER_PROGRAMS else hint))
    return import_module(PROGRAMS[name].module).main


def overview() -> str:
    """All programs with their titles, which are read without importing them."""
    lines = [USAGE]
    for title, group in (("Train", TRAINING), ("Sample, evaluate, serve, look", TOOLS)):
        lines += ["", f"{title}:", *(f"  {one.name:<20} {title_of(one)}" for one in group.values())]
    lines += ["", "Data is prepared by python -m datasets_prep.NAME.prepare_data; see howto/datasets.md."]
    return "\n".join(lines) + "\n"


def title_of(one: Program) -> str:
    """First line of a program's header up to its first colon, comma or bracket."""
    spec = util.find_spec(one.module)
    text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return re.split(r" ?[(:,]", line)[0].rstrip(".")


def completion(shell: str) -> str:
    """The completion script of a shell, with the programs and the flags of each. Raises: UsageError."""
    if shell not in SHELLS:
        raise UsageError(f"--completion {shell or '(nothing)'} is not one of {', '.join(SHELLS)}")
    import argparse
    import dataclasses

    import shtab

    parser = argparse.ArgumentParser(prog="lightrlhf", description="RLHF algorithms on Lightning Fabric")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--completion", choices=SHELLS)
    subparsers = parser.add_subparsers()
    for one in PROGRAMS.values():
        child = subparsers.add_parser(one.name, help=title_of(one))
        for field in dataclasses.fields(one.args_class()):
            child.add_argument(f"--{field.name}")
    return shtab.complete(parser, shell=shell)


def script() -> None:
    """The console script; returns the exit status, not a program's result."""
    sys.path.insert(0, "")  # as `python -m` does: functions of files in this folder can be imported
    main()


if __name__ == "__main__":
    main()
