"""Your own dataset, without code: any file or hub dataset with TRL's columns.

| columns | files |
|---|---|
| `prompt, completion` | finetune, prompts |
| `prompt, chosen, rejected` or `chosen, rejected` alone | finetune, preference, prompts |
| `messages` | finetune, prompts, dialogue |
| `prompt` | prompts |

A prompt is text or messages, a response text or one assistant message; `chosen` and `rejected` may also be whole
dialogues (their common prefix is the prompt). Every other column is kept with the prompts, for a reward function.

    python -m datasets_prep.generic.prepare_data --destination_dir=data/mine --dataset_name=mine.jsonl \\
        --tokenizer_name=facebook/opt-350m
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from datasets_prep.plans import is_messages
from lightrlhf.cli.errors import one_line_errors

OURS = ("prompt", "completion", "chosen", "rejected", "messages")


@dataclass(frozen=True, kw_only=True)
class GenericArgs(PrepareArgs):
    """Prepare any dataset with the columns prompt, completion, chosen, rejected or messages."""

    remove_same_inputs: bool = False
    """Keep only the first row of each prompt (for dialogues: of each sequence of user turns)."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """The row with prompt and responses separated. Raises: BadRow."""
    given = {name: raw[name] for name in OURS if raw.get(name) is not None}
    columns = {name: plain(value) for name, value in raw.items() if name not in OURS}
    if "chosen" in given or "rejected" in given:
        column(given, "chosen", (str, list)), column(given, "rejected", (str, list))
        return {**pair(given), "columns": columns}
    if "messages" in given:
        return {"messages": given["messages"], "columns": columns}
    if "prompt" not in given:
        raise BadRow("no_column_" + "_".join(OURS) if not any(name in raw for name in OURS) else "prompt_is_null")
    row = {"prompt": given["prompt"], "columns": columns}
    return row | ({"completion": response(given["completion"])} if "completion" in given else {})


def pair(given: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, chosen, rejected}` of a pair whose prompt is separate or part of both sides. Raises: BadRow."""
    chosen, rejected, prompt = given["chosen"], given["rejected"], given.get("prompt")
    if is_messages(chosen) and is_messages(rejected) and min(len(chosen), len(rejected)) > 1:
        if chosen[:-1] != rejected[:-1]:
            raise BadRow("prompts_differ")
        return {"prompt": chosen[:-1], "chosen": response(chosen[-1:]), "rejected": response(rejected[-1:])}
    if prompt is None:
        if not (isinstance(chosen, str) and isinstance(rejected, str)):
            raise BadRow("no_prompt")
        common = os.path.commonprefix([chosen, rejected])
        prompt = common[: common.rfind(" ")] if " " in common else ""  # ends at a word boundary
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return {"prompt": prompt, "chosen": response(chosen), "rejected": response(rejected)}


def response(value: Any) -> str:
    """The text of a response, which is text or one assistant message. Raises: BadRow."""
    if isinstance(value, str):
        return value
    if is_messages(value) and len(value) == 1 and value[0]["role"] == "assistant":
        return value[0]["content"]
    raise BadRow("response_is_no_text_and_no_assistant_message")


def plain(value: Any) -> Any:
    """`value` as plain data for a `.pt` file; other objects as text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    run(GenericArgs, to_row, argv)


if __name__ == "__main__":
    main()
