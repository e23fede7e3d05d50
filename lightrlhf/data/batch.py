"""Batches: one alignment of tokens, masks and log-probabilities for all algorithms; collating and batching.

B rows, T tokens, V vocabulary entries, M segments of a response. Values that concern the prediction of token t+1 are
stored at position t, so such tensors have width T-1. Masks travel with the tokens and are never recomputed from
`pad_id` (a model's pad token may be its end token).

Batches and rollouts lie on the host, where rows are selected and lengths and layouts are read. A micro-batch is copied
to the device where a pass and its loss need it, so that no pass has to wait for the one before.

Left out: map-style datasets, samplers and worker processes. The order of an epoch is one seeded permutation, so the
state of a data loader is one index.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrlhf.data.flat import Rows
from lightrlhf.data.splits import IGNORE_INDEX, Row
from lightrlhf.data.tokens import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOST = torch.device("cpu")
INFERENCE_TOKENS = {"cpu": 1024}  # token budget of one forward pass without gradients; see howto/speed.md
AnyBatch = TypeVar("AnyBatch", bound="Batch")
Index = Tensor | tuple[Tensor, ...]  # of actions in (B, T-1): their mask, or their rows and columns


@dataclass(kw_only=True)
class Batch:
    """Token rows with the masks that belong to them."""

    input_ids: Tensor  # (B, T)   int64
    attention_mask: Tensor  # (B, T)   bool, False on padding
    action_mask: Tensor  # (B, T-1) bool, [:, t] True where the loss counts token t+1
    row: Tensor | None = None  # (B,) int64, the row's number in the data, by which errors name it
    group: Tensor | None = None  # (B,) int64, equal in rows that share a prompt, which need not be adjacent
    episode: Tensor | None = None  # (B,) int64, equal in the rows of an episode, in their order; None: a row is one
    source: Batch | None = dataclasses.field(default=None, init=False, repr=False)  # on the host, of a copy on a device

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def on_host(self: AnyBatch) -> AnyBatch:
        """This batch on the host, where reading it waits for nothing; models take its ids and masks."""
        return self if self.source is None else cast(AnyBatch, self.source)

    @property
    def num_actions(self) -> int:
        """Number of tokens that the loss counts."""
        return int(self.on_host.action_mask.sum())

    @property
    def actions(self) -> tuple[Tensor, ...]:
        """Row and column of each action, (N,) both: an index like `action_mask`, which a device need not count."""
        found = self.on_host.action_mask.nonzero(as_tuple=True)
        return tuple(to_device(index, self.input_ids.device) for index in found)

    def last_rows(self) -> Tensor:
        """The last row of each row's episode: (B,) int64."""
        rows = torch.arange(len(self))
        if self.episode is None:
            return rows
        number = self.episode.unique(return_inverse=True)[1]  # (B,)
        return torch.zeros_like(rows).scatter_reduce(0, number, rows, "amax")[number]

    def ends(self) -> Tensor:
        """Whether a row is the last one of its episode: (B,) bool; what counts episodes counts these."""
        return self.last_rows() == torch.arange(len(self))

    def once(self, values: Tensor) -> Tensor:
        """Values (B,) that the rows of an episode share, NaN but in the last row of each episode."""
        return values if self.episode is None else torch.where(self.ends(), values, math.nan)

    def parts(self: AnyBatch, order: Tensor, number: int) -> Iterator[AnyBatch]:
        """The rows in an order (B,) that keeps episodes together, cut into parts of about equally many episodes."""
        sizes = self.last_rows()[order].unique_consecutive(return_counts=True)[1]  # (E,) rows of each episode
        for part in sizes.tensor_split(number):
            rows, order = order.tensor_split([int(part.sum())])
            yield self.select(rows)

    def map(self: AnyBatch, function: Callable[[Tensor], Tensor]) -> AnyBatch:
        """Apply `function` to each tensor; returns a new batch."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {name: function(v) for name, v in values.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **changes)

    def by_length(self, size: int) -> tuple[Tensor, ...]:
        """Row indices in micro-batches of similar length, shortest first; one empty micro-batch without rows."""
        return self.attention_mask.sum(1).argsort(stable=True).split(size)

    def by_group(self, size: int) -> tuple[Tensor, ...]:
        """Row indices in micro-batches of at most `size` rows that keep each group together where it fits.

        A larger group is cut into parts of about equally many rows, of similar length. Groups of similar length share
        a micro-batch, shortest first; one empty micro-batch without rows, and `by_length` without groups.
        """
        if self.group is None or not len(self):
            return self.by_length(size)
        lengths = self.attention_mask.sum(1).tolist()
        parts: list[list[int]] = []
        micros: list[list[int]] = [[]]
        for rows in group_members(self.group):
            count = -(-len(rows) // size)
            rows = sorted(rows, key=lengths.__getitem__)
            parts += [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]
        for part in sorted(parts, key=lambda rows: sum(lengths[i] for i in rows)):
            if len(micros[-1]) + len(part) > size:
                micros.append([])
            micros[-1] += part
        return tuple(torch.tensor(rows) for rows in micros)

    def to(self: AnyBatch, device: torch.device | str) -> AnyBatch:
        moved = self.map(lambda tensor: to_device(tensor, device))
        moved.source = self.on_host
        return moved

    def select(self: AnyBatch, index: Tensor | slice) -> AnyBatch:
        """Select rows, without the padding columns that none of them needs (rows must be right-padded)."""
        rows = self.map(lambda tensor: tensor[index])
        width = max([2, *rows.attention_mask.sum(1).tolist()])
        full = rows.input_ids.shape[1]
        return rows.map(lambda t: t[:, : width - (full - t.shape[1])] if t.dim() == 2 else t)

    def extend(self, kind: type[AnyBatch], **columns: Any) -> AnyBatch:
        """A batch of another kind: the fields that both kinds have, and the given ones."""
        own = {field.name for field in dataclasses.fields(self) if field.init}
        names = {field.name for field in dataclasses.fields(kind)} & own
        return kind(**{name: getattr(self, name) for name in names} | columns)

    def sampled(self, logprobs: Iterable[Iterable[float]]) -> SampledBatch:
        """The batch with the log-probabilities that its actions were sampled with, row by row in their order."""
        values = torch.zeros(self.action_mask.shape)  # (B, T-1)
        values[self.action_mask] = torch.tensor([value for row in logprobs for value in row])
        return self.extend(SampledBatch, logprobs=values)


@dataclass(kw_only=True)
class SampledBatch(Batch):
    """Sampled actions, and how far the trainer's probabilities are from a server's that sampled them."""

    logprobs: Tensor  # (B, T-1) log pi_old of token t+1 at the sampling temperature, 0 off actions
    sampling_gap: Tensor | None = None  # (B, T-1) log of the trainer's probability over a server's, 0 off actions
    staleness: int = 0  # steps that the policy took between the weights that sampled and this process's


@dataclass(kw_only=True)
class Rollout(SampledBatch):
    """Prompts with sampled responses: `[prompt][response][padding]` in each row."""

    group: Tensor  # (B,) int64 number of the prompt among the step's on all ranks
    num_groups: int = 0  # of the step on all ranks
    prompt_len: Tensor  # (B,) int64
    truncated: Tensor  # (B,) bool: stopped by length; no end token is appended
    turn: Tensor | None = None  # (B, T-1) int64 number of the turn of an episode at its actions, 0 elsewhere
    ref_logprobs: Tensor  # (B, T-1) as `logprobs`, under the reference; NaN where there is none
    tokenizer: PreTrainedTokenizerBase | None = None  # of the ids
    columns: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # other columns of the data, a dict per row
    next_prompts: list[list[int]] = dataclasses.field(default_factory=list)  # ids of what is read after a row, if known
    removed_mass: float = 0.0  # mean probability removed from the sampling distribution by top-k, top-p and min-p

    def select(self, index: Tensor | slice) -> Rollout:
        """Select rows, their columns too."""
        rows = super().select(index)
        kept = torch.arange(len(self))[index].tolist()
        rows.columns = [self.columns[i] for i in kept] if self.columns else []
        rows.next_prompts = [self.next_prompts[i] for i in kept] if self.next_prompts else []
        if "texts" in vars(self):
            rows.texts = [self.texts[i] for i in kept]
        return rows

    def masked(self, valid: Tensor) -> Rollout:
        """The same rollout, its texts too, without the actions of rows that are not valid; valid: (B,) bool."""
        rollout = copy.copy(self)
        rollout.action_mask = self.action_mask & valid[:, None]
        return rollout

    def lengths(self) -> Tensor:
        """Tokens of each response: (B,) float32."""
        return (self.attention_mask.sum(1) - self.prompt_len).float()

    def response_ids(self) -> list[list[int]]:
        """Sampled token ids of each row, including the end token if there is one."""
        ends = self.attention_mask.sum(1).tolist()
        starts = self.prompt_len.tolist()
        return [row[a:b] for row, a, b in zip(self.input_ids.tolist(), starts, ends)]

    def prompt_ids(self) -> list[list[int]]:
        """Token ids of each row's prompt."""
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_len.tolist())]

    @functools.cached_property
    def texts(self) -> list[tuple[str, str]]:
        """Prompt and response of each row as text, decoded at the first use."""
        assert self.tokenizer is not None, "a rollout without a tokenizer has no texts"
        ids = zip(self.prompt_ids(), self.response_ids())
        return [(decode(self.tokenizer, prompt), decode(self.tokenizer, response)) for prompt, response in ids]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. From the host the copy does not wait for what the device computes."""
    device = torch.device(device)
    if tensor.device.type != "cpu" or device.type in ("cpu", "mps"):  # MPS may read the source after it is freed
        return tensor.to(device)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """The rows of all, right-padded to one width; episodes are numbered anew."""
    width = max(rollout.input_ids.shape[1] for rollout in rollouts)

    def pad(rows: Tensor, full: int) -> Tensor:
        return F.pad(rows, (0, width - full)) if rows.dim() == 2 else rows

    same = [rollout.map(functools.partial(pad, full=rollout.input_ids.shape[1])) for rollout in rollouts]
    names = [field.name for field in dataclasses.fields(Rollout) if isinstance(getattr(same[0], field.name), Tensor)]
    names = [name for name in names if name != "episode"]  # which a rollout may lack
    changes: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in same]) for name in names}
    if any(rollout.episode is not None for rollout in rollouts):
        starts = itertools.accumulate(map(len, rollouts), initial=0)
        changes["episode"] = torch.cat([one.last_rows() + start for one, start in zip(rollouts, starts)])
    for name in ("columns", "next_prompts"):
        changes[name] = [value for one in same for value in getattr(one, name)]
    whole = dataclasses.replace(same[0], **changes)
    if all("texts" in vars(one) for one in rollouts):
        whole.texts = [texts for one in rollouts for texts in one.texts]
    return whole


def group_members(group: Tensor) -> list[list[int]]:
    """The rows of each group, groups in the order of their first rows; group: (B,)."""
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    return list(members.values())


# ------------------------------------------------------------------------------------------------------- collating
def finetune_batch(rows: Sequence[Row], pad_id: int, use_targets: bool) -> Batch:
    """Right-padded rows for cross-entropy; actions are the tokens with a target, or all without `use_targets`."""
    actions = [
        (torch.as_tensor(row["targets"])[1:] != IGNORE_INDEX if use_targets else [True] * (len(row["input_ids"]) - 1))
        for row in rows
    ]
    return _collate([row["input_ids"] for row in rows], actions, pad_id, row_numbers(rows))


def preference_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """2B right-padded rows, the B chosen ones first; actions are the response tokens, a pair is a group."""
    ids = [row["chosen_input_ids"] for row in rows] + [row["rejected_input_ids"] for row in rows]
    prompt_lens = [row["prompt_len"] for row in rows] * 2
    actions = [_response_actions(n, len(row)) for row, n in zip(ids, prompt_lens)]
    return _collate(ids, actions, pad_id, row_numbers(rows).repeat(2), torch.arange(len(rows)).repeat(2))


def unpaired_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """B right-padded rows; actions are the response tokens."""
    ids = [row["input_ids"] for row in rows]
    actions = [_response_actions(row["prompt_len"], len(row["input_ids"])) for row in rows]
    return _collate(ids, actions, pad_id, row_numbers(rows))


def mismatched_rows(rows: Sequence[Row], others: Sequence[Row], width: int) -> list[Row]:
    """Each row's prompt with the response to another one: the next of `rows`, in a circle, with another prompt.

    Where these rows have one prompt only, the first such row of `others` is taken. Responses are cut to `width` tokens.
    Raises: ValueError when all prompts are the same.
    """
    prompts = [torch.as_tensor(row["input_ids"])[: row["prompt_len"]] for row in rows]
    mismatched = []
    for i, prompt in enumerate(prompts):
        places = ((i + step) % len(rows) for step in range(1, len(rows)))
        other = next((rows[j] for j in places if not torch.equal(prompt, prompts[j])), None)
        if other is None:
            ids = ((row, torch.as_tensor(row["input_ids"])[: row["prompt_len"]]) for row in others)
            other = next((row for row, one in ids if not torch.equal(prompt, one)), None)
        if other is None:
            raise ValueError("all prompts are the same")
        response = torch.as_tensor(other["input_ids"])[other["prompt_len"] :]
        mismatched.append({"prompt_len": len(prompt), "input_ids": torch.cat([prompt, response])[:width]})
    return mismatched


def dialogue_pair_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """2B right-padded rows of dialogues, the B chosen ones first, by pairs; actions by the rows' masks."""
    sides = [(row, side) for side in ("chosen", "rejected") for row in rows]
    ids, actions = ([row[f"{side}_{name}"] for row, side in sides] for name in ("input_ids", "action_mask"))
    return _collate(ids, actions, pad_id, row_numbers(rows).repeat(2), torch.arange(len(rows)).repeat(2))


