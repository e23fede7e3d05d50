"""Each rule that a field declares is kept by each class that has the field."""

import dataclasses
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import pytest
from helpers import ROOT
from helpers.errors import error_naming
from helpers.programs import args_classes

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import (
    MISSING,
    Args,
    Bounds,
    Flag,
    above,
    at_least,
    check_args,
    declared_flags,
    flag,
    positive,
)
from lightrlhf.cli.values import options_of
from lightrlhf.programs import PROGRAMS

PACKAGES = ("datasets_prep", "examples", "benchmarks")
WITHOUT_BOUNDS = {  # numbers that may be any
    "reward_weights",
    "pass_threshold",
    "curriculum_score",
    "sibling_score",
    "penalty_reward_value",
    "level",
    "min_reward",
}


def classes() -> dict[str, type[Args]]:
    """All classes of arguments by name: of programs, data preparation, examples and benchmarks."""
    found: dict[str, Any] = {program: owner for program, owner in args_classes().items()}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "Args(" in path.read_text() and not path.name.startswith("test_"):
                module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                own = {one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__}
                found |= {f"{package}.{one.__name__}": one for one in own if dataclasses.is_dataclass(one)}
    return {name: owner for name, owner in found.items() if name.endswith("Args") or name in args_classes()}


CLASSES = classes()


def with_values(owner: type[Args], **values: Any) -> Args:
    """Arguments whose fields have their defaults, some text or number without one, and these values; not checked."""
    args = object.__new__(owner)
    for one in declared_flags(owner).values():
        unset = [] if get_origin(one.hint) is list else example(one)
        object.__setattr__(args, one.name, unset if one.default is MISSING else one.default)
    for name, value in values.items():
        object.__setattr__(args, name, value)
    return args


def kind_of(one: Flag) -> Any:
    """The type of a flag's value, of a list the type of its items."""
    kind = next(kind for kind in options_of(one.hint) if kind is not type(None))
    return get_args(kind)[0] if get_origin(kind) is list else kind


def example(one: Flag) -> Any:
    """A value of a flag's type."""
    kind = kind_of(one)
    return get_args(kind)[0] if get_origin(kind) is Literal else {int: 1, float: 0.5, bool: True, str: "text"}[kind]


def as_value(one: Flag, item: Any) -> Any:
    """An item as the value of a flag, which may be a list."""
    return [item] if any(get_origin(kind) is list for kind in options_of(one.hint)) else item


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_arguments_leaves_its_checks_to_the_base(name):
    owner = CLASSES[name]
    assert issubclass(owner, Args)
    assert all("__post_init__" not in vars(base) for base in owner.__mro__ if base is not Args)


def edges(one: Flag) -> dict[float, bool]:
    """Numbers at the bounds of a flag and just outside, and whether it allows them."""
    bounds, step = one.bounds, 1 if kind_of(one) is int else 2**-10
    found = {bounds.least: True, bounds.most: True, bounds.above: False, bounds.below: False}
    low = bounds.above if bounds.least is None else bounds.least
    high = bounds.below if bounds.most is None else bounds.most
    found |= {low - step: False} if low is not None else {}
    found |= {high + step: False} if high is not None else {}
    return {edge: allowed for edge, allowed in found.items() if edge is not None}


@pytest.mark.parametrize("name", CLASSES)
def test_a_number_out_of_its_bounds_is_refused_by_flag_and_value(name):
    for one in declared_flags(CLASSES[name]).values():
        for edge, allowed in edges(one).items():
            value = as_value(one, kind_of(one)(edge))
            if allowed and "check" not in one.options:
                one.check(value)
            elif not allowed:
                with error_naming(ValueError, f"--{one.name} {kind_of(one)(edge)}"):
                    one.check(value)


@pytest.mark.parametrize("name", CLASSES)
def test_each_number_has_bounds(name):
    numbers = [one for one in declared_flags(CLASSES[name]).values() if kind_of(one) in (int, float)]
    free = {one.name for one in numbers if one.bounds == Bounds() and "choices" not in one.options}
    assert free <= WITHOUT_BOUNDS, "give them a range, or list them above"


def others(one: Flag) -> Iterator[tuple[str, Any, bool]]:
    """Other flags that a flag needs or excludes: their names, values, and whether they are needed."""
    needs = one.options.get("needs", {})
    for name, wanted in ({needs: ...} if isinstance(needs, str) else needs).items():
        yield name, wanted, True
    for name, unwanted in one.options.get("excludes", {}).items():
        yield name, unwanted, False


def other_value(one: Flag, values: Any) -> Any:
    """A value of a flag's type that is none of these."""
    kind = kind_of(one)
    choices = {bool: (True, False), str: ("a", "b"), int: (1, 2, 3), float: (0.25, 0.5, 0.125)}
    candidates = get_args(kind) if get_origin(kind) is Literal else choices[kind]
    return as_value(one, next(item for item in candidates if item not in values))


