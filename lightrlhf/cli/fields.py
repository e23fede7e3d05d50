"""Flags that check themselves: a flag's field declares its range, the flags it needs and those it excludes.

`Args` is the base of all argument classes. It checks the type and the rules of each field, and then calls `_check` of
each class that has one, bases first: the rules between several flags. A class that gives an inherited flag another
default keeps the flag's rules. `check_args`, with which every program begins, calls `_check_given` in the same way: the
rules about objects that are given from Python, and about what flags name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, get_type_hints

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.packages import check_package
from lightrlhf.cli.values import convert

T = TypeVar("T")
REQUIRED: Any = MISSING  # default of a flag that must be given


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a number."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def allow(self, number: Any) -> bool:
        """Whether a number lies in the range."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """The range in words, such as `be at least 1`."""
        low = f"[{self.least}" if self.above is None else f"({self.above}"
        high = f"{self.most}]" if self.below is None else f"{self.below})"
        if self.most is None and self.below is None:
            return f"be at least {self.least}" if self.above is None else f"be above {self.above}"
        return f"lie in {low}, {high}"


class Options(TypedDict, total=False):
    """Rules of a flag. In a list, bounds, `choices` and `check` are about each item."""

    remedy: str  # end of the message about a bound
    choices: Collection[Any]  # the only values
    unique: bool  # no item of the list twice
    check: Callable[[Any, str], object]  # called with a value that is not None, and `--name`
    packages: Mapping[Any, str]  # the package that a value needs
    when: Any  # the value or values to which `needs` and `excludes` apply; default: any non-default value
    needs: str | Mapping[str, Any]  # another flag that must be given, or values of others; `...`: any but the default
    excludes: Mapping[str, Any]  # values of other flags, each one or several; `...`: any but the default
    split: Callable[[str], list[str]]  # items in a word of a list, see `cli.lists`
    show: Literal["first", "rarely"]  # `--help` shows the flag first, or leaves it to `--help_all`
    required: str | None  # one of the flags with this text is required, or from Python the object of this name
    positional: bool  # may be given as the first, positional word
    once: bool  # a resumed run does not inherit it
    drops: str  # on the command line it replaces this stored flag


def flag(default: T = REQUIRED, bounds: Bounds | None = None, **options: Unpack[Options]) -> T:
    """A field with rules; without a default the flag must be given."""
    rules = {**options, **({"bounds": bounds} if bounds else {})}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: cast(Any, list(default)), metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


def positive(default: T, **options: Unpack[Options]) -> T:
    """A number above 0."""
    return flag(default, Bounds(above=0), **options)


def at_least(least: float, default: T, below: float | None = None, **options: Unpack[Options]) -> T:
    """A number of at least `least`, or in [least, below)."""
    return flag(default, Bounds(least=least, below=below), **options)


def above(
    bound: float, default: T, most: float | None = None, below: float | None = None, **options: Unpack[Options]
) -> T:
    """A number above `bound`, or in (bound, most], or in (bound, below)."""
    return flag(default, Bounds(above=bound, most=most, below=below), **options)


def between(least: float, most: float, default: T, **options: Unpack[Options]) -> T:
    """A number in [least, most]."""
    return flag(default, Bounds(least=least, most=most), **options)


def random_seed(default: T, **options: Unpack[Options]) -> T:
    """A seed of 32 bits, as numpy takes it."""
    return flag(default, Bounds(least=0, below=2**32), **options)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Base of all argument classes."""

    def __init_subclass__(cls) -> None:
        """Resolve annotations here: jsonargparse looks up their names in the program's module alone."""
        hints = get_type_hints(cls)
        cls.__annotations__ = {name: hints[name] for name in vars(cls).get("__annotations__", {})}

    def __post_init__(self) -> None:
        check_fields(self)
        self._call_each("_check")

    def _call_each(self, name: str, *values: object) -> None:
        """Call the method of each class that defines one, bases first."""
        for owner in reversed(type(self).__mro__):
            if name in vars(owner):
                vars(owner)[name](self, *values)