def masked_batch(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Right-padded rows with a mask each, nonzero at actions."""
    return _collate(ids, [torch.tensor(mask[1:], dtype=torch.bool) for mask in masks], pad_id)


def response_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Right-padded `[prompt][response]` rows; actions are the response tokens."""
    ids = [[*prompt, *response] for prompt, response in zip(prompts, responses)]
    actions = [_response_actions(len(prompt), len(row)) for prompt, row in zip(prompts, ids)]
    return _collate(ids, actions, pad_id)


def number_rows(rows: Sequence[Row], drawn: Sequence[int]) -> list[Row]:
    """Copies of the drawn rows that hold their numbers in the data."""
    return [{**rows[i], "row": i} for i in drawn]


def row_numbers(rows: Sequence[Row]) -> Tensor:
    """Numbers in the data (B,) of rows; of a row that was not drawn its index here."""
    return torch.tensor([row.get("row", i) for i, row in enumerate(rows)], dtype=torch.int64)


def _response_actions(prompt_len: int, length: int) -> Tensor:
    """Action mask (length-1,) of a row: True where the next token belongs to the response."""
    return torch.arange(1, length) >= prompt_len


def _collate(
    ids: Sequence[Sequence[int]],
    actions: Sequence[Tensor | Sequence[bool]],
    pad_id: int,
    row: Tensor | None = None,
    group: Tensor | None = None,
) -> Batch:
    """Right-pad rows of ids and their action masks to one width, at least 2."""
    width = max([2, *map(len, ids)])
    input_ids = torch.full((len(ids), width), pad_id, dtype=torch.int64)  # (B, T)
    attention_mask = torch.zeros(len(ids), width, dtype=torch.bool)  # (B, T)
    action_mask = torch.zeros(len(ids), width - 1, dtype=torch.bool)  # (B, T-1)
    for i, (one, action) in enumerate(zip(ids, actions)):
        input_ids[i, : len(one)] = torch.as_tensor(one)
        attention_mask[i, : len(one)] = True
        action_mask[i, : len(action)] = torch.as_tensor(action, dtype=torch.bool)
    return Batch(input_ids=input_ids, attention_mask=attention_mask, action_mask=action_mask, row=row, group=group)


# -------------------------------------------------------------------------------------------------------- batching
@functools.lru_cache(maxsize=2)  # every step of an epoch asks for it
def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """Seeded permutation (N,) of a split for one epoch, the same on every rank; resuming needs an index into it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator)


def mix_seed(*key: int, start: int = 0) -> int:
    """A seed that depends on all parts of a key and on their order."""
    value = start
    for part in key:
        value = (value * 1_000_003 + part + 1) % (2**63 - 1)
    return value


def seeded_noise(seed: int, *shape: int) -> Tensor:
    """Uniform numbers to sample tokens with, which depend on the seed alone."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def noise_by_row(seeds: Sequence[int], length: int) -> Tensor:
    """Uniform numbers (B, length), each row's by its own seed."""
    return torch.stack([seeded_noise(seed, length) for seed in seeds]) if seeds else torch.empty(0, length)


def row_length(row: Row) -> int:
    """Tokens of a row; of both sides for a pair."""
    return sum(len(value) for key, value in row.items() if key.endswith("input_ids"))


def micro_batch_indices(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Indices of rows in groups of `size` of similar length, shortest first, which need little padding."""
    lengths = rows.lengths().tolist() if isinstance(rows, Rows) else [row_length(row) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    return [order[start : start + size] for start in range(0, len(order), size)]


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Yields the rows of `micro_batch_indices`."""
    for index in micro_batch_indices(rows, size):
        yield [rows[i] for i in index]


def inference_batches(lengths: Tensor, max_rows: int, device: torch.device = HOST) -> Iterator[Tensor]:
    """Yields row indices (b,) of similar length, longest first, for passes without gradients on a device.

    lengths: (B,) on the host.

    The number of rows of each pass: see `inference_batch_size`.
    """
    descending, order = lengths.sort(descending=True, stable=True)
    longest, start = descending.tolist(), 0
    while start < len(order):
        stop = start + inference_batch_size(longest[start], max_rows, device)
        yield order[start:stop]
        start = stop


def inference_batch_size(length: int, max_rows: int, device: torch.device) -> int:
    """Rows of up to `length` tokens in one forward pass without gradients: at most `max_rows`.

    On a CPU at most `INFERENCE_TOKENS` tokens, but at least one row: larger passes were slower there.
    """
    tokens = INFERENCE_TOKENS.get(device.type)
    return max_rows if tokens is None else max(1, min(max_rows, tokens // max(length, 1)))
