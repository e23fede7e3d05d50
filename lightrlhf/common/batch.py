"""Batches: the one alignment of tokens, masks and log-probabilities that every algorithm shares.

B rows, T tokens, V vocabulary entries, M segments of a response. Whatever concerns the prediction of token t+1 is
stored at position t, so such tensors have width T-1. Masks travel with the tokens and are never recomputed from
`pad_id` (a model's pad token may be its end token).

This file also turns text into ids (the demo and the data preparation call the very same functions), reads the `.pt`
splits and lays rows out in batches. Left out: map-style datasets, samplers and worker processes. A split is a list
that fits in memory, its order in an epoch is one seeded permutation, so an index is all there is to resume.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrlhf.common.args import UsageError, first_line

IGNORE_INDEX = -100
SPLITS = ("train", "validation", "test")
READ_AT_ONCE = {"cpu": 1024}  # tokens of a pass without gradients; larger ones were slower, see howto/speed.md
COLUMNS = {
    "finetune": {"prompt_len", "input_ids", "targets"},
    "preference": {"prompt_len", "chosen_input_ids", "rejected_input_ids"},
    "prompts": {"prompt_len", "input_ids", "columns"},
    "dialogue": {"messages", "input_ids", "turn_spans"},
    "refuel": {f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "action_mask", "reward")},
}
Row = dict[str, Any]
AnyBatch = TypeVar("AnyBatch", bound="Batch")


@dataclass(kw_only=True)
class Batch:
    """Token rows with the masks that belong to them."""

    input_ids: Tensor  # (B, T)   int64
    attention_mask: Tensor  # (B, T)   bool, False on padding
    action_mask: Tensor  # (B, T-1) bool, [:, t] True where the loss counts token t+1
    sequence_ids: Tensor | None = None  # (B, T) int64, packed rows only: 1, 2, … per example, 0 on padding
    paired: bool = False  # the rows are pairs, the chosen texts first, then the rejected ones in the same order

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_actions(self) -> int:
        """How many tokens the loss counts."""
        return int(self.action_mask.sum())

    def map(self: AnyBatch, function: Callable[[Tensor], Tensor]) -> AnyBatch:
        """The same batch with `function` applied to each tensor."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{k: function(v) if isinstance(v, Tensor) else v for k, v in values.items()})

    def to(self: AnyBatch, device: torch.device | str) -> AnyBatch:
        return self.map(lambda tensor: tensor.to(device))

    def select(self: AnyBatch, index: Tensor | slice) -> AnyBatch:
        """The rows at `index`, cut to the longest of them (rows must be padded on the right)."""
        rows = self.map(lambda tensor: tensor[index])
        rows.paired = False
        width = max([2, *rows.attention_mask.sum(1).tolist()])
        full = rows.input_ids.shape[1]
        return rows.map(lambda t: t[:, : width - (full - t.shape[1])] if t.dim() == 2 else t)


@dataclass(kw_only=True)
class Rollout(Batch):
    """Prompts with sampled responses: `[prompt][response][padding]` in each row."""

    prompt_len: Tensor  # (B,) int64
    truncated: Tensor  # (B,) bool: stopped by length, no end token was invented
    logprobs: Tensor  # (B, T-1) log pi_old of token t+1 at the sampling temperature, whole vocabulary, 0 off actions
    ref_logprobs: Tensor  # (B, T-1) the same under the reference
    columns: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the data's other columns, a dict a row
    removed_mass: float = 0.0  # mean probability that top-k and top-p took out of the sampling distribution

    def response_ids(self) -> list[list[int]]:
        """The sampled tokens of each row, end token included where there is one."""
        ends = self.attention_mask.sum(1).tolist()
        starts = self.prompt_len.tolist()
        return [row[a:b] for row, a, b in zip(self.input_ids.tolist(), starts, ends)]

    def prompt_ids(self) -> list[list[int]]:
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_len.tolist())]


