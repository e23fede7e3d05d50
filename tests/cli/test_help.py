"""`--help` fits on a screen or two, and stored flags that a program does not have are refused by name."""

import dataclasses
import json
import subprocess
import sys
import types
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from helpers import environment, run_program
from helpers.errors import refused
from helpers.programs import args_classes

from lightrlhf.cli.fields import declared_flags
from lightrlhf.cli.parser import parse

CLASSES = args_classes()


@pytest.mark.parametrize("program, most", [("sft", 60), ("ppo", 120)])
def test_help_is_short(program, most, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = run_program(f"lightrlhf.{program}", "--help").stdout.splitlines()
    assert len(lines) <= most and max(map(len, lines)) <= 100


FLAGS = {"ppo": (126, 31), "grpo": (125, 31)}  # at most, 13 of them of teachers, up to 15 of agents; in `--help`
MOST = (98, 40)  # of any other program


@pytest.mark.parametrize("program", CLASSES)
def test_a_program_has_few_flags_and_shows_fewer(program):
    flags = declared_flags(CLASSES[program]).values()
    shown = [one.name for one in flags if one.options.get("show") != "rarely"]
    most, most_shown = FLAGS.get(program.rpartition(".")[2], MOST)
    assert len(flags) <= most and len(shown) <= most_shown, shown


def test_help_loads_nothing_but_the_program():
    """Which takes little longer than torch; the parser would import what annotations name."""
    code = "import sys; from lightrlhf import reflect_rl; before = set(sys.modules)\n"
    code += "try: reflect_rl.main(['--help_all'])\n"
    code += "except SystemExit: print({'transformers', 'jsonargparse', 'gymnasium'} & {*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()" and "--gae_lambd" in done.stdout


# --------------------------------------------------------------------------------------------------- stored flags
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


@pytest.mark.parametrize("program, kind", [(program, kind) for program in CLASSES for kind in stores(program)])
def test_a_stored_unknown_flag_is_refused_by_name(program, kind, unchecked, tmp_path, capsys):
    owner = CLASSES[program]
    words = stored(kind, owner, {"no_such_flag": 1}, tmp_path)
    assert "no_such_flag" in refused(capsys, partial(parse, owner), *words)


def test_the_args_of_another_program_are_refused_by_its_name(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"program": "dpo", "beta": 0.1}))
    done = run_program("lightrlhf.ppo", "--resume_from", tmp_path, check=False)
    assert done.returncode == 2 and "is a run of dpo, not of ppo" in done.stderr
