"""A thousand small programming problems in the schema of APPS, for a model small enough to train on a laptop.

Each reads a number and prints another. Made for `examples/apps.sh`, as a demonstration of the code reward.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.storage.jsonl import write_jsonl

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


@dataclass(frozen=True, kw_only=True)
class SmallProblemsArgs:
    """Write small programming problems in the schema of APPS."""

    output_file: str
    """JSONL file to write."""
    largest: int = 60
    """Largest constant in a problem; 18 problems per constant."""
    seed: int = 0
    """Seed of the tests' inputs and of the order."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(SmallProblemsArgs, argv)
    rng = random.Random(args.seed)
    rows = list(problems(rng, args.largest))
    rng.shuffle(rows)
    write_jsonl(args.output_file, rows)
    print(f"{args.output_file}: {len(rows)} problems")


def problems(rng: random.Random, largest: int) -> Iterator[dict[str, str]]:
    """Rows with the columns of codeparrot/apps: `question, solutions, input_output, starter_code, difficulty`."""
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


if __name__ == "__main__":
    main()