# ------------------------------------------------------------------------------------------------- text and tokens
def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Ids of a prompt, exactly as in the prepared data.

    A string is tokenised without special tokens behind one BOS (where the tokenizer adds one by itself); messages
    are rendered once by the tokenizer's chat template, which writes its own special tokens.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        bos = tokenizer.bos_token_id
        if bos is not None and adds_bos(tokenizer) and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def messages_of(tokenizer: Any, ids: Sequence[int]) -> list[dict[str, str]] | None:
    """The dialogue that the chat template renders as just these ids of a prompt; None where there is none.

    What the template writes around the turns is found by rendering a dialogue of known words.
    """
    if not tokenizer.chat_template:
        return None
    words = ["first-turn-words", "second-turn-words", "third-turn-words"]
    known = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    shape = tokenizer.apply_chat_template(known, tokenize=False, add_generation_prompt=True)
    parts = re.split("|".join(words), shape)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if len(parts) != 4 or not all(parts[1:3]) or not (text.startswith(parts[0]) and text.endswith(parts[3])):
        return None
    start, behind_user, behind_assistant, end = parts
    rounds = text[len(start) : len(text) - len(end)].split(behind_assistant)
    *answered, last = [turn.split(behind_user) for turn in rounds]
    if len(last) != 1 or any(len(turn) != 2 for turn in answered):
        return None
    contents = [content for turn in (*answered, last) for content in turn]
    found = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return found if encode_prompt(tokenizer, found) == list(ids) else None


def summary_prompt(subreddit: str, title: str, post: str) -> str:
    """A Reddit post as the summarization set writes it; the space behind the mark belongs to the summary."""
    return f"SUBREDDIT: r/{subreddit}\nTITLE: {title}\nPOST: {post}\nTL;DR:"


def summary_fields(prompt: str) -> tuple[str, str, str] | None:
    """Subreddit, title and post of such a prompt; None of any other."""
    found = re.fullmatch(r"SUBREDDIT: r/(.*?)\nTITLE: (.*?)\nPOST: (.*)\nTL;DR:", prompt, re.DOTALL)
    return found and found.groups()


def encode_response(tokenizer: Any, response: str) -> list[int]:
    """Ids of a response with exactly one end token behind it.

    It is tokenised behind an end token, which is split off first and then cut away: a SentencePiece tokenizer begins
    a text with a space of its own, but not what goes on after a token.
    """
    eos = tokenizer.eos_token_id
    ids = tokenizer(tokenizer.eos_token + response, add_special_tokens=False)["input_ids"][1:]
    return ids if ids[-1:] == [eos] else [*ids, eos]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids, special tokens left out, spaces kept as they were sampled."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer by itself begins a text with its BOS token."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


# ------------------------------------------------------------------------------------- reading and writing splits
def load_split(data_dir: str | Path, stage: str, split: str) -> list[Row]:
    """Rows of `{data_dir}/{stage}_{split}.pt`.

    Raises: UsageError, one line naming the file, when it is missing, damaged, holds code instead of data, is empty,
    or belongs to another stage.
    """
    path = Path(data_dir) / f"{stage}_{split}.pt"
    if not path.is_file():
        found = sorted(p.name for p in Path(data_dir).glob("*_*.pt"))
        raise UsageError(f"{path} does not exist; {data_dir} holds {', '.join(found) or 'no .pt split'}")
    try:
        rows = torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(f"{path} holds objects other than plain data and was not opened; prepare it again") from None
    except Exception as problem:
        raise UsageError(
            f"{path} is damaged ({type(problem).__name__}: {first_line(problem)}); prepare it again"
        ) from None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} holds no rows; prepare it again with more data or longer --max_length")
    for index, row in enumerate(rows):
        _check_row(row, stage, f"{path}: row {index}")
    return rows


def save_split(data_dir: str | Path, stage: str, split: str, rows: Sequence[Row]) -> Path:
    """Write `{data_dir}/{stage}_{split}.pt`, whole or not at all: ids as int32 views of one tensor, as prepared data.

    Raises: UsageError when it cannot be written.
    """
    names = [name for name in rows[0] if name.endswith("input_ids")]
    parts = [torch.as_tensor(row[name], dtype=torch.int32) for row in rows for name in names]
    views = iter(torch.cat(parts).split([len(part) for part in parts]))
    laid = [{**row, **{name: next(views) for name in names}} for row in rows]
    path = Path(data_dir) / f"{stage}_{split}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(laid, path.with_name(path.name + ".partial"))
        path.with_name(path.name + ".partial").replace(path)
    except (OSError, RuntimeError) as problem:  # torch tells of a full disk by the latter
        raise UsageError(f"{path} cannot be written: {first_line(problem)}") from None
    return path


