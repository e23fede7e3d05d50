"""Files of `lightrlhf sweep`: a program, its fixed flags, and the values and seeds to run it with.

    program: sft
    flags: {data_dir: data/cafe/tiny, model_name: tiny}
    grid:                              # every combination of these values
      learning_rate: [1.0e-4, 5.0e-4]
    seeds: [1, 2, 3]
    metric: val/loss                   # as `--keep_best` takes it: min:NAME or max:NAME where the name does not say

Every combination is read by the parser of its program, so the file is refused as the command line would be.

Left out: values that are drawn or depend on the results of others (howto/python.md has a study by optuna), and flags
that depend on each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups.evaluation import best_metric
from lightrlhf.cli.names import expand_alias
from lightrlhf.cli.parser import parse
from lightrlhf.cli.stored_flags import nearest, read_config
from lightrlhf.programs import TRAINING

REQUIRED = {"program": "program: sft", "seeds": "seeds: [1, 2, 3]", "metric": "metric: val/loss"}
KEYS = {*REQUIRED, "flags", "grid"}
OF_THE_SWEEP = {  # flags that a file does not set, and why
    "seed": "give seeds",
    "output_dir": "each run has its own folder in the sweep's",
    "resume_from": "the sweep itself resumes its runs",
    "dry_run": "a dry run has no metric to compare",
    "push_to_hub": "each run would replace the one before; upload the one you choose",
    **dict.fromkeys(("help", "help_all", "print_config"), "it trains nothing"),
}
MOST = 1000  # combinations
LONGEST = 100  # characters of a folder's name


class Combination(NamedTuple):
    """Values of the swept flags, as the program reads them; name: of its folder; args: with the first seed."""

    name: str
    values: dict[str, Any]
    args: Any


class Sweep(NamedTuple):
    """A sweep file, every combination and seed of which is valid."""

    program: str
    metric: str
    lower_is_better: bool
    combinations: list[Combination]
    seeds: list[int]


def read_sweep(path: str) -> Sweep:
    """Read a sweep file.

    Raises: UsageError, one line with the file and the key, for what the program would refuse, values given twice, and
        flags that the sweep sets itself.
    """
    stored = read_config(path, "--sweep_file")
    try:
        return _read(stored)
    except (UsageError, ValueError) as problem:
        raise UsageError(f"--sweep_file {path}: {problem}") from None


def parse_words(args_class: Any, words: list[str]) -> Any:
    """The args dataclass of the words of a command line. Raises: UsageError, as the program's parser words it."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return parse(args_class, words)
    except SystemExit:
        raise UsageError(told.getvalue().partition("error: ")[2].strip()) from None


def non_default_words(args: Any) -> list[str]:
    """The words of a command line that gives an args dataclass: its flags that are not at their defaults."""
    words = []
    for one in dataclasses.fields(args):
        factory, value = one.default_factory, getattr(args, one.name)
        if value != (one.default if factory is dataclasses.MISSING else factory()):
            words.append(_word(one.name, value))
    return words


# ------------------------------------------------------------------------------------------------------------- the file
def _read(stored: Mapping[str, Any]) -> Sweep:
    for name in stored:
        if name not in KEYS:
            meant = nearest(name, KEYS)
            raise ValueError(f"unknown key {name}; " + (f"did you mean {meant}?" if meant else "flags belong to flags"))
    for name, example in REQUIRED.items():
        if stored.get(name) in (None, "", []):
            raise ValueError(f"{name} is missing; give it as in `{example}`")
    program, metric = str(stored["program"]).replace("-", "_"), str(stored["metric"])
    if program not in TRAINING:
        close = difflib.get_close_matches(program, TRAINING, n=1)
        known = f"did you mean {close[0]}?" if close else f"training programs: {', '.join(TRAINING)}"
        raise ValueError(f"program {program} is not a training program; {known}")
    try:
        metric, lower_is_better = best_metric(metric)
    except ValueError:
        raise ValueError(f"metric {metric}: say which value is better, min:{metric} or max:{metric}") from None
    args_class, seeds = TRAINING[program].args_class(), _seeds(stored["seeds"])
    fixed, swept = _flags(stored)
    first, *others = seeds
    found: dict[tuple[str, ...], Combination] = {}  # by all flags
    for values in _grid(swept):
        words = [_word(name, value) for name, value in {**fixed, **values, "seed": first}.items()]
        args = parse_words(args_class, words)
        read = {name: getattr(args, name) for name in values}
        one, flags = Combination(_folder(read) or program, read, args), tuple(non_default_words(args))
        if flags in found:
            raise ValueError(f"{one.name} is given twice, perhaps in two spellings; remove one")
        found[flags] = one
    for seed in others:
        dataclasses.replace(one.args, seed=seed)  # raises ValueError
    return Sweep(program, metric, lower_is_better, list(found.values()), seeds)


