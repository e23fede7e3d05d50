"""The adaptive code reward: the share of unit tests that a program passes.

    -1.0                        it does not compile
    -0.6                        it fails or times out on a test
    -0.3 + 1.3 * passed / total otherwise
     NaN                        unknown (the sandbox failed, the tests are unreadable): masked

The scale is that of MA-RLHF's experiments on APPS (arXiv:2410.02743), after earlier work on learning from unit tests.
Expected values stay in this process; the program's output or return value comes back as plain data and is compared here
by its own types, so neither an exit code, nor an object that equals everything, nor a patched comparison passes a test.

As in APPS's own harness (github.com/hendrycks/apps, eval/testing_util.py) common modules are imported in front of a
program, tuples count as lists, 3.0 as 3, and numbers as keys of an argument are restored. Unlike there, wrong are words
in another order, 1 for True, and decimals that are only near an integer.
"""

from __future__ import annotations

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

from datasets_prep.apps.sandbox import Limits, long_int, run_program

FENCE = re.compile(r"```[A-Za-z0-9]*\n(.*?)(?:```|\Z)", re.DOTALL)
NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,3})?")


def adaptive_score(prompts: list[str], completions: list[str], tests: list[str | None], **_: Any) -> list[float | None]:
    """Scores (B,) of programs; `tests` is the JSON `{inputs, outputs, fn_name?}` of APPS for each, or None.

    Raises: RunFailure if this system cannot isolate programs and running them without isolation is not permitted.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda text, of: None if of is None else score_program(text, of), completions, tests))


def score_program(completion: str, tests: str | None, limits: Limits = Limits()) -> float:  # noqa: B008  (frozen)
    """The score of one completion, with its program as it is or in a code fence."""
    try:
        cases = json.loads(tests or "", parse_int=long_int)
        inputs, outputs, function = cases["inputs"], cases["outputs"], cases.get("fn_name")
        pairs = list(zip(inputs, outputs, strict=True))
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return math.nan
    if not (pairs and isinstance(inputs, list) and isinstance(outputs, list)):
        return math.nan
    if not isinstance(function, str | None) or (function and not all(isinstance(given, list) for given in inputs)):
        return math.nan
    program = code_of(completion)
    passed = 0
    for given, expected in pairs:
        if function:
            outcome = run_program(program, function=function, arguments=given, limits=limits)
        else:
            outcome = run_program(program, text=as_text(given), limits=limits)
        if outcome.kind == "machinery":
            return math.nan
        if outcome.kind == "compile_error":
            return -1.0
        if outcome.kind != "ran":
            return -0.6
        passed += same_answer(outcome.answer, expected) if function else same_text(outcome.output, as_text(expected))
    return -0.3 + 1.3 * passed / len(pairs)


def code_of(completion: str) -> str:
    """The program of a completion: its first fenced block, or all of it."""
    fenced = FENCE.search(completion)
    return fenced[1] if fenced else completion


def as_text(value: Any) -> str:
    """Input or expected output of a program that reads and prints; in APPS text or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_text(printed: str, expected: str) -> bool:
    """The same words on the same lines; decimal numbers may differ by one part in a million."""
    ours, theirs = ([line.split() for line in text.split("\n") if line.strip()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(same_word(x, y) for x, y in zip(a, b)) for a, b in zip(ours, theirs)
    )


def same_word(ours: str, theirs: str) -> bool:
    """Equal, or numbers: close to an expected decimal number, as large as an expected integer."""
    if ours == theirs:
        return True
    number, wanted = NUMBER.fullmatch(ours), NUMBER.fullmatch(theirs)
    if not (number and wanted and (number.lastindex or wanted.lastindex)):
        return False  # text, or integers, which have one spelling
    if wanted.lastindex is None:
        return Decimal(ours) == Decimal(theirs)
    return math.isclose(float(ours), float(theirs), rel_tol=1e-6, abs_tol=1e-9)


def same_answer(answer: list[Any] | None, expected: Any) -> bool:
    """Whether a returned value equals the expected one, which APPS often wraps in a list of one."""
    if answer is None:
        return False
    wrapped = isinstance(expected, list) and len(expected) == 1
    return same_value(answer[0], expected) or (wrapped and same_value(answer[0], expected[0]))


def same_value(ours: Any, theirs: Any) -> bool:
    """Equal, with equal types but for numbers at every level; up to rounding where a float is expected."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same_value, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key]) for key in ours)
    if type(theirs) is float and type(ours) in (int, float):
        return ours == theirs or close(ours, theirs)
    if type(theirs) is int and type(ours) is float:
        return ours == theirs
    return type(ours) is type(theirs) and ours == theirs


def close(ours: float, theirs: float) -> bool:
    """Equal up to rounding."""
    try:
        return math.isclose(ours, theirs, rel_tol=1e-9)
    except OverflowError:  # an integer beyond all floats
        return False
