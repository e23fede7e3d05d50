"""Rows of prepared data of ours and of TRL's in one form: ids, and which of them carry loss.

TRL's are read by their columns: `input_ids` with `labels`, `completion_mask`, `assistant_masks` or none of them (then
every token is trained); prompts, completions and both sides of a pair as ids, with the prompt in each or apart.

Left out: packed rows without `seq_lengths`, in which documents cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightrlhf.data.schema import IGNORE_INDEX

MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "response_mask")
PROMPTS = ("prompt_input_ids", "prompt_ids", "input_ids_prompt")
ANSWERS = ("completion_input_ids", "completion_ids", "answer_input_ids", "response_ids")
SIDES = ("{}_input_ids", "{}_ids", "input_ids_{}")


class Text(NamedTuple):
    """A text of a row."""

    ids: np.ndarray  # (T,) int64
    trained: np.ndarray  # (T,) bool: the token carries loss
    prompt_len: int | None = None  # where the data says it

    @classmethod
    def of_spans(cls, ids: Any, spans: Iterable[Sequence[int]], prompt_len: int | None = None) -> Text:
        """A text of which [start, end) of each span carry loss."""
        trained = np.zeros(len(ids), bool)
        for start, end in spans:
            trained[start:end] = True
        return cls(np.asarray(ids, dtype=np.int64), trained, prompt_len)


class Item(NamedTuple):
    """A row."""

    kind: str  # "finetune", "preference", "unpaired", "prompts", "dialogue", "refuel", as our stages
    texts: tuple[Text, ...]  # of a pair chosen and rejected
    source: str  # file and row
    split: str
    label: bool | None = None
    faults: tuple[str, ...] = ()  # seen as it was read
    about: str = ""  # what makes a dialogue another one though its text is the same


def is_tokenised(raw: Mapping[str, Any]) -> bool:
    """Whether a raw row of JSON or a table holds ids."""
    names = ("input_ids", *PROMPTS, *ANSWERS, *(form.format("chosen") for form in SIDES))
    return any(_is_ids(raw.get(name)) for name in names)


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray)) and len(value) > 0 and isinstance(value[0], (int, np.integer))


def of_tokenised(raw: Mapping[str, Any], source: str, split: str) -> Iterator[Item]:
    """The rows of a row of ids as TRL has them; several where it was packed."""
    prompt, answer = _first(raw, PROMPTS), _first(raw, ANSWERS)
    chosen, rejected = (_first(raw, [form.format(side) for form in SIDES]) for side in ("chosen", "rejected"))
    if chosen is not None and rejected is not None:
        whole = [Text.of_spans(side, [(0, len(side))]) for side in (chosen, rejected)]
        texts = whole if prompt is None else [_joined(prompt, side) for side in (chosen, rejected)]
        yield Item("preference", tuple(texts), source, split)
    elif answer is not None and prompt is not None:
        label = raw.get("label")
        kind = "finetune" if label is None else "unpaired"
        yield Item(kind, (_joined(prompt, answer),), source, split, None if label is None else bool(label))
    elif raw.get("input_ids") is not None:
        yield from _of_row(raw, source, split)
    elif prompt is not None:
        yield Item("prompts", (Text.of_spans(prompt, [], len(prompt)),), source, split)


def _first(raw: Mapping[str, Any], names: Iterable[str]) -> np.ndarray | None:
    """The first of these columns that a row has."""
    return next((_array(raw[name]) for name in names if raw.get(name) is not None), None)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _joined(prompt: np.ndarray, answer: np.ndarray) -> Text:
    """A prompt and its answer, which some versions store with the prompt."""
    if len(answer) > len(prompt) > 0 and np.array_equal(answer[: len(prompt)], prompt):
        answer = answer[len(prompt) :]
    ids = np.concatenate([prompt, answer])
    return Text.of_spans(ids, [(len(prompt), len(ids))], len(prompt))


def _of_row(raw: Mapping[str, Any], source: str, split: str) -> Iterator[Item]:
    """The documents of a row of `input_ids`."""
    ids = _array(raw["input_ids"])
    faults: list[str] = []
    trained = np.ones(len(ids), bool)
    if raw.get("labels") is not None:
        trained, faults = _by_labels(ids, raw["labels"])
    for name in MASKS:
        mask = raw.get(name)
        if mask is not None and len(mask) == len(ids):
            trained = trained & np.asarray(mask, dtype=bool)
        elif mask is not None:
            faults.append("labels of another length")
    mask = raw.get("attention_mask")
    if mask is not None and len(mask) == len(ids):
        real = np.asarray(mask, dtype=bool)
        if (trained & ~real).any():
            faults.append("padding trained")
        ids, trained = ids[real], trained[real]
    ends = np.cumsum(raw["seq_lengths"]).tolist() if raw.get("seq_lengths") is not None else [len(ids)]
    for start, end in zip([0, *ends], ends):
        yield Item("finetune", (Text(ids[start:end], trained[start:end]),), source, split, faults=tuple(faults))


def _by_labels(ids: np.ndarray, given: Any) -> tuple[np.ndarray, list[str]]:
    """Which ids carry loss by their labels, (T,) bool, and what is wrong with the labels."""
    labels = _array(given)
    if len(labels) != len(ids):
        return np.ones(len(ids), bool), ["labels of another length"]
    trained = labels != IGNORE_INDEX
    if (labels == ids)[trained].all():
        return trained, []
    if not trained[-1] and (labels[:-1] == ids[1:])[trained[:-1]].all():
        return np.concatenate([[False], trained[:-1]]), ["labels shifted already"]  # the mask as it was before
    return trained, ["labels of other tokens"]


def of_prepared(row: Mapping[str, Any], stage: str, source: str, split: str) -> Item:
    """A row of a `.pt` split of ours."""
    faults: list[str] = []
    start, texts = row.get("prompt_len"), []
    for name in [name for name in ("chosen_input_ids", "rejected_input_ids", "input_ids") if name in row]:
        ids = _array(row[name])
        spans = [] if stage == "prompts" else row.get("turn_spans", [(start or 0, len(ids))])
        text = Text.of_spans(ids, spans, start)
        if stage == "finetune":
            trained, found = _by_labels(ids, row["targets"])
            text, faults = text._replace(trained=trained), found
        elif stage == "refuel":
            mask = np.asarray(row[name.replace("input_ids", "action_mask")], dtype=bool)  # of the next token
            text = text._replace(trained=np.concatenate([[False], mask]))
        texts.append(text)
    if stage == "preference" and not np.array_equal(texts[0].ids[:start], texts[1].ids[:start]):
        faults.append("prompts of a pair differ")
    about = repr(row.get("columns")) if stage == "dialogue" else ""
    return Item(stage, tuple(texts), source, split, row.get("label"), tuple(faults), about)


def without_padding(text: Text, pad: int | None, ends: frozenset[int]) -> Text:
    """A text without untrained pad tokens at its begin and end, of which one stays that ends a trained answer."""
    keep = np.flatnonzero((text.ids != pad) | text.trained)
    if pad is None or not len(keep):
        return text
    first, last = int(keep[0]), int(keep[-1]) + 1
    if pad in ends:
        first = 0  # a BOS may be the same token, too
        is_open = text.ids[last - 1] not in ends
        last += int(is_open and last < len(text.ids))
    if (first, last) == (0, len(text.ids)):
        return text
    start = None if text.prompt_len is None else max(text.prompt_len - first, 0)
    return Text(text.ids[first:last], text.trained[first:last], start)


def runs_of(trained: Sequence[bool] | np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of the tokens in a row that are trained."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2]))