def _check_row(row: Any, stage: str, where: str) -> None:
    if not isinstance(row, dict) or not COLUMNS[stage] <= row.keys():
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise UsageError(f"{where} has {keys}, but the {stage} stage needs {sorted(COLUMNS[stage])}")
    if stage == "finetune":
        ids, targets = row["input_ids"], torch.as_tensor(row["targets"])
        if len(targets) != len(ids):
            raise UsageError(f"{where} has {len(ids)} input_ids but {len(targets)} targets; prepare it again")
        if ((targets < 0) & (targets != IGNORE_INDEX)).any():
            raise UsageError(f"{where} ignores targets by another number than {IGNORE_INDEX}; prepare it again")


def load_prompts(data_dir: str | Path, split: str) -> list[Row]:
    """Rows `prompt_len, input_ids (the prompt alone), columns`: of `prompts_*.pt`, else the prompts of `finetune_*`."""
    if (Path(data_dir) / f"prompts_{split}.pt").is_file():
        return load_split(data_dir, "prompts", split)
    return [
        {"prompt_len": row["prompt_len"], "input_ids": row["input_ids"][: row["prompt_len"]], "columns": {}}
        for row in load_split(data_dir, "finetune", split)
    ]


def longest_text(rows: Sequence[Row]) -> int:
    """Tokens of the longest text of these rows."""
    return max(len(row[key]) for row in rows for key in row if key.endswith("input_ids"))


def check_vocabulary(rows: list[Row], vocab_size: int, where: str) -> None:
    """Raises: UsageError when a row holds an id that the model has no embedding for."""
    ids = [torch.as_tensor(row[key]) for row in rows for key in row if key.endswith("input_ids") and len(row[key])]
    smallest, largest = min(int(row.min()) for row in ids), max(int(row.max()) for row in ids)
    if smallest < 0 or largest >= vocab_size:
        raise UsageError(
            f"{where} holds token id {min(smallest, 0) or largest}, but the model knows {vocab_size} tokens; "
            "prepare the data again with --tokenizer_name of this model"
        )


# --------------------------------------------------------------------------------------------------------- layout
def finetune_batch(rows: Sequence[Row], pad_id: int, use_targets: bool) -> Batch:
    """Right-padded rows for cross-entropy; `use_targets` counts what has a target, otherwise the whole text counts."""
    actions = [
        (torch.as_tensor(row["targets"])[1:] != IGNORE_INDEX if use_targets else [True] * (len(row["input_ids"]) - 1))
        for row in rows
    ]
    return _pad([row["input_ids"] for row in rows], actions, pad_id)


def preference_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """2B right-padded rows, the B chosen ones first; actions are the response tokens."""
    ids = [row["chosen_input_ids"] for row in rows] + [row["rejected_input_ids"] for row in rows]
    prompt_lens = [row["prompt_len"] for row in rows] * 2
    return _pad(ids, [_behind(n, len(row)) for row, n in zip(ids, prompt_lens)], pad_id, paired=True)


def dialogue_pair_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """2B right-padded rows of dialogues, the B chosen ones first; each brings its own mask of actions."""
    sides = [(row, side) for side in ("chosen", "rejected") for row in rows]
    columns = ([row[f"{side}_{name}"] for row, side in sides] for name in ("input_ids", "action_mask"))
    return _pad(*columns, pad_id, paired=True)


