"""Samples to be scored, and their token ids in a scorer's tokenizer.

A scorer may have another tokenizer and chat template than the policy. Sampled ids that decode to the same text in the
scorer's tokenizer are scored as they are, never tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightrlhf.data.batch import Rollout
from lightrlhf.data.responses import ROW
from lightrlhf.data.tokens import decode, encode_prompt, encode_response
from lightrlhf.data.turn_ends import turn_ends, without_end
from lightrlhf.data.types import Tokenizer

Messages = list[dict[str, str]]


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers map text to the same ids."""
    return one is other or (one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id)


class Sample(NamedTuple):
    """A response to be scored."""

    prompt: str | Messages
    response: str
    truncated: bool = False  # stopped by its length: no end token is appended
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    columns: dict[str, Any] = {}
    tokenizer: Tokenizer | None = None  # of the ids; without it they are checked against the text


def samples_of(rollout: Rollout) -> list[Sample]:
    """A rollout's responses as samples."""
    ids = zip(rollout.prompt_ids(), rollout.response_ids())
    rows = zip(rollout.texts, rollout.truncated.tolist(), ids, rollout.columns)
    return [Sample(*texts, cut, *own, columns, rollout.tokenizer) for texts, cut, own, columns in rows]


def samples_of_row(row: dict[str, Any]) -> list[Sample | None]:
    """The responses of a row as `lightrlhf.generate` writes it; None for a missing one."""
    ids = row.get("response_ids") or [None] * len(row["responses"])
    truncated = row.get("truncated") or [False] * len(row["responses"])
    columns = {name: value for name, value in row.items() if name not in ROW}
    return [
        None if text is None else Sample(row["prompt"], text, bool(cut), row.get("prompt_ids"), own, columns)
        for text, cut, own in zip(row["responses"], truncated, ids)
    ]


@dataclass
class Encoding:
    """How samples become token ids of a scorer."""

    tokenizer: Tokenizer
    wrap_prompts: bool = False  # whether a text prompt becomes a user message
    longest: int | None = None  # positions of the model
    same: dict[int, bool] = field(default_factory=dict, repr=False)  # other tokenizers, by identity

    def prompt_and_response(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Ids of both, the response ending with one end token unless it was truncated."""
        if ids := self.sampled_ids(sample):
            return ids
        prompt = sample.prompt
        if self.wrap_prompts and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        start = self.known_prompt(sample) or encode_prompt(self.tokenizer, prompt)
        response = encode_response(self.tokenizer, sample.response, prompt)
        return start, without_end(self.tokenizer, response) if sample.truncated else response

    def sampled_ids(self, sample: Sample) -> tuple[list[int], list[int]] | None:
        """The sample's own ids, if in this tokenizer they are the same prompt and response."""
        response = sample.response_ids
        if response is None:
            return None
        if not self.is_same(sample.tokenizer):
            if not response or not self.knows(response, sample.tokenizer):
                return None
            if not self.may_end(response[-1], sample.truncated) or decode(self.tokenizer, response) != sample.response:
                return None
        prompt = self.known_prompt(sample)
        return None if prompt is None else (prompt, list(response))

    def known_prompt(self, sample: Sample) -> list[int] | None:
        """The sample's own ids of the prompt, if in this tokenizer they are the same prompt.

        Its text alone may have lost the control tokens of a chat template.
        """
        prompt = sample.prompt_ids
        if prompt is None or (self.wrap_prompts and isinstance(sample.prompt, str)):
            return None
        if self.is_same(sample.tokenizer):
            return list(prompt)
        if not prompt or not self.knows(prompt, sample.tokenizer):
            return None
        if isinstance(sample.prompt, str):
            equal = decode(self.tokenizer, prompt) == sample.prompt
        else:
            equal = encode_prompt(self.tokenizer, sample.prompt) == list(prompt)
        return list(prompt) if equal else None

    def is_same(self, tokenizer: Tokenizer | None) -> bool:
        """Whether another tokenizer gives the ids of this one; False when it is not known."""
        if tokenizer is None:
            return False
        if id(tokenizer) not in self.same:
            self.same[id(tokenizer)] = same_tokenizer(self.tokenizer, tokenizer)
        return self.same[id(tokenizer)]

    def knows(self, ids: Sequence[int], tokenizer: Tokenizer | None) -> bool:
        """Whether the tokenizer has these ids, and another one, where it is known, the same tokens for them."""
        if max(ids) >= len(self.tokenizer):
            return False
        ids = list(ids)
        return tokenizer is None or self.tokenizer.convert_ids_to_tokens(ids) == tokenizer.convert_ids_to_tokens(ids)

    def may_end(self, last: int, truncated: bool) -> bool:
        """Whether a response can end with this id; the end token of another tokenizer may be any token of this one."""
        if last in (self.tokenizer.eos_token_id, *turn_ends(self.tokenizer)):
            return not truncated
        return truncated or last not in self.tokenizer.all_special_ids  # ended by a stop string

    def fits(self, length: int) -> bool:
        return 0 < length <= (self.longest or math.inf)
