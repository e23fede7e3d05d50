"""Reasoning dialogues of several turns (UltraInteract), which `lightrlhf.online_refuel` replays.

Reads openbmb/UltraInteract_pair (`trajectory` of `{from, value}`, `chosen`): the trajectory followed by the chosen
response. The limits of a turn depend on the dialogue's number of turns. Dialogues with the same user turns are
redundant for training on sampled answers; the first is kept.

    python -m datasets_prep.ultrainteract.prepare_data --destination_dir=data/ultrainteract \\
        --tokenizer_name=meta-llama/Meta-Llama-3-8B-Instruct
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from datasets_prep.formats import as_messages
from lightrlhf.cli.errors import one_line_errors

STAGES = ("dialogue",)


@dataclass(frozen=True, kw_only=True)
class UltraInteractArgs(PrepareArgs):
    """Prepare UltraInteract's dialogues."""

    dataset_name: str = "openbmb/UltraInteract_pair"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    turn_prompt_length: str = "1024,768,512,256,128"
    """Maximum tokens of a user turn; a list sets it by the dialogue's number of turns."""
    turn_response_length: str = "1024,768,512,512,512"
    """Maximum tokens of an assistant turn; a list sets it by the dialogue's number of turns."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{messages}`. Raises: BadRow."""
    messages = as_messages(column(raw, "trajectory", list))
    if not messages or messages[-1]["role"] != "user":
        raise BadRow("trajectory_ends_with_no_user_turn")
    answer = {"role": "assistant", "content": column(raw, "chosen")}
    return {"messages": [*messages, answer]}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    question = "A train goes 60 km in 40 minutes. How far does it go in an hour?"
    run(UltraInteractArgs, to_row, argv, stages=STAGES, example_prompt=[{"role": "user", "content": question}])


if __name__ == "__main__":
    main()
