"""Flags stored in files: `--config` files, read strictly, and the `args.json` of runs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, list_names
from lightrlhf.cli.names import answer
from lightrlhf.programs import PROGRAMS

LARGEST_CONFIG = 2**20  # bytes
# numbers as flags and files of flags spell them, in lower case; what is not finite is refused later, by its flag
WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|\.?inf(inity)?|\.?nan)")
LONG = re.compile(r"[+-]?[0-9]{17}")  # digits before the point: a float rounds them
NUMBERS = {"tag:yaml.org,2002:int": WHOLE, "tag:yaml.org,2002:float": FLOAT}  # by the tag of a value
NOT_FLAGS = {"resume_from", "program", "versions", "git_commit", "initial", "given", "began"}  # of args.json


def flags_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The flags in a run's `args.json`."""
    return {name: value for name, value in stored.items() if name not in NOT_FLAGS}


def check_flags(args_class: Any, values: dict[str, Any], source: str) -> dict[str, Any]:
    """Stored flags as they are. Raises: UsageError naming `source` and a flag that the program does not have."""
    known = {field.name for field in dataclasses.fields(args_class)}
    if unknown := next((name for name in values if name not in known), None):
        raise UsageError(f"{source}: unknown flag {unknown}{hint(unknown, known)}")
    return values


def config_as_json(args_class: Any, word: str, before: str) -> str:
    """A word of the command line; the file after `--config` becomes the JSON of its flags."""
    flag, equals, value = word.partition("=")
    path = value if equals and flag == "--config" else word if before == "--config" else ""
    if not path or path.lstrip().startswith("{"):  # arguments in the word itself
        return word
    stored = read_config(path)
    values = flags_of(stored) if "program" in stored else stored
    text = json.dumps(check_flags(args_class, values, f"--config {path}"), default=str)
    return f"{flag}={text}" if equals else text


def hint(name: str, flags: set[str]) -> str:
    """The hint after an unknown flag, or "": our flag for another library's name, or the nearest flag.

    And the programs of this library that have the flag, or one with more words where this program has none like it.
    """
    if text := answer(name, flags):
        return f"; did you mean {text}?" if text.startswith("--") else f": {text}"
    meant = nearest(name, flags)
    others = {} if name in flags else flags_of_programs()
    found = ""
    if like := name if name in others else "" if meant else next(iter(longer(name, {*others})), ""):
        found = f"; {'it' if like == name else f'--{like}'} is a flag of {list_names(others[like])}"
    return found + (f"; did you mean --{meant}?" if meant else "")


@cache
def flags_of_programs() -> dict[str, list[str]]:
    """The programs that have a flag, by its name; imports them all, which takes a third of a second."""
    found: dict[str, list[str]] = {}
    for one in PROGRAMS.values():
        for field in dataclasses.fields(one.args_class()):
            found.setdefault(field.name, []).append(one.name)
    return found


def nearest(typo: str, names: set[str]) -> str:
    """The most similar name, else the shortest one with more words, else ""."""
    near = difflib.get_close_matches(typo, sorted(names), n=1, cutoff=0.75)
    return next(iter(near + longer(typo, names)), "")


def longer(name: str, names: set[str]) -> list[str]:
    """The names that have all words of a name, and more; the shortest one first."""
    return sorted((one for one in names if {*name.split("_")} < {*one.split("_")}), key=lambda one: (len(one), one))


def read_config(path: str, flag: str = "--config") -> dict[str, Any]:
    """The flags of a YAML or JSON file; flag: named in errors.

    Raises: UsageError when it is anything else than a plain mapping of them.

    Anchors are refused, since a few lines of them may stand for gigabytes; so are keys given twice, and numbers that
    YAML reads differently: 010 as eight, 1:30 as ninety.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1}: aliases are not supported")
            node: Any = super().compose_node(parent, index)
            spelling = NUMBERS.get(node.tag)
            if spelling and not (spelling.fullmatch(node.value.lower()) and not LONG.match(node.value)):
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {node.value[:40]} is not a plain number; quote it if it is text")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise yaml.YAMLError(f"{twice} is given twice")
            return super().construct_mapping(node, deep)

    try:
        if Path(path).stat().st_size > LARGEST_CONFIG:
            raise UsageError(f"{flag} {path} has more than {LARGEST_CONFIG:,} bytes, too many for a file of flags")
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):  # JSON may be indented by tabs, which YAML refuses; its texts hold none
            text = text.replace("\t", " ")
        stored = yaml.load(text, Loader)
    except OSError as problem:
        raise UsageError(f"{flag} {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path} is not UTF-8 text") from None
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as problem:
        raise UsageError(f"{flag} {path} is not YAML: {' '.join(str(problem).split())[:200]}") from None
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
        raise UsageError(f"{flag} {path} is not a mapping of flags such as `seed: 1`, one a line")
    return stored
