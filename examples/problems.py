"""Small programming problems in the schema of APPS, and the rewards of programs that were written for problems."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from datasets_prep.apps.reward import adaptive_score
from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import read_jsonl

PASSED, RUNS = 1.0, -0.3  # least reward of a program that passes all tests, and of one that runs to its end
ASKS = ("Read a number n and print {what}.", "Given n, print {what}.", "The input is a number n. Output {what}.")
ONE = {
    "n plus {k}": "n + {k}",
    "n minus {k}": "n - {k}",
    "n times {k}": "n * {k}",
    "{k} minus n": "{k} - n",
    "the larger of n and {k}": "max(n, {k})",
    "the smaller of n and {k}": "min(n, {k})",
}
PROGRAM = "n = int(input())\nprint({expression})\n"
NUM_TESTS = 2


def problems(seed: int, largest: int) -> list[dict[str, str]]:
    """Problems with constants up to the largest, 18 for each, in random order, as rows of codeparrot/apps.

    Columns: `question, solutions, input_output, starter_code, difficulty`.
    """
    rng = random.Random(seed)
    rows = list(_in_order(rng, largest))
    rng.shuffle(rows)
    return rows


def _in_order(rng: random.Random, largest: int) -> Iterator[dict[str, str]]:
    for k in range(1, largest + 1):
        for ask in ASKS:
            for what, code in ONE.items():
                expression = code.format(k=k)
                inputs = [rng.randint(0, 99) for _ in range(NUM_TESTS)]
                outputs = [answer(expression, n) for n in inputs]
                tests = {"inputs": [f"{n}\n" for n in inputs], "outputs": [f"{value}\n" for value in outputs]}
                yield {
                    "question": ask.format(what=what.format(k=k)),
                    "solutions": json.dumps([PROGRAM.format(expression=expression)]),
                    "input_output": json.dumps(tests),
                    "starter_code": "",
                    "difficulty": "introductory",
                }


def answer(expression: str, n: int) -> int:
    """The value of an expression of this file."""
    return eval(expression, {"__builtins__": {}}, {"n": n, "max": max, "min": min})


def scores_of(responses_file: str) -> tuple[list[float], list[str], int]:
    """Rewards of a file's programs, the tests of the problem of each, and how many programs could not be scored.

    Raises: UsageError where none could be.
    """
    rows = read_jsonl(responses_file, needs=["responses", "tests"])
    tests = [row["tests"] for row in rows for _ in row["responses"]]
    scores = adaptive_score([], [text for row in rows for text in row["responses"]], tests)
    valid = [(score, problem) for score, problem in zip(scores, tests) if score is not None and score == score]
    if not valid:
        raise UsageError(f"--responses_file {responses_file}: none of its {len(scores)} programs could be scored")
    return [score for score, _ in valid], [problem for _, problem in valid], len(scores) - len(valid)
