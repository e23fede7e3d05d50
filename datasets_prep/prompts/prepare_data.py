"""Prompt collections and SFT datasets of messages, for online preference learning.

Reads RLHFlow's prompt collections (`context_messages`) and SFT datasets (`messages` or `conversations`), as
`datasets_prep.generic` does, with longer prompts. A prompt collection yields prompts only; an SFT dataset yields
prompts, and finetune rows that train every assistant turn.

    python -m datasets_prep.prompts.prepare_data --destination_dir=data/prompts \\
        --dataset_name=RLHFlow/iterative-prompt-v1-iter1-20K --tokenizer_name=meta-llama/Meta-Llama-3-8B-Instruct
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets_prep.common import PrepareArgs, run
from datasets_prep.formats import to_row
from lightrlhf.cli.errors import one_line_errors

STAGES = ("finetune", "prompts")


@dataclass(frozen=True, kw_only=True)
class PromptsArgs(PrepareArgs):
    """Prepare a prompt collection or an SFT dataset of messages."""

    dataset_name: str = "RLHFlow/iterative-prompt-v1-iter1-20K"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    max_length: int = 2048
    """Maximum tokens of prompt and response; longer ones are truncated and get no end token."""
    max_prompt_length: int = 1024
    """Maximum tokens of a prompt; rows with a longer one are dropped."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    question = "Explain to a child why the moon does not fall down."
    run(PromptsArgs, to_row, argv, stages=STAGES, example_prompt=[{"role": "user", "content": question}])


if __name__ == "__main__":
    main()