def _seeds(given: Any) -> list[int]:
    if not isinstance(given, list):
        raise ValueError(f"seeds {given} is not a list such as [1, 2, 3]")
    for seed in given:
        if type(seed) is not int:
            raise ValueError(f"seeds: {seed!r} is not a whole number")
    if twice := [seed for place, seed in enumerate(given) if seed in given[:place]]:
        raise ValueError(f"seeds: {twice[0]} is given twice; remove one")
    return given


def _flags(stored: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fixed flags, `config` first so that the others win, and the flags of `grid` with their values."""
    for key in ("flags", "grid"):
        if not isinstance(stored.get(key, {}), dict):
            raise ValueError(f"{key} {stored[key]} is not a mapping of flags such as `learning_rate: …`")
        for name in stored.get(key, {}):
            if name in OF_THE_SWEEP:
                raise ValueError(f"{key}: {name} cannot be set in a sweep file: {OF_THE_SWEEP[name]}")
    given = stored.get("flags", {}), stored.get("grid", {})
    fixed, swept = ({_own_name(name): value for name, value in flags.items()} for flags in given)
    if "grid" in stored and not swept:
        raise ValueError("grid is empty; list flags to vary, or remove it")
    if "config" in swept:
        raise ValueError("config cannot be in grid; put it into flags")
    if both := sorted(fixed.keys() & swept.keys()):
        raise ValueError(f"{both[0]} is in both flags and grid; remove it from flags")
    return {name: fixed[name] for name in sorted(fixed, key=lambda name: name != "config")}, swept


def _own_name(flag: Any) -> str:
    """The name of a flag that has an alias; any other as it is."""
    return expand_alias(f"--{flag}", ("model_name", "log_dir")).removeprefix("--")  # in a program that trains


def _grid(swept: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All combinations; a single empty one where only seeds vary."""
    for name, values in swept.items():
        if not isinstance(values, list):
            raise ValueError(f"grid: {name} {values} is not a list such as [{values}]; put fixed values into flags")
        if not values:
            raise ValueError(f"grid: {name} has no values")
    if (count := math.prod(map(len, swept.values()))) > MOST:
        raise ValueError(f"grid has {count:,} combinations, more than {MOST:,}; remove some values")
    return (dict(zip(swept, values)) for values in itertools.product(*swept.values()))


# --------------------------------------------------------------------------------------------------------------- words
def text_of(value: Any) -> str:
    """A value as the command line spells it. Raises: ValueError for a mapping."""
    if isinstance(value, dict):
        raise ValueError(f"{value} is not a valid flag value")
    return "null" if value is None else json.dumps(value) if isinstance(value, list | tuple) else str(value)


def _word(name: str, value: Any) -> str:
    return f"--{name}={text_of(value)}"


def _folder(values: Mapping[str, Any]) -> str:
    """Folder name from the values of the swept flags, with a hash where it cannot show them in full."""
    exact = "+".join(f"{name}={text_of(value)}" for name, value in values.items())
    name = re.sub(r"[^\w.+=-]+", "-", exact)[:LONGEST]
    return name if name == exact else f"{name}-{hashlib.sha256(exact.encode()).hexdigest()[:6]}"
