"""Parsing: command-line flags and `--config` files into frozen dataclasses, by jsonargparse.

Flags are flat, abbreviations are off, and an unknown flag names the nearest one. An invalid value is one line on stderr
and exit status 2.

Left out: nested flags (`--train.seed`), registries of programs, and environment-variable defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.help import help_text
from lightrlhf.cli.lists import _join_lists, names

Args = TypeVar("Args")
KINDS = {"int": "a whole number", "float": "a finite number", "bool": "True or False"}
NOT_FLAGS = {"resume_from", "program", "versions", "git_commit", "initial", "given"}  # of args.json
ALIASES = {"--model_name_or_path": "--model_name"}


def parse(args_class: type[Args], argv: list[str] | None = None, description: str | None = None) -> Args:
    """Parse command-line flags (and ``--config file.yaml``) into the frozen dataclass `args_class`.

    With ``--resume_from DIR`` the arguments stored in ``DIR/args.json`` are the defaults. A flag of an older release is
    renamed or refused, as `args_class.RENAMED` and `args_class.REMOVED` say.
    Raises: SystemExit 2 with one line that names the flag, the value and the remedy.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True, add_print_completion_argument=True)
    flags = {f.name for f in dataclasses.fields(args_class)}

    class OneLineParser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:
            self.exit(2, f"{self.prog}: error: {_shorten(message, flags)}\n")

    words = [_expand_alias(word) for word in (sys.argv[1:] if argv is None else argv)]
    lists = [f for f in dataclasses.fields(args_class) if str(f.type).startswith("list")]
    words = _join_lists(words, {f"--{f.name}": f.metadata.get("split", names) for f in lists})
    doc = description or (args_class.__doc__ or "").strip().splitlines()[0]
    parser = OneLineParser(prog=_program_name(args_class), description=doc, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file of flags; flags given after it win.")
    parser.add_class_arguments(args_class)
    if {"--help", "-h", "--help_all"} & set(words):
        docs = {action.dest: action.help or "" for action in parser._actions}
        print(help_text(args_class, parser.prog, docs, "--help_all" in words), end="")
        parser.exit(0)
    try:
        refuse_old_flags(args_class, words)
        words = [_with_new_names(args_class, word, before) for before, word in zip(["", *words], words)]
        if "resume_from" in flags and (directory := _flag_value(words, "--resume_from")):
            parser.set_defaults(_stored_args(args_class, directory))
    except UsageError as problem:
        parser.error(str(problem))
    namespace = parser.parse_args(words)
    values = {name: getattr(namespace, name) for name in flags}
    try:
        return args_class(**values)
    except ValueError as error:
        parser.error(str(error))


# ----------------------------------------------------------------------------------------- flags of older releases
def refuse_old_flags(args_class: type, words: list[str]) -> None:
    """Raises: UsageError naming the successor of the first removed or renamed flag."""
    renamed, removed = getattr(args_class, "RENAMED", {}), getattr(args_class, "REMOVED", {})
    for flag in (word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")):
        if flag in renamed:
            raise UsageError(f"--{flag} is now --{renamed[flag]}")
        if flag in removed:
            raise UsageError(f"--{flag} was removed: {removed[flag][1]}")


def update_names(args_class: type, values: dict[str, Any], source: str) -> dict[str, Any]:
    """Stored flags under the names of today: a renamed one keeps its value, one removed must have its only value left.

    Raises: UsageError naming `source` and a flag that is unknown, or was removed and had another value.
    """
    renamed, removed = getattr(args_class, "RENAMED", {}), getattr(args_class, "REMOVED", {})
    known = {field.name for field in dataclasses.fields(args_class)}
    found = {}
    for name, value in values.items():
        if name in removed and name not in known:
            kept, successor = removed[name]
            if value != kept:
                raise UsageError(f"{source}: {name} {value} was removed: {successor}")
            continue
        name = renamed.get(name, name)
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            raise UsageError(f"{source}: unknown flag {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        found[name] = value
    return found


def _with_new_names(args_class: type, word: str, before: str) -> str:
    """A `--config` file with flags under old names as JSON with the new ones; any other word as it is."""
    import yaml

    flag, equals, value = word.partition("=")
    path = value if equals and flag == "--config" else word if before == "--config" else ""
    if not path or not Path(path).is_file():
        return word
    try:
        stored = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return word  # jsonargparse says what is wrong with it
    old = {*getattr(args_class, "RENAMED", {}), *getattr(args_class, "REMOVED", {})}
    if not isinstance(stored, dict) or not old & stored.keys():
        return word
    text = json.dumps(update_names(args_class, stored, f"--config {path}"))
    return f"{flag}={text}" if equals else text


def to_dict(args: Any) -> dict[str, Any]:
    """The fields of an args dataclass as plain values, ready for `args.json`."""
    return dataclasses.asdict(args)


def _program_name(args_class: type) -> str:
    script = Path(sys.argv[0]).name
    if script.startswith("lightrlhf-"):  # the console script; shell completion is printed for this name
        return script
    spec = getattr(sys.modules[args_class.__module__], "__spec__", None)
    if spec is None:
        return args_class.__module__
    is_package = spec.parent and find_spec(f"{spec.parent}.__main__") is not None  # started by its folder's name
    return f"python -m {spec.parent if is_package else spec.name}"


def _expand_alias(word: str) -> str:
    flag, equals, value = word.partition("=")
    return ALIASES.get(flag, flag) + equals + value


def _flag_value(words: list[str], flag: str) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _stored_args(args_class: type, directory: str) -> dict[str, Any]:
    path = Path(directory) / "args.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--resume_from {directory} is no experiment dir: it has no args.json") from None
    except (OSError, ValueError) as problem:
        raise UsageError(f"--resume_from {directory}: cannot read {path}: {problem}") from None
    if not isinstance(stored, dict):
        raise UsageError(f"--resume_from {directory}: {path} holds no arguments")
    values = {name: value for name, value in stored.items() if name not in NOT_FLAGS}
    return update_names(args_class, values, f"--resume_from {directory}")


def _shorten(message: str, flags: set[str]) -> str:
    """jsonargparse's message in one line that names the flag, with the nearest one for a typo."""
    line = " ".join(message.split())
    if "nrecognized arguments" in line:
        words = [word.partition("=")[0] for word in line.split("arguments:")[-1].split()]
        typo = next((word for word in words if word.startswith("-")), words[0] if words else "")
        nearest = difflib.get_close_matches(typo.lstrip("-"), sorted(flags), n=1, cutoff=0.5)
        return f"unknown flag {typo}" + (f"; did you mean --{nearest[0]}?" if nearest else "; --help lists all flags")
    if missing := re.search(r"arguments are required: (.+)", line):
        return " and ".join(f"--{name}" for name in missing[1].split(", ")) + " must be given"
    one_type, union = r"Expected an? (.+)\. Got value", r"Does not validate .*?Subtypes: \[(.+)\] Errors.*Given value"
    if wrong := re.search(rf'Parser key "(\w+)": (?:{one_type}|{union}): (.*)', line):
        flag, wanted, value = wrong[1], wrong[2] or wrong[3], wrong[4]
        choices = re.search(r"Literal\[(.+?)\]", wanted)
        kind = next((words for name, words in KINDS.items() if name in wanted), wanted)
        if re.search(r"\blist\b", wanted, re.IGNORECASE):
            if not value.startswith("["):
                return f"--{flag} {value} is not a list such as [{value}]"
            return f"--{flag} {value} has an item that is not {kind}"
        return f"--{flag} {value} is not " + ("one of " + choices[1].replace("'", "") if choices else kind)
    return line
