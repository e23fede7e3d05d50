"""Reads the commands out of the pages, for the tests of the documentation."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "howto").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- parse only -->\n+)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass
class Command:
    """One command of a page, words apart; `$NAME` not yet replaced."""

    words: list[str]
    line: str
    parse_only: bool
    values: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str | None:
        return self.words[2] if self.words[:2] == ["python", "-m"] else None


def blocks(text: str, language: str) -> list[tuple[str, bool]]:
    """Contents of the fenced blocks of a language, and whether each is marked as not to be run."""
    return [(body, bool(marked)) for marked, name, body in BLOCK.findall(text) if name == language]


def commands_of(script: str, parse_only: bool = False) -> list[Command]:
    """The commands of a shell text, continuation lines joined, comments and empty lines left out."""
    lines = script.replace("\\\n", " ").splitlines()
    lines = [line.strip().removeprefix("$ ") for line in lines]
    return [Command(shlex.split(line, comments=True), line, parse_only) for line in lines if line and line[0] != "#"]


def args_class(module: str) -> type:
    """The args dataclass of a program: the one that its `main` parses."""
    program = importlib.import_module(module)
    if hasattr(program, "__path__"):  # a folder, started by its name
        program = importlib.import_module(f"{module}.page")
    (name,) = re.findall(r"\bparse\((\w+), argv", inspect.getsource(program))
    return getattr(program, name)


def parse_flags(module: str, flags: list[str], folder: Path) -> object:
    """The program's own parser on these flags; every `--…_dir` that must exist is made, empty, below `folder`."""
    from lightrlhf.cli.parser import parse

    for flag, value in flags_with_values(flags):
        if flag.endswith("_dir") and flag != "destination_dir":
            (folder / value).mkdir(parents=True, exist_ok=True)
    return parse(args_class(module), flags)


def flags_with_values(flags: list[str]) -> list[tuple[str, str]]:
    """(name, value) of each flag; several pairs for a flag with several values."""
    pairs, name = [], ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs += [(name, value)] if equals else []
        else:
            pairs.append((name, word))
    return pairs
