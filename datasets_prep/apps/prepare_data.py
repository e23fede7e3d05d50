"""Programming problems with unit tests (APPS): a solution for SFT, tests for the reward.

Reads codeparrot/apps (`question, solutions, input_output, starter_code, difficulty`), whose hub repository is a
loading script, hence the parquet revision. 20% of the problems are for SFT, 80% for RL. SFT gets the shortest solution
that Python 3 parses (some are Python 2). The column `tests` has the tests as the original JSON, for
`datasets_prep.apps.reward`.

    python -m datasets_prep.apps.prepare_data --destination_dir=data/apps --tokenizer_name=google/codegemma-2b
"""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from lightrlhf.cli.errors import one_line_errors

STAGES = ("finetune", "prompts")
PROMPT = "QUESTION:\n{question}\n{starter}{how}\nANSWER:\n"
READS = "Use Standard Input format: read the input with input() and print the answer."
CALLED = "Use Call-Based format: the function is called with the arguments and returns the answer."
EXAMPLE = PROMPT.format(question="Read a number n and print the sum of 1 to n.", starter="", how=READS)


@dataclass(frozen=True, kw_only=True)
class AppsArgs(PrepareArgs):
    """Prepare the APPS programming problems."""

    dataset_name: str = "codeparrot/apps"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    dataset_revision: str | None = "refs/convert/parquet"
    """Branch, tag or commit of a hub dataset."""
    split: str | None = "2,0,8"
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""
    max_length: int = 1112
    """Maximum tokens of prompt and response; longer ones are truncated and get no end token."""
    max_prompt_length: int = 600
    """Maximum tokens of a prompt; rows with a longer one are dropped."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, completion (if a solution parses), columns}`. Raises: BadRow."""
    tests = load_json(column(raw, "input_output"), dict, "input_output")
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
        raise BadRow("no_tests")
    starter = raw.get("starter_code") or ""
    prompt = PROMPT.format(
        question=column(raw, "question").strip(),
        starter=f"{starter.strip()}\n" if starter.strip() else "",
        how=CALLED if tests.get("fn_name") else READS,
    )
    columns = {"tests": raw["input_output"], "difficulty": str(raw.get("difficulty", ""))}
    solution = shortest_solution(raw.get("solutions") or "[]")
    return {"prompt": prompt, "columns": columns} | ({"completion": solution} if solution else {})


def shortest_solution(solutions: str) -> str | None:
    """The shortest of a JSON list of programs that Python 3 parses."""
    programs = [program for program in load_json(solutions, list, "solutions") if isinstance(program, str)]
    for program in sorted(programs, key=len):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in old programs
            try:
                ast.parse(program)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
        if program.strip():
            return program.strip() + "\n"
    return None


def load_json(text: str, kind: type, name: str) -> Any:
    """A JSON value of type `kind`. Raises: BadRow."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also for integers longer than Python parses
        raise BadRow(f"{name}_is_no_json") from None
    if not isinstance(value, kind):
        raise BadRow(f"{name}_is_{type(value).__name__}")
    return value


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    run(
        AppsArgs, to_row, argv, stages=STAGES, reward="datasets_prep.apps.reward:adaptive_score", example_prompt=EXAMPLE
    )


if __name__ == "__main__":
    main()
