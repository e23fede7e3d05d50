"""Verifiable rewards: 1 for the right answer, 0 for a wrong one, by functions for `--reward_function`.

    lightrlhf.rewards.verifiers:exact_answer      the same text
    lightrlhf.rewards.verifiers:numeric_answer    the same number, up to a tolerance
    lightrlhf.rewards.verifiers:math_answer       equal in mathematics, by math-verify
    lightrlhf.rewards.verifiers:reasoning_gym     the score of reasoning-gym's own scorer of the task
    lightrlhf.rewards.verifiers:column_pattern    the regular expression in the column `pattern`
    lightrlhf.rewards.verifiers:think_and_answer  <think>…</think><answer>…</answer>

The right answer is the column `answer`, `solution` or `ground_truth`; a row without one is None, not scored. An answer
is taken out of the response first, so that a response that lists many answers is judged by one. NaN, never 0, says that
a scorer failed. math-verify and reasoning-gym may hang, so they are called in processes that can be killed; the alarm
of math-verify works in main threads only and answers False elsewhere, so it is off.

Left out: programs and their tests (`datasets_prep.apps.reward:adaptive_score`), and models as verifiers.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lightrlhf.data.entries import read_entry
from lightrlhf.rewards.functions import ANSWERS, RewardFunction, as_text

SECONDS = 10.0  # for one response, of what may hang
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
MARKER = re.compile(r"####|\banswer\s*(?:is|:|=)\s*:?", re.IGNORECASE)
SIGN = r"(?:(?<![\w)\]}])[-+\u2212])?"  # not behind an operand: 5-3 ends with 3
NUMBER = re.compile(SIGN + r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
THINK_AND_ANSWER = r"\s*<think>(?:(?!</?think>|</?answer>).)+</think>\s*<answer>(?:(?!</?answer>).)+</answer>\s*"


def killable(package: str) -> Callable[[RewardFunction], RewardFunction]:
    """A decorator of reward functions that use this package of the extra `verify`, which may hang."""

    def mark(function: Any) -> RewardFunction:
        function.timeout, function.needs = SECONDS, package
        return function

    return mark


# ------------------------------------------------------------------------------------------------ taking answers out
def tagged_or_last(completion: Any) -> str:
    """The text in the last `<answer>…</answer>`, else the last line that is not empty."""
    text = as_text(completion)
    if tagged := TAGGED.findall(text):
        return tagged[-1].strip()
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def final_answer(completion: Any) -> str:
    r"""The answer of a response: in its last tag or line, the last `\boxed{…}`, else the text behind a marker.

    Markers are `####`, `answer is`, `answer:` and `answer =`. Without a marker it is all of the tag or line.
    """
    text = as_text(completion)
    tagged = TAGGED.findall(text)
    place = tagged[-1] if tagged else text
    if (boxed := last_boxed(place)) is not None:
        return boxed.strip()
    return MARKER.split(tagged_or_last(text))[-1].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` whose braces are closed."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start:i]
    return None


def last_number(text: str) -> float | None:
    """The last number in a text; thousands may be separated by commas."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def right_answers(columns: dict[str, Any]) -> list[Any]:
    """The right answers, None for a row without one; of GSM8K's answers the part after `####`.

    Raises: ValueError where the data has no column of answers.
    """
    given = [columns[name] for name in ANSWERS if name in columns]
    if not given:
        raise ValueError(f"the data has no column {', '.join(ANSWERS)}: the right answers")
    found = [next((answer for answer in row if answer is not None), None) for row in zip(*given)]
    return [text.rpartition("####")[2].strip() if isinstance(text, str) else text for text in found]


def plain(text: str) -> str:
    """A text with single spaces and no full stop at its end."""
    return " ".join(text.split()).removesuffix(".")


