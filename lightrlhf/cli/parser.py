"""Parsing: command-line flags and `--config` files into frozen dataclasses, by jsonargparse.

Flags are flat, abbreviations are off, and an unknown flag names the nearest one. An invalid value is one line on stderr
and exit status 2.

Left out: nested flags (`--train.seed`), registries of programs, and environment-variable defaults.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.fields import Flag, declared_flags
from lightrlhf.cli.help import help_text
from lightrlhf.cli.lists import join_lists, names
from lightrlhf.cli.names import expand_alias, not_one_of
from lightrlhf.cli.stored_flags import FLOAT, LONG, WHOLE, check_flags, config_as_json, flags_of, hint
from lightrlhf.cli.values import options_of

Args = TypeVar("Args")
KINDS = {"int": "a whole number", "float": "a finite number", "bool": "True or False"}
SPELLINGS = {int: WHOLE, float: FLOAT, bool: re.compile(r"true|false|yes|no|on|off")}


def parse(args_class: type[Args], argv: list[str] | None = None) -> Args:
    """Parse command-line flags (and ``--config file.yaml``) into the frozen dataclass `args_class`.

    With ``--resume_from DIR`` the arguments stored in ``DIR/args.json`` are the defaults.
    Raises: SystemExit 2 with one line that names the flag, the value and the remedy.
    """
    typed = sys.argv[1:] if argv is None else argv
    if {"--help", "-h", "--help_all"} & set(typed):
        print(help_text(args_class, _program_name(args_class), "--help_all" in typed), end="")
        raise SystemExit(0)
    parser = _parser(args_class, reads_docs=any(word.startswith("--print_") for word in typed))
    flags = declared_flags(args_class)
    try:
        words = _words(args_class, typed)
        if "resume_from" in flags and (directory := _run_to_resume(words)):
            parser.set_defaults(_read_stored_args(args_class, directory))
    except UsageError as problem:
        parser.error(str(problem))
    namespace = parser.parse_args(words)
    values = {name: getattr(namespace, name) for name in flags}
    for name, one in flags.items():
        dropped = one.options.get("drops")
        if dropped and _flag_value(words, f"--{name}") is not None and _flag_value(words, f"--{dropped}") is None:
            values[dropped] = None
    try:
        return args_class(**values)
    except ValueError as problem:
        raise parser.error(str(problem)) from None  # which exits


def _parser(args_class: type, reads_docs: bool) -> Any:
    """A parser of jsonargparse whose errors are one line; reads_docs: sentences of flags, which takes half a second."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    class OneLineParser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            self.exit(2, f"{self.prog}: error: {_shorten(message, declared_flags(args_class))}\n")
            raise SystemExit(2)

    set_parsing_settings(docstring_parse_attribute_docstrings=reads_docs, add_print_completion_argument=False)
    parser = OneLineParser(prog=_program_name(args_class), allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file of flags; flags given after it win.")
    parser.add_class_arguments(args_class)
    return parser


def _words(args_class: type, typed: list[str]) -> list[str]:
    """The words of a command as jsonargparse takes them. Raises: UsageError for a file or a number of two meanings."""
    flags = declared_flags(args_class)
    first = next((name for name, one in flags.items() if one.options.get("positional")), None)
    if first and typed and not typed[0].startswith("-"):
        typed = [f"--{first}={typed[0]}", *typed[1:]]
    words = with_bare_booleans(args_class, [_expand_alias(word, flags) for word in typed])
    lists = {name: one for name, one in flags.items() if any(get_origin(kind) is list for kind in options_of(one.hint))}
    words = join_lists(words, {f"--{name}": one.options.get("split", names) for name, one in lists.items()})
    words = [config_as_json(args_class, word, before) for before, word in zip(["", *words], words)]
    check_spelling(args_class, words)
    return words


def with_bare_booleans(args_class: type, words: list[str]) -> list[str]:
    """The words with `True` after each flag of a boolean that no value follows."""
    flags = declared_flags(args_class)
    full = []
    for word, after in zip(words, [*words[1:], "--"]):
        is_flag = word.startswith("--") and "=" not in word
        full += [word, "True"] if is_flag and after.startswith("--") and _is_bool(flags.get(word[2:])) else [word]
    return full


def _is_bool(flag: Flag | None) -> bool:
    return flag is not None and bool in options_of(flag.hint)


def check_spelling(args_class: type, words: list[str]) -> None:
    """Raises: UsageError for a number that YAML or Python would read differently.

    010 is eight, 0x10 sixteen, 1:30 ninety and 1_000 a thousand to one of them; no flag means it so.
    """
    flags = declared_flags(args_class)
    for before, word in zip(["", *words], words):
        flag, equals, value = word.partition("=")
        if not equals:
            flag, value = (before, word) if not word.startswith("--") else ("", "")
        one = flags.get(flag.removeprefix("--")) if flag.startswith("--") else None
        options = options_of(one.hint) if one else ()
        kinds = [option for option in options if option is not NoneType]
        spelling = SPELLINGS.get(kinds[0]) if len(kinds) == 1 else None
        empty = value.lower() in ("null", "none") and NoneType in options
        if spelling is not None and not empty and not spelling.fullmatch(value.strip().lower()):
            raise UsageError(f"{flag} {value if value.strip() else repr(value)} is not {KINDS[kinds[0].__name__]}")
        if spelling is FLOAT and LONG.match(value.strip()):
            raise UsageError(f"{flag} {value} has too many digits to be read exactly; write it as in 1e30")


def to_dict(args: Any) -> dict[str, Any]:
    """The fields of an args dataclass as plain values, ready for `args.json`."""
    return dataclasses.asdict(args)


def _program_name(args_class: type) -> str:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name == "lightrlhf" or (main and main.name == "lightrlhf.__main__"):
        return f"lightrlhf {_module_name(args_class).split('.')[1]}"
    spec = getattr(sys.modules[args_class.__module__], "__spec__", None)
    name = _module_name(args_class)
    if spec is None:
        return name
    folder = spec.parent or ""
    is_package = "." in folder and find_spec(f"{folder}.__main__") is not None  # started by its folder's name
    return f"python -m {folder if is_package else name}"


def _module_name(args_class: type) -> str:
    """The module of a program, also when it runs as `__main__`."""
    spec = getattr(sys.modules[args_class.__module__], "__spec__", None)
    return spec.name if spec else args_class.__module__


def _expand_alias(word: str, flags: Container[str]) -> str:
    flag, equals, value = word.partition("=")
    return expand_alias(flag, flags) + equals + value


def _flag_value(words: list[str], flag: str) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _run_to_resume(words: list[str]) -> str | None:
    """The last value of `--resume_from`, typed or in the file of a `--config`."""
    found: str | None = None
    for before, word in zip(["", *words], words):
        flag, equals, value = word.partition("=")
        flag, value = (flag, value) if equals and word.startswith("--") else (before, word)
        if flag == "--resume_from":
            found = value
        elif flag == "--config":
            with suppress(ValueError):  # arguments in the word itself may be YAML
                found = json.loads(value).get("resume_from") or found
    return found


def _read_stored_args(args_class: type, directory: str) -> dict[str, Any]:
    path = Path(directory) / "args.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        above = path.parent.parent
        hint = f"; did you mean {above}?" if (above / "args.json").is_file() else ""
        wrong = "is not an experiment dir: it has no args.json" if path.parent.exists() else "does not exist"
        raise UsageError(f"--resume_from {directory} {wrong}{hint}") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"--resume_from {directory}: cannot read {path}: {first_line(problem)}") from None
    if not isinstance(stored, dict):
        raise UsageError(f"--resume_from {directory}: {path} contains no arguments")
    if given := stored.get("given"):
        raise UsageError(
            f"--resume_from {directory} was started from Python with custom {', '.join(given)}; "
            "resume it from Python with the same objects"
        )
    program = _module_name(args_class).rpartition(".")[2]
    if (before := stored.get("program", program)) != program:
        raise UsageError(f"--resume_from {directory} is a run of {before}, not of {program}")
    once = {name for name, one in declared_flags(args_class).items() if one.options.get("once")}
    values = {name: value for name, value in flags_of(stored).items() if name not in once}
    return check_flags(args_class, values, f"--resume_from {directory}")


