"""Programming problems with unit tests (APPS): a solution to learn from, tests to earn a reward by.

Reads codeparrot/apps (`question, solutions, input_output, starter_code, difficulty`), whose hub repository is a
loading script, hence the parquet revision. 20% of the problems are for SFT, 80% for RL. Of the solutions SFT gets the
shortest that Python 3 parses (some are Python 2). The tests stay in the column `tests`, as the JSON they came in, for
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
    """Branch, tag or commit of a hub set."""
    split: str | None = "2,0,8"
    """Shares of SFT, reward model and RL, such as 2,4,4, so that no prompt crosses stages; without it all share all."""
    max_length: int = 1112
    """Longest prompt with response in tokens; what is longer is cut and gets no end token."""
    max_prompt_length: int = 600
    """Longest prompt in tokens; rows with a longer one are dropped."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, completion (where a solution parses), columns}`. Raises: BadRow."""
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
    """Raises: BadRow when `text` is no JSON of that kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also numbers of more digits than Python reads
        raise BadRow(f"{name}_is_no_json") from None
    if not isinstance(value, kind):
        raise BadRow(f"{name}_is_{type(value).__name__}")
    return value


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the set from the command line."""
    run(
        AppsArgs, to_row, argv, stages=STAGES, reward="datasets_prep.apps.reward:adaptive_score", example_prompt=EXAMPLE
    )


if __name__ == "__main__":
    main()