@dataclass(frozen=True)
class Flag:
    """A flag as an argument class declares it."""

    name: str
    hint: Any
    default: Any  # MISSING where it must be given
    bounds: Bounds
    options: Options

    def check(self, value: Any) -> None:
        """Raises: ValueError when the value breaks a rule that concerns no other flag."""
        items = value if isinstance(value, list) else [] if value is None else [value]
        choices = self.options.get("choices")
        if self.options.get("unique") and (twice := next((one for one in items if items.count(one) > 1), None)):
            raise ValueError(f"--{self.name} {twice} is given twice; give it once")
        for item in items:
            if not self.bounds.allow(item):
                remedy = f"; {self.options['remedy']}" if "remedy" in self.options else ""
                raise ValueError(f"--{self.name} {item} must {self.bounds}{remedy}")
            if choices is not None and item not in choices:
                raise ValueError(f"--{self.name} {item} must be one of: {'; '.join(map(str, choices))}")
        for item in items:
            if check := self.options.get("check"):
                check(item, f"--{self.name}")
            if package := self.options.get("packages", {}).get(item):
                check_package(f"--{self.name} {item}", package)

    def check_others(self, value: Any, values: Mapping[str, Any], flags: Mapping[str, Flag]) -> None:
        """Raises: ValueError when another flag lacks a value that this one needs, or has one that it excludes."""
        if value == self.default or ("when" in self.options and not _is(value, self.options["when"])):
            return
        this = f"--{self.name} {_text(value)}"
        needs = self.options.get("needs", {})
        for name, wanted in ({needs: ...} if isinstance(needs, str) else needs).items():
            if name in values and not _is(values[name], wanted, flags[name].default):
                raise ValueError(
                    f"{this} needs --{name}" + ("" if wanted is ... else f" {_choice(wanted)}, not {values[name]}")
                )
        for name, unwanted in self.options.get("excludes", {}).items():
            if name in values and _is(values[name], unwanted, flags[name].default):
                raise ValueError(f"{this} excludes --{name} {_text(values[name])}; leave one of them out")


def _is(value: Any, wanted: Any, default: Any = None) -> bool:
    """Whether a value is the wanted one, or one of several; `...`: any but the default."""
    if wanted is ...:
        return value != default
    return value in wanted if _is_choice(wanted) else value == wanted


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _choice(wanted: Any) -> str:
    return " or ".join(map(str, wanted)) if _is_choice(wanted) else str(wanted)


def _is_choice(wanted: Any) -> bool:
    return isinstance(wanted, Collection) and not isinstance(wanted, str)


def declared_flags(args_class: Any) -> dict[str, Flag]:
    """The flags of an argument class by name; where a class declares one again, its rules win over inherited ones."""
    return _declared_flags(args_class)


@cache
def _declared_flags(args_class: type) -> dict[str, Flag]:
    hints = get_type_hints(args_class)
    rules: dict[str, dict[str, Any]] = {}
    for owner in reversed(args_class.__mro__):
        own = vars(owner).get("__annotations__", {})
        for one in dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ():
            if one.name in own:
                rules[one.name] = {**rules.get(one.name, {}), **one.metadata}
    flags = {}
    for one in dataclasses.fields(cast(Any, args_class)):
        bounds = rules[one.name].pop("bounds", Bounds())
        flags[one.name] = Flag(one.name, hints[one.name], _default(one), bounds, cast(Options, rules[one.name]))
    return flags


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def check_fields(args: Any) -> None:
    """Make the value of each field one of its type, see `values.convert`.

    Raises: ValueError, one line, when a value breaks a rule of its field.
    """
    flags = declared_flags(type(args))
    values = {name: convert(name, getattr(args, name), one.hint) for name, one in flags.items()}
    for name, value in values.items():
        object.__setattr__(args, name, value)
        flags[name].check_others(value, values, flags)
    for name, value in values.items():
        flags[name].check(value)


def check_args(args: Any, args_class: type[Args], given: Mapping[str, object] | None = None) -> None:
    """Check a program's arguments before it loads anything.

    given: the objects that from Python replace what flags would load, None where not given.
    Raises: UsageError when the arguments are another program's, lack what is required, or do not go with the objects.
    """
    if not isinstance(args, args_class):
        found = args.__name__ if isinstance(args, type) else type(args).__name__
        raise UsageError(f"args: {args_class.__name__}(...) is needed, not {found}")
    given, flags = given or {}, declared_flags(type(args))
    for what in dict.fromkeys(what for one in flags.values() if (what := one.options.get("required"))):
        names = [name for name, one in flags.items() if one.options.get("required") == what]
        if given.get(what) is None and all(getattr(args, name) == flags[name].default for name in names):
            or_object = f" (from Python: {what})" if what in given else ""
            raise UsageError(f"{' or '.join(f'--{name}' for name in names)} is needed{or_object}")
    args._call_each("_check_given", given)