def pair_prompt(tokenizer: Any, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Ids by which a pair-preference model is asked whether the first response is the better one."""
    marks = [tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in ("\n\n[A]", "\n\n[B]", "\n\n[?]")]
    return [*prompt, *marks[0], *first, *marks[1], *second, *marks[2]]


def pair_rows(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Preference rows for a pair-preference model: both orders of the two responses, the better one first in `chosen`.

    So all that works on preference rows works on these: the score of `chosen` must be the higher one.
    """
    found = []
    for row in rows:
        start = row["prompt_len"]
        chosen, rejected = (torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected"))
        prompt, better, worse = chosen[:start], chosen[start:], rejected[start:]
        sides = {
            "chosen_input_ids": pair_prompt(tokenizer, prompt, better, worse),
            "rejected_input_ids": pair_prompt(tokenizer, prompt, worse, better),
        }
        found.append({**row, **sides})
    return found


def response_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Right-padded `[prompt][response]` rows; actions are the response tokens."""
    ids = [[*prompt, *response] for prompt, response in zip(prompts, responses)]
    return _pad(ids, [_behind(len(prompt), len(row)) for prompt, row in zip(prompts, ids)], pad_id)


def pack(batch: Batch, width: int, pad_id: int) -> Batch:
    """The rows of a right-padded batch laid end to end in rows of `width` tokens (first-fit, longest first).

    `sequence_ids` tells the examples apart, for attention that stays within each and positions that restart. The last
    token of one example never predicts the first of the next.
    """
    lengths = batch.attention_mask.sum(1).tolist()
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(batch)), key=lambda i: -lengths[i]):
        fits = next((b for b, free in enumerate(room) if free >= lengths[row]), None)
        if fits is None:
            bins.append([])
            room.append(max(width, lengths[row]))
            fits = len(bins) - 1
        bins[fits].append(row)
        room[fits] -= lengths[row]
    ids, actions, sequences = [], [], []
    for members in bins:
        ids.append([t for i in members for t in batch.input_ids[i, : lengths[i]].tolist()])
        actions.append([a for i in members for a in [*batch.action_mask[i, : lengths[i] - 1].tolist(), False]][:-1])
        sequences.append([n for n, i in enumerate(members, start=1) for _ in range(lengths[i])])
    packed = _pad(ids, actions, pad_id)
    packed.sequence_ids = torch.zeros_like(packed.input_ids)  # (B, T)
    for row, numbers in enumerate(sequences):
        packed.sequence_ids[row, : len(numbers)] = torch.tensor(numbers)
    return packed


def _behind(prompt_len: int, length: int) -> Tensor:
    """(length-1,) bool: where the next token lies behind the prompt."""
    return torch.arange(1, length) >= prompt_len


def _pad(ids: Sequence[Sequence[int]], actions: Sequence[Sequence[bool]], pad_id: int, paired: bool = False) -> Batch:
    width = max([2, *map(len, ids)])
    input_ids = torch.full((len(ids), width), pad_id, dtype=torch.int64)  # (B, T)
    attention_mask = torch.zeros(len(ids), width, dtype=torch.bool)  # (B, T)
    action_mask = torch.zeros(len(ids), width - 1, dtype=torch.bool)  # (B, T-1)
    for i, (row, action) in enumerate(zip(ids, actions)):
        input_ids[i, : len(row)] = torch.as_tensor(row)
        attention_mask[i, : len(row)] = True
        action_mask[i, : len(action)] = torch.as_tensor(action, dtype=torch.bool)
    return Batch(input_ids=input_ids, attention_mask=attention_mask, action_mask=action_mask, paired=paired)


# ---------------------------------------------------------------------------------------------------------- order
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The seeded order of a split in one epoch: the same on every rank, and all that resuming needs beside an index."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def row_length(row: Row) -> int:
    """Tokens of a row; of both sides for a pair."""
    return sum(len(value) for key, value in row.items() if key.endswith("input_ids"))


def rows_at_once(length: int, most_rows: int, device: torch.device) -> int:
    """How many rows of up to `length` tokens one pass without gradients reads.

    At most `most_rows`; on a processor at most `READ_AT_ONCE` tokens, but one row in any case.
    """
    tokens = READ_AT_ONCE.get(device.type)
    return most_rows if tokens is None else max(1, min(most_rows, tokens // max(length, 1)))


def reading_passes(lengths: Tensor, most_rows: int) -> Iterator[Tensor]:
    """Numbers (b,) of rows of like length, the longest first, for passes without gradients; lengths: (B,)."""
    longest, order = lengths.sort(descending=True, stable=True)
    longest, start = longest.tolist(), 0
    while start < len(order):
        stop = start + rows_at_once(longest[start], most_rows, order.device)
        yield order[start:stop]
        start = stop


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Groups of `size` rows of like length, so that little of a pass is spent on padding."""
    ordered = sorted(rows, key=row_length)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
