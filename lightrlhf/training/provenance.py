"""Provenance: versions of packages, the library's git commit, and hashes of objects that a program was called with."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.models.saving import hash_weights

VERSIONED = ("torch", "lightning", "transformers", "peft", "tokenizers", "jsonargparse")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    own = sys.modules["lightrlhf"].__version__  # of the code, not of what was installed before a pull
    found = {"python": platform.python_version(), "lightrlhf": own}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the library's checkout; None when it is installed without one."""
    if not shutil.which("git"):
        return None
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(here.parents[2])},
    )
    return done.stdout.strip() or None


def describe_given(**objects: Any) -> dict[str, str]:
    """Objects given to `train` instead of flags, for `args.json`: name -> kind and hash; None objects are left out.

    Models are hashed by their weights, rows by their values, tokenizers by their vocabulary and chat template.
    Functions and environments are named, not hashed.
    """
    return {name: _describe(one) for name, one in objects.items() if one is not None}


def check_given(before: Mapping[str, str], now: Mapping[str, str], source: str) -> None:
    """Raises: UsageError naming `source` and the first object that is not the one that the run began with."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{source}: {name} was {before.get(name, 'not given')} and is {now.get(name, 'not given')}; "
                "resume with the objects that the run began with (a model as it was before training)"
            )


def _describe(one: Any) -> str:
    if isinstance(one, nn.Module):
        kind, digest = type(one).__name__, hash_weights(one).hexdigest()
    elif hasattr(one, "get_vocab"):
        kind, digest = type(one).__name__, _hash([sorted(one.get_vocab().items()), getattr(one, "chat_template", None)])
    elif callable(one):
        return f"{getattr(one, '__module__', '?')}:{getattr(one, '__qualname__', type(one).__qualname__)}"
    elif isinstance(one, list | tuple) and one and all(map(callable, one)):
        return " ".join(map(_describe, one))
    elif isinstance(one, Mapping) or _is_sequence(one):
        kind, digest = f"{len(one)} rows", _hash(one)
        if isinstance(one, Mapping):
            kind = ", ".join(f"{name}: {len(rows)} rows" for name, rows in one.items())
    else:
        return type(one).__qualname__
    return f"{kind} sha256:{digest[:16]}"


def _hash(value: Any) -> str:
    digest = hashlib.sha256()
    for part in _flat(value):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _is_sequence(value: Any) -> bool:
    """Whether a value is a list in kind: a tuple, a dataset, an array."""
    return not isinstance(value, str | bytes) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        yield value.tolist()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _flat(part)
    elif _is_sequence(value):
        for index in range(len(value)):
            yield from _flat(value[index])
    else:
        yield value