# ---------------------------------------------------------------------------------------------------------- answers
def exact_answer(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the answer is the text of the right one, ignoring spaces and a full stop at the end."""
    pairs = zip(completions, right_answers(columns))
    return [None if right is None else float(plain(final_answer(c)) == plain(str(right))) for c, right in pairs]


def numeric_answer(
    prompts: Sequence[Any], completions: Sequence[Any], tolerance: Sequence[float | None] | None = None, **columns: Any
) -> list[float | None]:
    """1 where the last number of the answer is the right one; the column `tolerance` is relative, 1e-6 without it."""
    bounds = tolerance or [None] * len(completions)
    scores: list[float | None] = []
    for completion, right, bound in zip(completions, right_answers(columns), bounds):
        wanted = right if right is None else last_number(str(right))
        if wanted is None:
            scores.append(None if right is None else math.nan)  # a right answer that is not a number
            continue
        given = last_number(final_answer(completion))
        relative = 1e-6 if bound is None else float(bound)
        scores.append(float(given is not None and math.isclose(given, wanted, rel_tol=relative, abs_tol=1e-9)))
    return scores


@killable("math_verify")
def math_answer(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where math-verify finds the answer equal to the right one; NaN where it cannot read the right one or fails."""
    pairs = zip(completions, right_answers(columns))
    return [None if right is None else same_mathematics(final_answer(c), str(right)) for c, right in pairs]


def same_mathematics(answer: str, right: str) -> float:
    """1 or 0; NaN where math-verify fails."""
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns of each call without an alarm
    boxed = last_boxed(right)
    try:
        given, wanted = (parse(f"${text}$", parsing_timeout=None) for text in (answer, boxed or right.strip("$ ")))
        if not wanted:
            return math.nan
        return float(bool(given) and verify(wanted, given, timeout_seconds=None, raise_on_error=True))
    except Exception as problem:  # sympy may raise anything
        print(f"math_answer: {type(problem).__name__} for {answer[:60]!r}, not scored", file=sys.stderr)
        return math.nan


# ---------------------------------------------------------------------------------------------------- reasoning-gym
@killable("reasoning_gym")
def reasoning_gym(
    prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str | None], entry: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Score of the answer by the scorer of `task`, in [0, 1]; NaN where it raises. `entry`: the task's item, as JSON.

    The answer is in `<answer>…</answer>` or the last line: those scorers pay a part for a long text with the answer in
    it.
    """
    rows = zip(completions, task, entry)
    return [None if name is None else score_entry(tagged_or_last(c), name, item) for c, name, item in rows]


def score_entry(answer: str, task: str, entry: Any) -> float:
    """reasoning-gym's score of an answer to an item; NaN where its scorer raises. Raises: ValueError, unknown task."""
    scorer = scorer_of(task)
    try:
        return float(scorer(answer, read_entry(entry) if isinstance(entry, str) else entry))
    except Exception as problem:  # a scorer may raise anything at a malformed answer
        what = f"{type(problem).__name__}: {problem}"
        print(f"reasoning_gym: the scorer of {task} raised {what} for {answer[:60]!r}, not scored", file=sys.stderr)
        return math.nan


@cache
def scorer_of(task: str) -> Callable[[str, Any], float]:
    """The scorer of a task of reasoning-gym. Raises: ValueError for an unknown one."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


# ----------------------------------------------------------------------------------------------------------- format
def matches(pattern: str) -> RewardFunction:
    """A reward function: 1 where a whole response matches this regular expression, in which `.` is any character."""
    compiled = re.compile(pattern, re.DOTALL)

    def format_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(compiled.fullmatch(as_text(completion)) is not None) for completion in completions]

    return format_reward


def column_pattern(
    prompts: Sequence[Any], completions: Sequence[Any], pattern: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """1 where a whole response matches the regular expression in its column `pattern`, as in `matches`."""
    pairs = zip(completions, pattern)
    return [None if one is None else float(bool(re.fullmatch(one, as_text(c), re.DOTALL))) for c, one in pairs]


think_and_answer = matches(THINK_AND_ANSWER)
