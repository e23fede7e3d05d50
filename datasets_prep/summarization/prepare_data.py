"""Pairs of summaries of Reddit posts with people's preferences.

Reads CarperAI/openai_summarize_comparisons (`prompt, chosen, rejected`, the answers beginning with `TL;DR: `) and
openai/summarize_from_feedback (`info, summaries, choice`; use `--dataset_config comparisons`). Both become the prompt
`SUBREDDIT: … TITLE: … POST: … TL;DR:` and a summary after a space; subreddit and title are also columns.

    python -m datasets_prep.summarization.prepare_data --destination_dir=data/tldr --tokenizer_name=facebook/opt-350m
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from datasets_prep.common import BadRow, PrepareArgs, column, run
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.demo.summaries import summary_prompt

STAGES = ("finetune", "preference", "prompts")
MARK = "TL;DR:"
FIELD = re.compile(r"^(SUBREDDIT|TITLE): *(.*)$", re.MULTILINE)
EXAMPLE = """SUBREDDIT: r/cooking
TITLE: My bread never rises
POST: I have baked bread every Sunday for a month. I use fresh yeast, warm water and good flour, and I knead for \
ten minutes, but the dough stays flat. A neighbour told me that I put the salt right on the yeast. Could that be it?
TL;DR:"""


@dataclass(frozen=True, kw_only=True)
class SummarizationArgs(PrepareArgs):
    """Prepare pairs of summaries of Reddit posts."""

    dataset_name: str = "CarperAI/openai_summarize_comparisons"
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file with the same columns."""
    split: str | None = "2,4,4"
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt; a post has several pairs of summaries."""


def to_row(raw: dict[str, Any]) -> dict[str, Any]:
    """`{prompt, chosen, rejected, columns}` of either published form. Raises: BadRow."""
    if "summaries" in raw:
        return from_feedback(raw)
    prompt = column(raw, "prompt").strip().removesuffix(MARK).rstrip()
    chosen, rejected = (column(raw, name).strip().removeprefix(MARK).strip() for name in ("chosen", "rejected"))
    columns = {name.lower(): value.strip() for name, value in FIELD.findall(prompt)}
    return row_of(prompt, chosen, rejected, columns)


def from_feedback(raw: dict[str, Any]) -> dict[str, Any]:
    """A row of openai/summarize_from_feedback. Raises: BadRow."""
    info, summaries, choice = column(raw, "info", dict), column(raw, "summaries", list), column(raw, "choice", int)
    if len(summaries) != 2 or choice not in (0, 1) or not all(isinstance(summary, dict) for summary in summaries):
        raise BadRow("not_two_summaries_and_a_choice")
    texts = [column(summary, "text").strip() for summary in summaries]
    columns = {name: str(info.get(name) or "") for name in ("subreddit", "title")}
    if info.get("post"):
        prompt = summary_prompt(columns["subreddit"], columns["title"], column(info, "post").strip())
        prompt = prompt.removesuffix(f"\n{MARK}")
    else:
        prompt = f"TITLE: {columns['title']}\nARTICLE: {column(info, 'article').strip()}"
    held_out = "validation" if str(raw.get("split")).startswith("valid") else None
    return row_of(prompt, texts[choice], texts[1 - choice], columns) | ({"split": held_out} if held_out else {})


def row_of(prompt: str, chosen: str, rejected: str, columns: dict[str, str]) -> dict[str, Any]:
    """The prompt ends with the mark; a summary begins with a space, as byte-pair tokens do."""
    if not (chosen and rejected):
        raise BadRow("empty_response")
    return {"prompt": f"{prompt}\n{MARK}", "chosen": f" {chosen}", "rejected": f" {rejected}", "columns": columns}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    run(SummarizationArgs, to_row, argv, stages=STAGES, example_prompt=EXAMPLE)


if __name__ == "__main__":
    main()