def _shorten(message: str, flags: Mapping[str, Flag]) -> str:
    """jsonargparse's message in one line that names the flag, with the nearest one for a typo."""
    line = " ".join(message.split())
    if "nrecognized arguments" in line:
        words = [word.partition("=")[0] for word in line.split("arguments:")[-1].split()]
        typo = next((word for word in words if word.startswith("-")), words[0] if words else "")
        name = typo.lstrip("-").replace("-", "_")
        return f"unknown flag {typo}{hint(name, set(flags)) or '; --help_all lists all'}"
    if missing := re.search(r"arguments are required: (.+)", line):
        absent = missing[1].split(", ")
        listed = {name: get_args(flags[name].hint) for name in absent if get_origin(flags[name].hint) is Literal}
        told = "".join(f"; --{name} is one of {', '.join(map(str, known))}" for name, known in listed.items())
        return " and ".join(f"--{name}" for name in absent) + " must be given" + told
    one_type, union = r"Expected an? (.+)\. Got value", r"Does not validate .*?Subtypes: \[(.+)\] Errors.*Given value"
    if wrong := re.search(rf'Parser key "(\w+)": (?:{one_type}|{union}): ?(.*)', line):
        flag, wanted, value = wrong[1], wrong[2] or wrong[3], wrong[4] or "''"
        choices = re.search(r"Literal\[(.+?)\]", wanted)
        kind = next((words for name, words in KINDS.items() if name in wanted), wanted)
        if re.search(r"\blist\b", wanted, re.IGNORECASE):
            if not value.startswith("["):
                return f"--{flag} {value} is not a list such as [{value}]"
            return f"--{flag} {value} has an item that is not {kind}"
        return not_one_of(flag, value, choices[1].replace("'", "")) if choices else f"--{flag} {value} is not {kind}"
    return line
