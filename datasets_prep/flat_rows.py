"""Rows of a split's file, and the text that their content hash is of, from examples in flat arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from datasets_prep.encoding import STAGES
from datasets_prep.spool import LABELS, NO_COLUMNS, Part
from lightrlhf.data import plain_json
from lightrlhf.data.flat import Ragged
from lightrlhf.data.packing import FlatWriter, offsets_of
from lightrlhf.storage.jsonl import Row


def write_part(file: FlatWriter, part: Part, mask_prompt: bool) -> None:
    """Add examples to a split's file."""
    records, ids = part.records, [torch.from_numpy(side) for side in part.sides]
    first = _offsets(records["first"])
    numbers = {} if file.stage == "dialogue" else {"prompt_len": torch.from_numpy(records["prompt_len"].astype("i4"))}
    if file.stage == "preference":
        chosen, rejected = Ragged(ids[0], first), Ragged(ids[1], _offsets(records["second"]))
        ragged = {"chosen_input_ids": chosen, "rejected_input_ids": rejected}
    else:
        ragged = {"input_ids": Ragged(ids[0], first)}
    if file.stage == "finetune":
        ragged["targets"] = _targets(part, mask_prompt)
    elif file.stage == "unpaired":
        numbers["label"] = torch.from_numpy(records["label"] == LABELS.index(True))
    elif file.stage == "dialogue":
        ragged["turn_spans"] = Ragged(torch.from_numpy(part.spans), _offsets(records["spans"]))
    file.extend_flat(numbers, ragged, part.rest, dict(columns_of(part)))


def columns_of(part: Part) -> Iterator[tuple[int, Row]]:
    """The columns of the examples that have any, by their number."""
    for number in np.flatnonzero(part.records["columns"]).tolist():
        yield number, plain_json.decode(part.rest[number])["columns"]


def _targets(part: Part, mask_prompt: bool) -> Ragged:
    """[start, end) of the tokens that carry loss; spans that touch are one."""
    if not mask_prompt:
        ends = part.records["first"].astype("i4")
        spans = np.stack([np.zeros_like(ends), ends], 1).ravel()
        return Ragged(torch.from_numpy(spans), _offsets(np.full(len(ends), 2)))
    counts = part.records["spans"].astype(np.int64) // 2
    starts, ends = part.spans[::2], part.spans[1::2]  # (sum of counts,) each
    rows = np.repeat(np.arange(len(counts)), counts)
    touches = (starts[1:] == ends[:-1]) & (rows[1:] == rows[:-1])
    is_first, is_last = np.append(True, ~touches), np.append(~touches, True)
    spans = np.stack([starts[is_first], ends[is_last]], 1).ravel()
    return Ragged(torch.from_numpy(spans), _offsets(2 * np.bincount(rows[is_first], minlength=len(counts))))


def _offsets(lengths: np.ndarray) -> Tensor:
    return offsets_of(torch.from_numpy(lengths.astype(np.int64)))


def content(part: Part) -> bytes:
    """What the content hash of a file covers: lengths, spans, columns or messages, labels, and ids."""
    stage = STAGES[part.records["stage"][0]]
    pieces: list[bytes | memoryview] = []
    spans, at = part.spans.tolist(), 0
    ids = [memoryview(side.astype("<i4").tobytes()) for side in part.sides]
    places = [0] * len(ids)
    names = ("prompt_len", "spans", "label", *(("first", "second") if len(ids) > 1 else ("first",)))
    for rest, prompt_len, count, label, *lengths in zip(part.rest, *(part.records[name].tolist() for name in names)):
        extra = "null" if stage == "finetune" else _extra(stage, rest)
        pairs = [spans[i : i + 2] for i in range(at, at + count, 2)]
        more = f", {json.dumps(LABELS[label])}" if LABELS[label] is not None else ""
        pieces.append(f"[{prompt_len}, {pairs}, {extra}{more}]".encode())
        at += count
        for side, length in enumerate(lengths):
            end = places[side] + 4 * length
            pieces += [length.to_bytes(8, "big"), bytes(ids[side][places[side] : end])]
            places[side] = end
    return b"".join(pieces)


def _extra(stage: str, rest: bytes) -> str:
    """The messages or columns of a row as JSON with sorted keys."""
    if not rest or rest == NO_COLUMNS:
        return "{}"
    value = plain_json.decode(rest)["messages" if stage == "dialogue" else "columns"]
    return json.dumps(value, sort_keys=True, default=str)
