"""Prompts to sample responses to, from prepared splits or from a JSONL file, as rows.

A row has the `prompt`, a text or messages, or its ids as `prompt_ids`; its `index` among the chosen ones; and all other
columns of the data. With answers it has the ids of those that the data gives, too: `ref_ids`, of pairs `rejected_ids`.

Left out: prompts that are drawn while a program runs, as training does (`training/order.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag
from lightrlhf.cli.groups import SealArgs
from lightrlhf.cli.paths import check_file
from lightrlhf.data.responses import ROW, check_row, is_prompt
from lightrlhf.data.splits import check_data_folder, first_answer, load_split
from lightrlhf.data.tokens import decode, encode_prompt, spelled_control
from lightrlhf.storage.jsonl import Row, open_jsonl
from lightrlhf.storage.lazy import Lazy, map_lazily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUBSET_SEED = 1234  # of `--num_prompts`
OF_RESPONSES = {*ROW} - {"prompt", "prompt_ids", "ref_response", "rejected_response"}  # by another model, perhaps


@dataclass(frozen=True, kw_only=True)
class PromptArgs(SealArgs):
    """Prompts."""

    data_dir: str | None = flag(None, check=check_data_folder, required="prompts", show="first")
    """Folder of the `.pt` splits with the prompts."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of `data_dir`."""
    prompts_from: Literal["prompts", "finetune", "preference"] | None = flag(None, needs="data_dir", show="rarely")
    """Which prompts of `data_dir` to use. Default: `prompts_*.pt` if present, else `finetune_*.pt`."""
    prompts_file: str | None = flag(None, check=check_file, required="prompts", show="first")
    """JSONL file with a column `prompt` (text or messages), instead of `data_dir`; earlier responses are left out."""
    num_prompts: int | None = at_least(1, 2000)
    """Largest number of prompts, a random subset in the order of the data, always the same; `null` takes all."""

    def _check(self) -> None:
        if (self.data_dir is None) == (self.prompts_file is None):
            raise ValueError("--data_dir or --prompts_file is required, and not both: the source of the prompts")


def load_prompt_rows(args: PromptArgs, with_answers: bool = False) -> Lazy[Row]:
    """The chosen rows, in the order of the data, each made when it is read.

    with_answers: the data's own answers, too.
    Raises: UsageError naming file and row when a prompt is neither text nor messages; when the data has no answers to
    these prompts and they are wanted.
    """
    if args.data_dir is None:
        rows = read_prompts(args.prompts_file or "")
    else:
        rows = prompts_of_data(args, args.data_dir, with_answers)
    chosen = subset(len(rows), args.num_prompts, SUBSET_SEED)
    return Lazy(range(len(chosen)), lambda number: {**rows[chosen[number]], "index": number})


def digest(rows: Sequence[Row]) -> str:
    """SHA-256 of all rows as one list in JSON."""
    found = hashlib.sha256(b"[")
    for number, row in enumerate(rows):
        found.update(f"{', ' if number else ''}{json.dumps(row)}".encode())
    found.update(b"]")
    return found.hexdigest()


def read_prompts(file: str) -> Lazy[Row]:
    """All rows of a JSONL file, their prompts in the column `prompt`. Raises: UsageError naming the bad row."""

    def with_prompt(number: int, row: Row) -> Row:
        row = {**row, "prompt": prompt_of(row, f"{file}: row {number}")}
        check_row(number, row, file, (), ("prompt_ids",))
        return {name: value for name, value in row.items() if name not in OF_RESPONSES}

    given = open_jsonl(file, each=with_prompt)
    rows = Lazy(given.places, lambda place: with_prompt(place + 1, given[place]))
    if not rows:
        raise UsageError(f"--prompts_file {file} has no rows")
    return rows


def prompt_of(row: Row, where: str) -> str | list[dict[str, str]]:
    """The prompt of a row, in the column `prompt`, `context_messages` or `messages`. Raises: UsageError."""
    prompt = next((row[name] for name in ("prompt", "context_messages", "messages") if name in row), None)
    if isinstance(prompt, list) and is_prompt(prompt):
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt  # an answered dialogue
        if prompt:
            return prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    raise UsageError(f"{where} has no prompt; a column `prompt` with a text or a list of {{role, content}} is required")


def prompts_of_data(args: PromptArgs, data_dir: str, with_answers: bool) -> Lazy[Row]:
    """All rows of `--prompts_from`. Raises: UsageError when answers are wanted but missing."""
    path = Path(data_dir) / f"prompts_{args.split}.pt"
    has_prompts = path.is_file() or not any(Path(data_dir).glob("finetune_*.pt"))
    source = args.prompts_from or ("prompts" if has_prompts else "finetune")
    if source == "prompts" and with_answers:
        raise UsageError(
            f"--ref_scores True: the prompts of {path} have no answers; add --prompts_from preference or finetune"
        )
    rows = load_split(data_dir, source, args.split, args.verify)
    return map_lazily(rows, partial(prompt_row, stage=source, with_answers=with_answers))


def prompt_row(row: Row, stage: str, with_answers: bool) -> Row:
    """The prompt of a row of a stage with its columns, of pairs or demonstrations with or without their answers."""
    sides = {"ref": "input_ids"}
    if stage == "preference":
        sides = {"ref": "chosen_input_ids", "rejected": "rejected_input_ids"}
    ids = {name: torch.as_tensor(row[key]).tolist() for name, key in sides.items()}
    start, end = row["prompt_len"], first_answer(row)  # of a dialogue, whose prompt is its first turn's
    answers = {f"{name}_ids": example[start:end] for name, example in ids.items() if with_answers}
    return {**row.get("columns", {}), "prompt_ids": ids["ref"][:start], **answers}


def subset(count: int, size: int | None, seed: int) -> Sequence[int]:
    """Sorted indices of a random subset; all when there are not more than `size`."""
    if size is None or count <= size:
        return range(count)
    return sorted(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist())


# ------------------------------------------------------------------------------------------------------ ids and texts
def ids_of_prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """Token ids of a prompt. Raises: UsageError for one that is rendered already, or that the template refuses."""
    ids = row.get("prompt_ids")
    if ids and ("prompt" not in row or decode(tokenizer, ids) == row["prompt"]):  # else another tokenizer's
        return list(ids)
    prompt, where = row["prompt"], f"prompt {row['index'] + 1} of --prompts_file"
    if isinstance(prompt, str) and (found := spelled_control(tokenizer, prompt)):
        raise UsageError(f"{where} spells the control token {found}; give messages, which are rendered here")
    try:
        return encode_prompt(tokenizer, prompt, row.get("tools"))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None


def with_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The row with its prompt as text, too; tokenizer: needed where the row has ids alone."""
    return row if "prompt" in row else {**row, "prompt": decode(tokenizer, row["prompt_ids"])}
