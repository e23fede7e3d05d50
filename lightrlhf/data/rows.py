"""Rows of a program: loaded from `--data_dir`, or made from texts and rows given from Python.

Given rows are prepared ones, as the `.pt` splits hold them, or texts: prompts (a string, chat messages, or a dict with
`prompt` and columns for the reward), `prompt` with `completion`, `prompt` with `chosen` and `rejected`, or `prompt`,
`completion` and `label` (True: a good response). After a prompt of messages a response may be an assistant message. A
dict of splits has validation rows too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import controls
from lightrlhf.data.flat import Rows, chained, share_columns
from lightrlhf.data.mixtures import interleave
from lightrlhf.data.packing import pack
from lightrlhf.data.rendering import has_generation_tags
from lightrlhf.data.schema import COLUMNS, IGNORE_INDEX, TEXTS, Row
from lightrlhf.data.splits import SPLITS, check_counted, drop_equal_pairs, load_prompts, load_split
from lightrlhf.data.tokens import check_shown, encode_prompt, encode_response, spelled_control

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Given = Sequence[Any] | Mapping[str, Sequence[Any]]
Item = TypeVar("Item")


@dataclass
class Splits(Generic[Item]):
    """The training and validation rows of a program."""

    sets: Sequence[Sequence[Item]]  # training rows of each folder of `--data_dir`
    held_out: Sequence[Item]  # validation rows of all of them
    notes: list[str] = field(default_factory=list)  # to print once


class SplitArgs(Protocol):
    """The flags that `load_splits` reads."""

    @property
    def data_dirs(self) -> list[str]: ...

    @property
    def verify(self) -> bool: ...

    @property
    def eval_interval(self) -> int: ...


def load_splits(stage: str, args: SplitArgs, given: Given | None, tokenizer: PreTrainedTokenizerBase) -> Splits[Row]:
    """Training rows, and validation rows unless `--eval_interval 0`, with the same columns. Raises: as `load_rows`."""
    sets = load_sets(stage, "train", args, given, tokenizer)
    held_out = interleave(load_sets(stage, "validation", args, given, tokenizer) if args.eval_interval else [])
    share_columns([*sets, held_out])
    return Splits(sets, held_out)


def load_rows(
    stage: str,
    split: str,
    data_dir: str,
    given: Given | None,
    tokenizer: PreTrainedTokenizerBase | None,
    verify: bool = True,
) -> Rows:
    """Rows of a split: the given ones, else `--data_dir`'s, compared with its seal if `verify`.

    `columns` have the same keys in all rows, see `share_columns`.

    Raises: UsageError when the file cannot be read or has changed, or a row lacks a column or holds a bad value.
    """
    vocab_size = None if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
    if given is None and stage == "prompts":
        return load_prompts(data_dir, split, verify, vocab_size)
    if given is None:
        return load_split(data_dir, stage, split, verify, vocab_size)
    is_table, is_list = hasattr(given, "iterrows"), hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if isinstance(given, str) or is_table or not is_list:
        remedy = "; give its .to_dict('records')" if is_table else ""
        raise UsageError(f"{stage} rows are a list or a dict of splits, not a {type(given).__name__}{remedy}")
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in SPLITS]
        if unknown:
            raise UsageError(f"given rows: {unknown[0]!r} is not a split; the splits are {', '.join(SPLITS)}")
        if isinstance(given.get(split), str):
            raise UsageError(f"given rows: the split {split!r} is a text, not a list")
        rows = list(given.get(split, []))
    else:
        rows = list(given) if split == "train" else []
    if split == "train" and not rows:
        raise UsageError(f"no {stage} rows were given to train on")
    if not rows:
        return chained([])
    assert tokenizer is not None
    rows = [_prepared(row, stage, tokenizer, f"given row {index}") for index, row in enumerate(rows)]
    packed = pack(rows, stage, vocab_size=vocab_size)
    check_counted(packed, "the given rows")
    share_columns([packed])
    return drop_equal_pairs(packed) if stage == "preference" else packed


def load_sets(
    stage: str, split: str, args: SplitArgs, given: Given | None, tokenizer: PreTrainedTokenizerBase
) -> list[Rows]:
    """Rows of a split of each set of `--data_dir`, or those given as one set. Raises: as `load_rows`."""
    return [load_rows(stage, split, folder, given, tokenizer, args.verify) for folder in sources(args, given)]


def sources(args: SplitArgs, given: Given | None) -> list[str]:
    """The sets' folders; given rows are one set."""
    return args.data_dirs if given is None else args.data_dirs[:1]


