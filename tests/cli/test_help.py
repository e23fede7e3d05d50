"""`--help` fits on a screen or two, and flags of older releases are answered with their successors."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from helpers import run_program
from helpers.programs import args_classes

from lightrlhf.cli.parser import parse, to_dict

CLASSES = args_classes()
RENAMED = [(program, old) for program, owner in CLASSES.items() for old in getattr(owner, "RENAMED", {})]
REMOVED = [(program, old) for program, owner in CLASSES.items() for old in getattr(owner, "REMOVED", {})]
ALL_FLAGS = {field.name for owner in CLASSES.values() for field in dataclasses.fields(owner)}


@pytest.mark.parametrize("program, most", [("sft", 60), ("ppo", 120)])
def test_help_is_short(program, most, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = run_program(f"lightrlhf.{program}", "--help").stdout.splitlines()
    assert len(lines) <= most and max(map(len, lines)) <= 100


# ----------------------------------------------------------------------------------------- flags of older releases
@pytest.fixture
def unchecked(monkeypatch):
    """Let args be made of any values: what goes together is not the subject here."""
    for owner in CLASSES.values():
        monkeypatch.setattr(owner, "__post_init__", lambda self: None)


def other_value(owner: type, name: str) -> Any:
    """A value of the field's type that is not its default."""
    hint = get_type_hints(owner)[name]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    default = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != default)
    if get_origin(hint) is list:
        return [{int: 7, float: 0.625, str: "word"}[get_args(hint)[0]]]
    return {bool: default is not True, int: 7, float: 0.625, str: "word"}[hint]


def required(owner: type) -> list[str]:
    """Flags without a default, with values."""
    missing = dataclasses.MISSING
    names = [f.name for f in dataclasses.fields(owner) if f.default is missing and f.default_factory is missing]
    return [f"--{name}={other_value(owner, name)}" for name in names]


def stores(program: str) -> list[str]:
    """Where a program reads stored flags: a `--config` file, and the args.json of a run that it can resume."""
    return ["config", *(["run"] if "resume_from" in {f.name for f in dataclasses.fields(CLASSES[program])} else [])]


def stored(kind: str, owner: type, values: dict, tmp_path) -> list[str]:
    """Flags that read these values from a `--config` file or from the args.json of a run."""
    if kind == "config":
        (tmp_path / "flags.yaml").write_text(yaml.safe_dump(values))
        return ["--config", str(tmp_path / "flags.yaml"), *required(owner)]
    (tmp_path / "args.json").write_text(json.dumps({**values, "versions": {}, "git_commit": "0"}))
    return ["--resume_from", str(tmp_path), *required(owner)]


def changed(owner: type, args) -> set[str]:
    """Names of the fields that are not as without any stored value."""
    plain = to_dict(parse(owner, required(owner)))
    return {name for name, value in to_dict(args).items() if value != plain[name]}


def refused(owner: type, words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(owner, words)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    return error


@pytest.mark.parametrize("program", CLASSES)
def test_old_flags_of_a_base_are_answered_too(program):
    """Unless it has them as flags; a class variable of the same name would hide the base's."""
    owner = CLASSES[program]
    answered = {field.name for field in dataclasses.fields(owner)}
    answered |= {*getattr(owner, "RENAMED", {}), *getattr(owner, "REMOVED", {})}
    for base in owner.__mro__[1:]:
        assert {*getattr(base, "RENAMED", {}), *getattr(base, "REMOVED", {})} <= answered, base


@pytest.mark.parametrize("program, old", RENAMED)
def test_a_renamed_flag_is_answered_with_its_new_name(program, old, capsys):
    owner, new = CLASSES[program], CLASSES[program].RENAMED[old]
    fields = {field.name for field in dataclasses.fields(owner)}
    assert new in fields and old not in fields
    for words in ([f"--{old}", "1"], [f"--{old}=1"]):
        error = refused(owner, words, capsys)
        assert f"--{old} " in error and f"--{new}\n" in error


@pytest.mark.parametrize("program, old", REMOVED)
def test_a_removed_flag_is_answered_with_what_to_do_instead(program, old, capsys):
    owner = CLASSES[program]
    advice = owner.REMOVED[old][1]
    assert old not in {field.name for field in dataclasses.fields(owner)}
    assert set(re.findall(r"--(\w+)", advice)) <= ALL_FLAGS, "the successor is no flag"
    error = refused(owner, [f"--{old}", "1"], capsys)
    assert f"--{old} " in error and advice in error


@pytest.mark.parametrize("program, old, kind", [(*case, kind) for case in RENAMED for kind in stores(case[0])])
def test_a_stored_renamed_flag_keeps_its_value(program, old, kind, unchecked, tmp_path):
    owner, new = CLASSES[program], CLASSES[program].RENAMED[old]
    value = other_value(owner, new)
    args = parse(owner, stored(kind, owner, {old: value}, tmp_path))
    assert getattr(args, new) == value
    assert changed(owner, args) <= {new, "resume_from"}


@pytest.mark.parametrize("program, old, kind", [(*case, kind) for case in REMOVED for kind in stores(case[0])])
def test_a_stored_removed_flag_must_have_the_value_that_is_left(program, old, kind, unchecked, tmp_path, capsys):
    owner = CLASSES[program]
    kept, advice = owner.REMOVED[old]
    args = parse(owner, stored(kind, owner, {old: "anything" if kept is ... else kept}, tmp_path))
    assert changed(owner, args) <= {"resume_from"}
    if kept is ...:
        return
    error = refused(owner, stored(kind, owner, {old: f"not {kept}"}, tmp_path), capsys)
    assert old in error and f"not {kept}" in error and advice in error


@pytest.mark.parametrize("program, kind", [(program, kind) for program in CLASSES for kind in stores(program)])
def test_a_stored_unknown_flag_is_refused_by_name(program, kind, unchecked, tmp_path, capsys):
    assert "no_such_flag" in refused(
        CLASSES[program], stored(kind, CLASSES[program], {"no_such_flag": 1}, tmp_path), capsys
    )


def test_a_stored_removed_flag_is_named_in_a_program_of_its_own_too(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"program": "ppo", "macro_ratio": "segment"}))
    done = run_program("lightrlhf.ppo", "--resume_from", tmp_path, check=False)
    assert done.returncode == 2 and "macro_ratio segment was removed" in done.stderr
    (tmp_path / "args.json").write_text(json.dumps({"program": "dpo", "beta": 0.1}))
    done = run_program("lightrlhf.ppo", "--resume_from", tmp_path, check=False)
    assert done.returncode == 2 and "is a run of dpo, not of ppo" in done.stderr
