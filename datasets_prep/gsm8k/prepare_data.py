"""Grade-school maths problems with worked answers, and a reward that checks the final number.

Reads openai/gsm8k (`question, answer`, the answer ending in `#### N`; `--dataset_config main` on the hub). The
calculator marks `<<48/2=24>>` are removed from the worked answers. The number becomes the column `answer`, for
`datasets_prep.gsm8k.reward`.

    python -m datasets_prep.gsm8k.prepare_data --destination_dir=data/gsm8k --tokenizer_name=Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from datasets_prep.gsm8k.reward import final_number
from lightrlhf.cli.errors import one_line_errors

STAGES = ("finetune", "prompts")
CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, kw_only=True)
class Gsm8kArgs(PrepareArgs):
    """Prepare grade-school maths problems."""

    dataset_name: str = "openai/gsm8k"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    dataset_config: str | None = "main"
    """Configuration of a hub dataset that has several."""
    split: str | None = "1,0,1"
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt: messages, completion, columns: {answer}}`. Raises: BadRow."""
    question = column(raw, "question").strip()
    worked = CALCULATION.sub("", column(raw, "answer")).strip()
    number = final_number(worked)
    if number is None:
        raise BadRow("no_final_number")
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "completion": worked, "columns": {"answer": str(number)}}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    question = "A baker sells 12 rolls at 2 dollars each and 3 cakes at 15 dollars each. How much does she earn?"
    reward = "datasets_prep.gsm8k.reward:exact_answer"
    run(Gsm8kArgs, to_row, argv, stages=STAGES, reward=reward, example_prompt=[{"role": "user", "content": question}])


if __name__ == "__main__":
    main()
