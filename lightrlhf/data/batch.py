"""Batches: the one alignment of tokens, masks and log-probabilities that every algorithm shares.

B rows, T tokens, V vocabulary entries, M segments of a response. Whatever concerns the prediction of token t+1 is
stored at position t, so such tensors have width T-1. Masks travel with the tokens and are never recomputed from
`pad_id` (a model's pad token may be its end token).

Left out: map-style datasets, samplers and worker processes. The order of an epoch is one seeded permutation, so an
index is all there is to resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrlhf.data.splits import IGNORE_INDEX, Row

INFERENCE_TOKENS = {"cpu": 1024}  # tokens of a pass without gradients; larger ones were slower, see howto/speed.md
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

    def extend(self, batch_class: type[AnyBatch], **fields: Any) -> AnyBatch:
        """A batch of another class: the fields that both have, and those given."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(batch_class) if hasattr(self, f.name)}
        return batch_class(**own | fields)

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

    def masked(self, valid: Tensor) -> Rollout:
        """The same rollout without the actions of rows that are not valid; valid: (B,) bool."""
        return dataclasses.replace(self, action_mask=self.action_mask & valid[:, None])

    def lengths(self) -> Tensor:
        """Tokens of each response: (B,) float32."""
        return (self.attention_mask.sum(1) - self.prompt_len).float()

    def response_ids(self) -> list[list[int]]:
        """The sampled tokens of each row, end token included where there is one."""
        ends = self.attention_mask.sum(1).tolist()
        starts = self.prompt_len.tolist()
        return [row[a:b] for row, a, b in zip(self.input_ids.tolist(), starts, ends)]

    def prompt_ids(self) -> list[list[int]]:
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_len.tolist())]


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


def mix_seed(*key: int, start: int = 0) -> int:
    """A seed that depends on all parts of a key and on their order."""
    value = start
    for part in key:
        value = (value * 1_000_003 + part + 1) % (2**63 - 1)
    return value


def row_length(row: Row) -> int:
    """Tokens of a row; of both sides for a pair."""
    return sum(len(value) for key, value in row.items() if key.endswith("input_ids"))


def rows_at_once(length: int, most_rows: int, device: torch.device) -> int:
    """How many rows of up to `length` tokens one pass without gradients reads.

    At most `most_rows`; on a processor at most `READ_AT_ONCE` tokens, but one row in any case.
    """
    tokens = INFERENCE_TOKENS.get(device.type)
    return most_rows if tokens is None else max(1, min(most_rows, tokens // max(length, 1)))


def inference_batches(lengths: Tensor, most_rows: int) -> Iterator[Tensor]:
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