def as_tuple(values: Any) -> tuple[Any, ...]:
    """One value, or several."""
    return (values,) if isinstance(values, str) or not isinstance(values, Collection) else tuple(values)


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_flag_needs_or_excludes_is_held(name):
    flags = declared_flags(CLASSES[name])
    for one in flags.values():
        for other, meant, is_needed in others(one):
            if other not in flags:
                continue
            when = one.options.get("when")
            own = other_value(one, (one.default,)) if when is None else next(iter(as_tuple(when)))
            if meant is ...:
                wrong = flags[other].default if is_needed else other_value(flags[other], (flags[other].default,))
            else:
                wrong = other_value(flags[other], as_tuple(meant)) if is_needed else next(iter(as_tuple(meant)))
            values = vars(with_values(CLASSES[name], **{one.name: own, other: wrong}))
            with pytest.raises(ValueError, match=f"--{one.name} .* (needs|excludes) --"):
                one.check_others(own, values, flags)


def test_each_flag_that_another_names_exists():
    known = {name for owner in CLASSES.values() for name in declared_flags(owner)}
    for owner in CLASSES.values():
        for one in declared_flags(owner).values():
            assert {name for name, _, _ in others(one)} <= known, one.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseArgs(Args):
    """A group of flags."""

    loss: Literal["clip", "cispo"] = "clip"
    """Loss."""
    bound: float | None = above(1, None, remedy="3 is usual", needs={"loss": "clip"}, show="rarely")
    """Bound."""
    sizes: list[int] = at_least(1, [], unique=True)
    """Sizes."""

    def _check(self) -> None:
        if self.loss == "cispo" and self.sizes:
            raise ValueError(f"--sizes {self.sizes} of the group")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramArgs(BaseArgs):
    """A program with a group, of which it changes a default and a rule."""

    bound: float | None = flag(2.0, excludes={"rate": ...})
    """Bound."""
    rate: float = positive(1.0)
    """Rate."""

    def _check(self) -> None:
        if self.rate > 100:
            raise ValueError(f"--rate {self.rate} of the program")


@pytest.mark.parametrize(
    "values, told",
    [
        ({"bound": 1.0}, "--bound 1.0 must be above 1; 3 is usual"),
        ({"bound": 4.0, "loss": "cispo"}, "--bound 4.0 needs --loss clip, not cispo"),
        ({"bound": 4.0, "rate": 2.0}, "--bound 4.0 excludes --rate 2.0; leave one of them out"),
        ({"sizes": [2, 0]}, "--sizes 0 must be at least 1"),
        ({"sizes": [2, 2]}, "--sizes 2 is given twice; give it once"),
        ({"sizes": 2}, "--sizes 2 is not a list"),
        ({"sizes": [1], "loss": "cispo"}, "--sizes [1] of the group"),
        ({"rate": 101.0}, "--rate 101.0 of the program"),
        ({"rate": float("nan")}, "--rate nan must be a finite number"),
        ({"rate": True}, "--rate True is not a finite number"),
        ({"loss": "ppo"}, "--loss ppo is not one of clip, cispo"),
    ],
)
def test_rules_of_groups_hold_in_a_program_that_declares_a_flag_again(values, told):
    with pytest.raises(ValueError) as problem:
        ProgramArgs(**values)
    assert str(problem.value) == told
    assert ProgramArgs(loss="cispo", rate=3.0).bound == 2.0  # its default needs nothing and excludes nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceArgs(Args):
    """A group of which one flag, or an object, is required."""

    folder: str | None = flag(None, required="rows")
    """Folder."""
    file: str | None = flag(None, required="rows")
    """File."""

    def _check_given(self, given: Mapping[str, object]) -> None:
        if self.file == "missing":
            raise UsageError("--file missing is not there")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderArgs(SourceArgs):
    """A program with that group and a rule of its own."""

    def _check_given(self, given: Mapping[str, object]) -> None:
        if given.get("rows") and self.folder:
            raise UsageError(f"--folder {self.folder} contradicts rows")


@pytest.mark.parametrize(
    "values, given, named",
    [
        ({}, None, "--folder or --file"),
        ({}, {"rows": None}, "--folder or --file"),
        ({"file": "missing"}, None, "--file missing"),  # the group's rule holds in the program, too
        ({"folder": "here"}, {"rows": [1]}, "--folder here"),
    ],
)
def test_what_a_program_is_called_with_is_checked_as_it_begins(values, given, named):
    with error_naming(UsageError, named):
        check_args(ReaderArgs(**values), ReaderArgs, given)
    check_args(ReaderArgs(folder="here"), ReaderArgs)
    check_args(ReaderArgs(), ReaderArgs, {"rows": [1]})


@pytest.mark.parametrize("one", [one for one in PROGRAMS.values() if one.name != "demo"], ids=lambda one: one.name)
def test_each_program_begins_with_the_check_of_its_arguments(one):
    """By `check_args` or `begin` with its own class, so that no rule of a group can be forgotten."""
    text = (ROOT / one.module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert re.search(rf"\b(check_args|begin)\(\s*args,\s*{one.args}\b", text)