def _prepared(row: Any, stage: str, tokenizer: PreTrainedTokenizerBase, where: str) -> Row:
    if stage == "prompts" and not isinstance(row, Mapping):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} is a {type(row).__name__}, but {stage} rows are dicts")
    if stage == "unpaired" and not isinstance(row.get("label"), bool):
        raise UsageError(f"{where} has the label {row.get('label')!r}; unpaired rows need label: True or False")
    if stage == "finetune" and row.get("label", True) is not True:
        raise UsageError(f"{where} has label {row['label']!r}, so it is no target; leave it out, or use lightrlhf.kto")
    if COLUMNS[stage] - {"columns"} <= row.keys():
        return {"columns": {}, **row} if "columns" in COLUMNS[stage] else dict(row)
    needed = TEXTS.get(stage, tuple(sorted(COLUMNS[stage])))
    if any(name not in row for name in needed):
        raise UsageError(f"{where} has {sorted(row)}, but {stage} rows need {', '.join(needed)}")
    texts = (*TEXTS[stage], "label") if stage == "unpaired" else TEXTS[stage]
    columns = {name: value for name, value in row.items() if name not in texts}
    asked = row["prompt"]
    tools = None if isinstance(asked, str) else row.get("tools")
    _check_prompt(asked, tokenizer, where)
    if stage == "finetune" and not isinstance(asked, str) and has_generation_tags(tokenizer, tools):
        raise UsageError(
            f"{where}: the chat template has generation tags, which say what of an answer carries loss; write the rows "
            "to a file and prepare it by datasets_prep.generic, which reads them"
        )
    answers = {name: row[name] for name in TEXTS[stage][1:]}
    try:
        for name, answer in answers.items():
            _check_response(answer, asked, tokenizer, tools, f"{where}: {name}")
        prompt = encode_prompt(tokenizer, asked, tools)
        if not prompt:
            raise UsageError(f"{where}: the prompt has no tokens")
        if stage == "prompts":
            return {"prompt_len": len(prompt), "input_ids": torch.tensor(prompt), "columns": columns}
        tokens = {
            name: torch.tensor([*prompt, *encode_response(tokenizer, answer, asked, tools)])
            for name, answer in answers.items()
        }
    except UsageError as problem:
        raise UsageError(f"{problem}" if str(problem).startswith(where) else f"{where}: {problem}") from None
    if stage == "preference":
        sides = {f"{side}_input_ids": tokens[side] for side in ("chosen", "rejected")}
        return {"prompt_len": len(prompt), **sides, "columns": columns}
    ids = tokens["completion"]
    if stage == "unpaired":
        return {"prompt_len": len(prompt), "input_ids": ids, "label": row["label"], "columns": columns}
    targets = torch.cat([torch.full((len(prompt),), IGNORE_INDEX), ids[len(prompt) :]])
    return {"prompt_len": len(prompt), "input_ids": ids, "targets": targets}


def _check_response(response: Any, prompt: Any, tokenizer: PreTrainedTokenizerBase, tools: Any, where: str) -> None:
    is_message = isinstance(response, Mapping) and response.get("role") == "assistant" and "content" in response
    if not isinstance(response, str) and not (is_message and not isinstance(prompt, str)):
        remedy = " or, after messages, an assistant message" if not isinstance(prompt, str) else ""
        raise UsageError(f"{where} is a {type(response).__name__}, not a text{remedy}")
    if isinstance(response, str) and not response.strip():
        raise UsageError(f"{where} is empty; leave the row out")
    if isinstance(prompt, str) and (found := controls(tokenizer).beside_tags.search(str(response))):
        raise UsageError(f"{where} spells the control token {found[0]}; leave it out, end tokens are added")
    if is_message and not (response.get("weight", 1) and response.get("train", True)):
        raise UsageError(f"{where} has weight 0, so it is no target; leave the row out")
    if not isinstance(prompt, str):
        message = {"role": "assistant", "content": response} if isinstance(response, str) else dict(response)
        try:
            check_shown(tokenizer, prompt, message, tools)
        except UsageError as problem:
            raise UsageError(f"{where}: {problem}") from None


def _check_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError(f"{where}: the prompt is empty")
        if found := spelled_control(tokenizer, prompt):
            raise UsageError(f"{where}: the prompt spells the control token {found}; give messages instead")
        return
    if not isinstance(prompt, Sequence) or not prompt:
        raise UsageError(f"{where}: the prompt is a {type(prompt).__name__}, neither a text nor a list of messages")
    if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt):
        raise UsageError(f"{where}: each message of the prompt needs role and content")
    if not tokenizer.chat_template:
        raise UsageError(f"{where}: the prompt is a list of messages, but the tokenizer has no chat template")
