"""Packages that are not installed: one line each, with the extra of `setup.py` that brings an optional one.

A program asks for an optional package by `check_package` before it loads a model. A required one is missing only from
a broken installation: `one_line_errors` prints `missing_line` where a function imports it, and `print_missing`
where the imports at the top of a program do, before there is a `main` that could.

Left out: versions (`lightrlhf doctor` compares them), and packages that a user's own functions import.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

EXTRAS = {  # import name -> extra
    "gymnasium": "envs",
    "gradio": "demo",
    "textblob": "parse",
    "bitsandbytes": "quantisation",
    "flash_attn": "flash",
    "math_verify": "verify",
    "reasoning_gym": "verify",
    "gguf": "gguf",
    "starlette": "serve",
    "uvicorn": "serve",
    "pydantic": "serve",
    "wandb": "wandb",
    "benepar": "benepar",
    "stanza": "stanza",
    "alfworld": "alfworld",
    "textworld": "alfworld",
    "fast_downward": "alfworld",
}
UNLISTED = {"deepspeed"}  # in no extra, since it is built for the CUDA of a machine
OURS = ("lightrlhf", "datasets_prep", "examples")
DISTRIBUTIONS = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym", "yaml": "pyyaml"}
DISTRIBUTIONS |= {"flash_attn": "flash-attn"}


def needs_package(what: str, package: str) -> str:
    """Error message for a package that is not installed; what: the flag or program that imports it."""
    name = DISTRIBUTIONS.get(package, package)
    if package in UNLISTED:
        return f"{what} needs the package {name}; install it with: pip install {name}"
    extra = f"[{EXTRAS[package]}]" if package in EXTRAS else ""
    if not Path(__file__).parents[2].joinpath("setup.py").is_file():  # pip finds the wheel installed, and adds to it
        return f"{what} needs the package {name}; install it with: pip install 'lightrlhf{extra}'"
    wanted = f"'.{extra}'" if extra else "."
    return f"{what} needs the package {name}; install it from the clone with: pip install -e {wanted}"


def check_package(what: str, package: str, error: type[Exception] = ValueError) -> None:
    """Raises: `error`, which names the extra, when a package is not installed; it is not imported."""
    if find_spec(package) is None:
        raise error(needs_package(what, package))


def missing_line(problem: BaseException | None) -> str | None:
    """The message for an import that found no package; None if `setup.py` does not list the package.

    Also for an import that found no folder for temporary files, which packages that torch imports need.
    """
    if isinstance(problem, FileNotFoundError) and "No usable temporary directory" in str(problem):
        return "no folder for temporary files is writable; set TMPDIR to one that is"
    name = problem.name if isinstance(problem, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    required = _list_required()
    if not package or package in OURS or (required and package not in {*EXTRAS, *required}):
        return None
    return needs_package("lightrlhf", package)


def _list_required() -> set[str]:
    """Import names of the packages that are always required; empty where lightrlhf itself is not installed."""
    from importlib.metadata import PackageNotFoundError, requires  # 20 ms

    try:
        lines = requires("lightrlhf") or []
    except PackageNotFoundError:  # run in a clone by a Python without it: whatever is missing is required
        return set()
    names = {re.split(r"[^\w-]", line)[0].lower().replace("-", "_") for line in lines if "extra ==" not in line}
    return names | {"yaml"}  # of pyyaml


def print_missing(kind: type[BaseException], problem: BaseException, place: TracebackType | None) -> None:
    """`sys.excepthook` of a program: one line, and exit status 2, for a package that it could not import."""
    line = missing_line(problem)
    if line is None:
        return traceback.print_exception(kind, problem, place)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
