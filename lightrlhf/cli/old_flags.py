"""Flags of older releases: renamed ones keep their stored values, removed ones are refused by name.

An args class has `RENAMED`, {old: new}, and `REMOVED`, {old: (the only value still meant, what to do instead)}; `...`
means any value, of a flag without effect on results.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.lists import as_list

LARGEST_CONFIG = 2**20  # bytes
# numbers as flags and files of flags spell them, in lower case; what is not finite is refused later, by its flag
WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|\.?inf(inity)?|\.?nan)")
LONG = re.compile(r"[+-]?[0-9]{17}")  # digits before the point: a float rounds them
NUMBERS = {"tag:yaml.org,2002:int": WHOLE, "tag:yaml.org,2002:float": FLOAT}  # by the tag of a value
NOT_FLAGS = {"resume_from", "program", "versions", "git_commit", "initial", "given", "began"}  # of args.json


def refuse_old_flags(args_class: Any, words: list[str]) -> None:
    """Raises: UsageError naming the successor of the first removed or renamed flag."""
    renamed, removed = getattr(args_class, "RENAMED", {}), getattr(args_class, "REMOVED", {})
    for flag in (word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")):
        if flag in renamed:
            raise UsageError(f"--{flag} is now --{renamed[flag]}")
        if flag in removed:
            raise UsageError(f"--{flag} was removed: {removed[flag][1]}")


def flags_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The flags in a run's `args.json`, as that run meant them: in older releases a warm-up ratio won over steps."""
    flags = {name: value for name, value in stored.items() if name not in NOT_FLAGS}
    if flags.get("lr_warmup_ratio") is not None and "lr_warmup_steps" in flags:
        flags["lr_warmup_steps"] = None
    return flags


def update_names(args_class: Any, values: dict[str, Any], source: str) -> dict[str, Any]:
    """Stored flags under today's names; a renamed flag keeps its value.

    Raises: UsageError naming `source` and a flag that is unknown, or removed with a value not meant any more.
    """
    renamed, removed = getattr(args_class, "RENAMED", {}), getattr(args_class, "REMOVED", {})
    known = {field.name: field for field in dataclasses.fields(args_class)}
    renewed = {}
    for name, value in values.items():
        if name in removed and name not in known:
            meant, successor = removed[name]
            if meant is not ... and value != meant:
                raise UsageError(f"{source}: {name} {value} was removed: {successor}")
            continue
        if name in renamed and renamed[name] in values:
            raise UsageError(f"{source} has both {name} and {renamed[name]}, which are one flag; remove {name}")
        name = renamed.get(name, name)
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            raise UsageError(f"{source}: unknown flag {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        renewed[name] = as_list(value) if known[name].metadata.get("was_text") else value
    return renewed


def with_new_names(args_class: Any, word: str, before: str) -> str:
    """A word of the command line; a `--config` file with old names becomes JSON with the new ones."""
    flag, equals, value = word.partition("=")
    path = value if equals and flag == "--config" else word if before == "--config" else ""
    if not path or path.lstrip().startswith("{"):  # arguments in the word itself
        return word
    stored = read_config(path)
    values = flags_of(stored) if "program" in stored else stored
    steps, ratio = values.get("lr_warmup_steps"), values.get("lr_warmup_ratio")
    defaults = (None, getattr(args_class, "lr_warmup_ratio", None))
    if steps is not None and ratio not in defaults:  # older releases meant the second, of a file by --print_config too
        raise UsageError(f"--config {path} has both lr_warmup_steps {steps} and lr_warmup_ratio {ratio}; remove one")
    text = json.dumps(update_names(args_class, values, f"--config {path}"), default=str)
    return f"{flag}={text}" if equals else text


def read_config(path: str, flag: str = "--config") -> dict[str, Any]:
    """The flags of a YAML or JSON file; flag: named in errors.

    Raises: UsageError when it is anything else than a plain mapping of them.

    Anchors are refused, since a few lines of them may stand for gigabytes; so are keys given twice, and numbers that
    YAML reads in a way of its own: 010 is eight to it, 1:30 ninety.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1}: aliases are not read")
            node: Any = super().compose_node(parent, index)
            spelling = NUMBERS.get(node.tag)
            if spelling and not (spelling.fullmatch(node.value.lower()) and not LONG.match(node.value)):
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {node.value[:40]} is no plain number; quote it if it is a text")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise yaml.YAMLError(f"{twice} is given twice")
            return super().construct_mapping(node, deep)

    try:
        if Path(path).stat().st_size > LARGEST_CONFIG:
            raise UsageError(f"{flag} {path} has more than {LARGEST_CONFIG:,} bytes; give a file of flags")
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):  # JSON may be indented by tabs, which YAML refuses; its texts hold none
            text = text.replace("\t", " ")
        stored = yaml.load(text, Loader)
    except OSError as problem:
        raise UsageError(f"{flag} {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path} is not a text in UTF-8") from None
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as problem:
        raise UsageError(f"{flag} {path} is not YAML: {' '.join(str(problem).split())[:200]}") from None
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
        raise UsageError(f"{flag} {path} is not a mapping of flags such as `seed: 1`, one a line")
    return stored
