"""A thousand small programming problems in the schema of APPS, for a model small enough to train on a laptop.

Each reads a number and prints another. Made for `examples/apps.sh`, as a demonstration of the code reward.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.problems import problems
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.storage.jsonl import write_jsonl


@dataclass(frozen=True, kw_only=True)
class SmallProblemsArgs(Args):
    """Write small programming problems in the schema of APPS."""

    output_file: str
    """JSONL file to write."""
    largest: int = at_least(1, 60)
    """Largest constant in a problem; 18 problems per constant."""
    seed: int = random_seed(0)
    """Seed of the tests' inputs and of the order."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(SmallProblemsArgs, argv)
    rows = problems(args.seed, args.largest)
    write_jsonl(args.output_file, rows)
    print(f"{args.output_file}: {len(rows)} problems")


if __name__ == "__main__":
    main()
