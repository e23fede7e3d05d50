"""What the rows of TRL's trainers should be, by the texts that they were made of: prompts' ends, sides and ids.

Tokenises the columns of the data set once more, by itself. Where a data set has no texts any more, nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.data.types import Tokenizer

MOST = 4096  # examples that are looked up
SIDES = ("chosen", "rejected")
Ids = tuple[int, ...]


class Origins:
    """The example of each row, by its ids, of a data set that was prepared."""

    def __init__(self, trainer: Any) -> None:
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self.of_ids: dict[Ids, tuple[Mapping[str, Any], str]] = {}
        data: Any = getattr(trainer, "train_dataset", None)
        names = getattr(data, "column_names", None) or []
        args = vars(trainer.args)
        self.of_assistant = bool(args.get("assistant_only_loss")) and getattr(trainer, "chat_template", None) is None
        self.of_responses = getattr(trainer, "completion_only_loss", True) is not False and not self.of_assistant
        is_packed = bool(args.get("packing"))
        self.is_whole = not is_packed and (
            hasattr(data, "__len__") and len(data) <= MOST and ("input_ids" in names or _of(names, "chosen"))
        )
        if not self.is_whole:
            return
        for example in data:
            if "input_ids" in names:
                self.of_ids[tuple(example["input_ids"])] = (example, "completion")
                continue
            prompt = example[_of(names, "prompt")]
            for side in SIDES:
                self.of_ids[(*prompt, *example[_of(names, side)])] = (example, side)

    def find(self, ids: Sequence[int]) -> tuple[Mapping[str, Any], str] | None:
        """The example of a row, and which side of it."""
        return self.of_ids.get(tuple(ids))

    def known(self, ids: Sequence[int], is_cut: bool) -> dict[str, Any]:
        """Of a row: is_known, prompt_len or response_mask, side (1 chosen) and differs_at, as far as the data set says.

        is_cut: whether the row may be a part of an example.
        """
        found = self.find(ids)
        if found is None:
            return {"is_known": 0.0} if self.is_whole and not is_cut else {}
        example, side = found
        known: dict[str, Any] = {"is_known": 1.0} | ({"side": float(side == SIDES[0])} if side in SIDES else {})
        prompt = example.get("prompt")
        if prompt is not None and side in example:
            prompts = prompt_ids(self.tokenizer, prompt, example)
            if self.of_responses:
                known["prompt_len"] = float(max(common(one, ids) for one in prompts))
            wholes = whole_ids(self.tokenizer, prompt, example[side], example)
        elif example.get("messages") is not None:
            wholes = [_template(self.tokenizer, example["messages"], example)]
            if self.of_assistant:
                known["response_mask"] = self.answers(example)[: len(ids)]
        else:
            return known
        known["differs_at"] = differs_at(ids, wholes)
        return known

    def answers(self, example: Mapping[str, Any]) -> Tensor:
        """1 at the tokens of the assistant, by the marks of the template: (T,)."""
        made = self.tokenizer.apply_chat_template(
            example["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return torch.tensor(made["assistant_masks"]) > 0


def _of(names: Sequence[str], side: str) -> str:
    """The column of a side's ids, which had another name before TRL 1.0; or ""."""
    return next((one for one in (f"{side}_ids", f"{side}_input_ids") if one in names), "")


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common start."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def differs_at(ids: Sequence[int], wholes: Iterable[Sequence[int]]) -> float:
    """The first token of a row that was not expected, or NaN; rows may be cut at either end."""
    ids, nearest = list(ids), -1.0
    for whole in map(list, wholes):
        if ids == whole[: len(ids)] or (len(ids) < len(whole) and ids == whole[-len(ids) :]):
            return math.nan
        nearest = max(nearest, float(common(ids, whole)))
    return nearest


def prompt_ids(tokenizer: Tokenizer, prompt: Any, example: Mapping[str, Any]) -> list[list[int]]:
    """Ids that a prompt may have: with and without the tokens that a tokenizer adds, for plain text."""
    if isinstance(prompt, str):
        # Raw text: of the user's data, to see which ids TRL makes of it.
        return [tokenizer(prompt)["input_ids"], tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    is_open = prompt[-1]["role"] == "assistant"
    ending = {"continue_final_message": True} if is_open else {"add_generation_prompt": True}
    return [_template(tokenizer, prompt, example, **ending)]


def whole_ids(tokenizer: Tokenizer, prompt: Any, answer: Any, example: Mapping[str, Any]) -> list[list[int]]:
    """Ids that a prompt and its answer may have: in one text or two, with an end token where TRL adds one."""
    if not isinstance(prompt, str):
        return [_template(tokenizer, [*prompt, *answer], example)]
    end = tokenizer.eos_token or ""
    made = []
    for text in (answer, answer if answer.endswith(end) else answer + end):
        made.append(tokenizer(prompt + text)["input_ids"])
        for first in prompt_ids(tokenizer, prompt, example):
            made.append(first + tokenizer(text, add_special_tokens=False)["input_ids"])
    return made + [one + [tokenizer.eos_token_id] for one in made if one[-1:] != [tokenizer.eos_token_id]]


def _template(tokenizer: Tokenizer, messages: Any, example: Mapping[str, Any], **options: Any) -> list[int]:
    """Ids of messages by the tokenizer's template."""
    tools = example.get("tools") or None
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, **options, **(example.get("chat_template_kwargs") or {})
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def rewarded_rows(tokenizer: Tokenizer, texts: Sequence[Any], ids: Sequence[Sequence[int]]) -> list[float]:
    """For each rewarded text the row whose response it is, its own where it may be, or NaN."""
    decoded = [tokenizer.decode(list(one), skip_special_tokens=True) for one in ids]
    found = []
    for row, text in enumerate(texts):
        text = text if isinstance(text, str) else (text[-1].get("content") or "" if text else "")
        same = [one for one, other in enumerate(decoded) if other == text]
        found.append(float(row if row in same else same[0] if same else math.nan))
    return found
