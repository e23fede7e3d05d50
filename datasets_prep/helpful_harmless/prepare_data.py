"""Helpful and harmless dialogues: pairs of conversations that differ in the assistant's last answer.

Reads every published form of the dataset: Anthropic/hh-rlhf (`chosen`, `rejected` as text), Dahoas/full-hh-rlhf and
static-hh (`prompt, response, chosen, rejected` as text) and trl-internal-testing/hh-rlhf-trl-style (`chosen` and
`rejected` as messages). All become messages; for a tokenizer without a chat template they are written as published,
`\n\nHuman: …\n\nAssistant: …`.

    python -m datasets_prep.helpful_harmless.prepare_data --destination_dir=data/hh --tokenizer_name=facebook/opt-350m
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from datasets_prep.plans import is_messages
from lightrlhf.cli.errors import one_line_errors

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class HelpfulHarmlessArgs(PrepareArgs):
    """Prepare Anthropic's helpful and harmless dialogues."""

    dataset_name: str = "Anthropic/hh-rlhf"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    split: str | None = "2,4,4"
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt: messages, chosen, rejected}` of any published form. Raises: BadRow."""
    if "response" in raw:  # Dahoas: separate prompt and answers
        prompt = read_dialogue(column(raw, "prompt"))
        chosen, rejected = column(raw, "chosen"), column(raw, "rejected")
    else:
        (*prompt, good), (*same, bad) = read_either(raw, "chosen"), read_either(raw, "rejected")
        if prompt != same:
            raise BadRow("prompts_differ")
        chosen, rejected = good["content"], bad["content"]
    return {"prompt": prompt, "chosen": chosen.strip(), "rejected": rejected.strip()}


def read_either(raw: dict[str, Any], name: str) -> list[dict[str, str]]:
    """The messages of a column of text or messages, ending with the assistant. Raises: BadRow."""
    value = raw.get(name)
    dialogue = value if is_messages(value) else read_dialogue(column(raw, name))
    if len(dialogue) < 2 or dialogue[-1]["role"] != "assistant" or not isinstance(dialogue[-1]["content"], str):
        raise BadRow("no_final_answer")
    return dialogue


def read_dialogue(text: str) -> list[dict[str, str]]:
    """Messages of `\\n\\nHuman: …\\n\\nAssistant: …`; a final `Assistant:` without an answer is left out."""
    parts = TURN.split(text)
    if parts[0].strip() or len(parts) < 3:
        raise BadRow("no_dialogue")
    turns = zip(parts[1::2], parts[2::2], strict=True)
    messages = [{"role": ROLES[name], "content": content.strip()} for name, content in turns]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    run(HelpfulHarmlessArgs, to_row, argv, example_prompt=[{"role": "user", "content": "How does the computer work?"}])


if __name__ == "__main__":
    main()
