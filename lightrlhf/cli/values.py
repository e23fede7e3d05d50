"""Types of flags: what each type accepts, from the command line, from a file and from Python."""

from __future__ import annotations

import math
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightrlhf.cli.latest import follow_latest
from lightrlhf.cli.names import not_one_of

TYPES: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
}
LARGEST = 2**53  # largest integer; every smaller one is exact as a float


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the only type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def convert(name: str, value: Any, hint: Any) -> Any:
    """The value of a flag, with paths as text and the run's own name in place of `latest`.

    Raises: ValueError, one line that names the flag, for a value of another type than `hint`; a number that is not
    finite, or too large to be exact; a text that UTF-8 cannot encode.
    """
    options = options_of(hint)
    kinds = [option for option in options if option is not NoneType]
    if value is None and NoneType in options:
        return None
    value = _as_path(value)
    items = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
    if items is not None and isinstance(value, list | tuple):
        value = [_as_path(item) for item in value]
        for item in value:
            check_value(name, item, items)
    elif len(kinds) == 1 and items is not None:
        raise ValueError(f"--{name} {value!r} is not a list")
    elif len(kinds) == 1:
        check_value(name, value, kinds[0])
    elif isinstance(value, str):
        check_value(name, value, str)
    else:
        raise ValueError(f"--{name} {value!r} is neither a text nor a list")
    return value


def _as_path(value: Any) -> Any:
    value = fspath(value) if isinstance(value, PathLike) else value
    return follow_latest(value) if isinstance(value, str) else value


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raises: ValueError naming the flag when a value, or an item of a list, is not of type `kind`."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(not_one_of(name, value, ", ".join(map(str, get_args(kind)))))
    elif kind in TYPES:
        accepted, words = TYPES[kind]
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"--{name} {value!r} is not {words}")
        if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
            raise ValueError(f"--{name} {value!r} has characters that cannot be encoded in UTF-8")
        number: Any = value
        if kind is float and not (isinstance(number, Integral) or math.isfinite(number)):
            raise ValueError(f"--{name} {value} must be a finite number")
        if isinstance(number, int) and abs(number) > LARGEST:
            raise ValueError(f"--{name} has a number of {len(str(number))} digits, which is out of range")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
