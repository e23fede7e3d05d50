"""Questions with two researched answers that people compared (WebGPT).

Reads openai/webgpt_comparisons (`question, answer_0, answer_1, score_0, score_1`). A tie is no pair and
counted; its question and its first answer stay for SFT and RL. Citation marks such as [1] or [2, 3] are removed from
the answers, other brackets are kept. 95% of the questions are for training, 5% for validation.

    python -m datasets_prep.webgpt.prepare_data --destination_dir=data/webgpt --tokenizer_name=facebook/opt-350m
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from lightrlhf.cli.errors import one_line_errors

STAGES = ("finetune", "preference", "prompts")
CITATION = re.compile(r" ?\[\d+(?:, ?\d+)*\]")


@dataclass(frozen=True, kw_only=True)
class WebGPTArgs(PrepareArgs):
    """Prepare WebGPT's comparisons of researched answers."""

    dataset_name: str = "openai/webgpt_comparisons"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    split: str | None = "2,4,4"
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""
    validation_percentage: float = 0.05
    """Share of prompts in the validation split, unless the source has one."""
    test_percentage: float = 0.0
    """Share of prompts in the test split, unless the source has one."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt; a question has several pairs of answers."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt: messages, chosen, rejected}`, of ties `no_pair`, too. Raises: BadRow."""
    question = column(column(raw, "question", dict), "full_text").strip()
    answers = [CITATION.sub("", column(raw, f"answer_{side}")).strip() for side in (0, 1)]
    first, second = (float(column(raw, f"score_{side}", (int, float))) for side in (0, 1))
    if math.isnan(first) or math.isnan(second):
        raise BadRow("score_is_nan")
    chosen, rejected = answers if first >= second else reversed(answers)
    row = {"prompt": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}
    return row | ({"no_pair": "tie"} if first == second else {})


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    run(
        WebGPTArgs,
        to_row,
        argv,
        stages=STAGES,
        example_prompt=[{"role": "user", "content": "Why is the sky blue at noon?"}],
    )


if __name__ == "__main__":
    main()
