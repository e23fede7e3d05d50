"""Batched encoding of rows of text as rows of token ids.

The prompt of each assistant turn and its answer are rendered by the chat template (`turns`), tokenised separately and
joined as ids, because a token must never span the border between them (BPE would merge across it, and the model would
learn to continue a prompt that it never sees). So masks are sums of lengths, exact by construction, without a search
for markers among ids.

A dialogue is one row as long as the ids of each prompt begin with those of the turns before it. Where a template
rewrites earlier turns, such as one that removes the reasoning of past answers, a new row begins: each row is exactly
what the model reads when it is served, and each answer carries loss in one row.

Left out: truncation of a dialogue at its beginning.
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datasets_prep.borders import is_bytes_of_words
from datasets_prep.plans import Plan, Planner, Segment
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import FIELDS, MARK, check_spelling
from lightrlhf.data.tokens import Piece, adds_bos, own_ids, text_pieces
from lightrlhf.data.turn_ends import close_turn
from lightrlhf.storage.jsonl import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVERY = 97  # of so many rows one is encoded both ways; a prime, for data with a period
STAGES = ("finetune", "preference", "unpaired", "prompts", "dialogue")


SHOWN = ("role", *FIELDS)  # of a message in a row of dialogues, in this order
PLAIN = ["role", "content"]
LOSSY = ("tokens_do_not_give_back_the_text",)
CUT = ("dialogue_of_several_rows_for_the_template_rewrites_past_turns",)
Tokens = tuple[list[int], list[tuple[int, int]]]  # ids, and the characters of each where they are needed
EncodedPiece = tuple[Piece, list[int], list[tuple[int, int]]]  # with the ids and characters of it alone


class Encoded(NamedTuple):
    """A tokenised segment."""

    ids: np.ndarray  # (n,) int32
    kept: np.ndarray | None = None  # (n,) bool: the ids that carry loss; None: all
    spells: bool = False  # whether a content became a control token
    lossy: bool = False  # whether the ids decode to another text
    turns: list[tuple[int, int]] | None = None  # [start, end) of the answers of a whole dialogue, where they are found

    def spans(self) -> list[tuple[int, int]]:
        """[start, end) of the ids that carry loss."""
        if self.kept is None:
            return [(0, len(self.ids))]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.kept, [0]]))).tolist()
        return list(zip(edges[::2], edges[1::2]))


class Joined(NamedTuple):
    """Ids of a row before the limits on their length."""

    prompt_len: int
    sides: list[np.ndarray]  # the row; or chosen and rejected
    spans: list[tuple[int, int]]  # [start, end) that carry loss


@dataclass(slots=True)
class Example:
    """One tokenised row of one stage."""

    stage: str
    prompt_len: int
    place: Place
    ids: list[np.ndarray]  # int32: the row; or chosen and rejected
    spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each response
    cut: bool = False  # whether max_length truncated it, so that it has no end token
    key: int = 0  # hash that identifies equal inputs: of the prompt's ids, or of a dialogue's user turns and columns
    extra: Any = None  # the columns of a prompt or a pair, the messages of a dialogue
    columns: Row = field(default_factory=dict)  # of a dialogue
    label: bool | None = None  # of unpaired feedback
    notes: tuple[str, ...] = ()  # what was read otherwise than one may expect, by which the report counts
    read_as: str | None = None  # the format of the raw row
    row: Row | None = None  # kept if skipped examples are saved


@dataclass
class Dropped:
    """A dropped row and the reason."""

    reason: str
    source: str
    stage: str | None = None  # None: dropped before its stage was known
    row: Row | None = None  # kept if skipped examples are saved


class Place(NamedTuple):
    """The split and stages of a row."""

    group: int  # rows of one group never cross splits or stages
    split: str
    stages: frozenset[str]
    source: str  # file:line, for error messages


class NotFound(Exception):
    """The turns of a dialogue are not found in the ids of its text."""


class Made(NamedTuple):
    """What one row gives."""

    plans: list[tuple[Plan, Place]]
    examples: list[Example]
    dropped: list[Dropped]

    def equals(self, other: Made) -> bool:
        """Whether another way gave the same."""

        def values(example: Example) -> list[Any]:
            return [getattr(example, one.name) for one in fields(example) if one.name != "ids"]

        pairs = list(zip(self.examples, other.examples))
        return self.dropped == other.dropped and len(self.examples) == len(other.examples) and all(
            values(one) == values(two) and all(map(np.array_equal, one.ids, two.ids)) for one, two in pairs
        )  # fmt: skip


class Encoder:
    """Encodes a chunk of rows; picklable for worker processes.

    `wraps`: plain prompts become a user message of the chat template.
    """

    def __init__(
        self, args: Any, tokenizer: PreTrainedTokenizerBase, place: Callable[[Row], Place], wraps: bool = False
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.place = place
        self.plans = Planner(args, tokenizer, wraps)
        self.bos = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        self.is_lossless = tokenizer.is_fast and is_bytes_of_words(tokenizer)

    def __call__(self, rows: list[Row]) -> tuple[list[Example], list[Dropped]]:
        """The examples of `rows`, in order, and dropped rows; the same as with each turn rendered and tokenised alone.

        That is tried on a sample; where one differs, it is done for all of these rows.
        """
        made = self._encoded(rows)
        tried = self._encoded(rows[::EVERY], cut=False)
        if any(not one.equals(other) for one, other in zip(made[::EVERY], tried, strict=True)):
            made = self._encoded(rows, cut=False)
        return [e for one in made for e in one.examples], [d for one in made for d in one.dropped]

    def _encoded(self, rows: list[Row], cut: bool = True) -> list[Made]:
        """What each row gives; cut False: with each turn rendered and tokenised alone."""
        made = [Made([], [], []) for _ in rows]
        for row, one in zip(rows, made):
            try:
                place = self.place(row)
                if not place.stages:
                    one.dropped.append(Dropped("belongs_to_another_stage", place.source))
                one.plans.extend((plan, place) for plan in self.plans(row, place.stages, cut))
            except BadRow as bad:
                one.dropped.append(self._drop(bad, row))
        ids = self._tokenise({part for one in made for plan, _ in one.plans for part in _parts(plan)})
        again = []
        for number, (row, one) in enumerate(zip(rows, made)):
            try:
                for plan, place in one.plans:
                    self._add(one, plan, place, row, ids)
            except NotFound:
                again.append(number)
        for number, one in zip(again, self._encoded([rows[number] for number in again], cut=False) if again else ()):
            made[number] = one
        return made

    def _add(self, made: Made, plan: Plan, place: Place, row: Row, ids: dict[Segment, Encoded]) -> None:
        """Add the examples of a plan, or why there are none. Raises: NotFound."""
        try:
            joined = self._joined(plan, ids)
        except BadRow as bad:
            made.dropped.append(self._drop(bad, row, plan.stage))
            return
        lossy = not self.is_lossless and any(ids[part].lossy for part in _parts(plan))
        notes = (*row.get("notes", ()), *plan.notes, *(CUT if len(joined) > 1 else ()), *(LOSSY if lossy else ()))
        kept = row if self.args.save_skipped_examples else None
        for part in joined:
            try:
                example = self._build(plan.stage, place, part)
            except BadRow as bad:
                made.dropped.append(self._drop(bad, row, plan.stage))
                continue
            example.row, example.read_as, example.notes = kept, row.get("read_as"), notes
            self._describe(example, row, plan)
            made.examples.append(example)

    def _drop(self, bad: BadRow, row: Row, stage: str | None = None) -> Dropped:
        return Dropped(str(bad), row.get("source", "row"), stage, row if self.args.save_skipped_examples else None)

    def _describe(self, example: Example, row: Row, plan: Plan) -> None:
        if example.stage == "dialogue":
            example.extra = [
                m if [*m] == PLAIN else {name: m[name] for name in SHOWN if name in m} for m in plan.messages
            ]
            example.columns = row.get("columns", {})
            user_turns = [m["content"] for m in example.extra if m["role"] != "assistant"]
            prompt = repr([user_turns, example.columns] if example.columns else user_turns).encode()
        elif "text" in row or example.stage == "unpaired":  # a prompt may have several rated responses
            prompt = example.ids[0].tobytes()
        else:
            prompt = example.ids[0][: example.prompt_len].tobytes()
        if example.stage in ("prompts", "preference", "unpaired"):
            example.extra = row.get("columns", {})
            example.label = row["label"] if example.stage == "unpaired" else None
        example.key = hash_of(prompt)

    # ------------------------------------------------------------------------------------------------- segments to ids
    def _tokenise(self, segments: set[Segment]) -> dict[Segment, Encoded]:
        """Ids of each segment, equal to those of `encode_prompt` and `encode_response`, and which carry loss."""
        wholes = {segment: segment.text for segment in segments if segment.kind == "whole"}
        found = dict(zip(wholes, map(self._whole, wholes.values(), self._encode([*wholes.values()]))))
        return found | self._tokenise_parts(segments - wholes.keys())

    def _whole(self, text: str, tokens: Tokens) -> Encoded:
        """A dialogue that is tokenised as one."""
        return Encoded(np.array(tokens[0], dtype=np.int32), turns=self.plans.cuts.spans(tokens[0], text))

    def _tokenise_parts(self, segments: set[Segment]) -> dict[Segment, Encoded]:
        ordered = list(segments)
        pieces = [list(text_pieces(self.tokenizer, segment.text, segment.behind)) for segment in ordered]
        if not pieces:
            return {}
        has_tags = any(segment.kept is not None for segment in ordered)
        texts = [piece.prefix + piece.text for own in pieces for piece in own]
        encoded = iter(self._encode(texts, with_offsets=has_tags))
        parts = [[self._alone(piece, next(encoded), has_tags) for piece in own] for own in pieces]
        if self.is_lossless:
            return {segment: self._finish(segment, own) for segment, own in zip(ordered, parts)}
        decoded = self._decode([[index for _, ids, _ in own for index in ids] for own in parts])
        return {
            segment: self._finish(segment, own)._replace(lossy=_letters(segment.text) != _letters(text))
            for segment, own, text in zip(ordered, parts, decoded)
        }

    def _alone(self, piece: Piece, tokens: Tokens, with_offsets: bool) -> EncodedPiece:
        """A piece without the tokens of its prefix."""
        ids, offsets = tokens
        own = own_ids(self.tokenizer, piece, ids)
        if own is None:  # as in `encode_text`
            piece = Piece(piece.text)
            own, offsets = next(iter(self._encode([piece.text], with_offsets)))
        return piece, own, offsets[len(offsets) - len(own) :]

    def _encode(self, texts: list[str], with_offsets: bool = False) -> Iterable[Tokens]:
        """Ids of each text, and the characters of each id."""
        if not self.tokenizer.is_fast:
            # Raw text: behind marks.
            return ((ids, []) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        backend = self.tokenizer.backend_tokenizer  # faster than the tokenizer's own call: no masks
        backend.no_truncation()
        backend.no_padding()
        encode = backend.encode_batch if with_offsets else backend.encode_batch_fast
        return ((e.ids, e.offsets if with_offsets else []) for e in encode(texts, add_special_tokens=False))

    def _decode(self, ids: list[list[int]]) -> Iterable[str]:
        if self.tokenizer.is_fast:
            return self.tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
        return (str(self.tokenizer.decode(one, clean_up_tokenization_spaces=False)) for one in ids)

    def _finish(self, segment: Segment, pieces: list[EncodedPiece]) -> Encoded:
        """Ids of a segment from those of its pieces."""
        ids = [index for _, own, _ in pieces for index in own]
        try:
            check_spelling(self.tokenizer, segment.text, ids)
            spells = False
        except UsageError:
            spells = True
        if segment.kind == "text" and self.bos is not None:
            ids = [self.bos, *ids]
        elif segment.kind == "response":
            ids = [*ids, self.tokenizer.eos_token_id]
        elif segment.kind == "answer":
            ids = close_turn(self.tokenizer, ids)
        array = np.array(ids, dtype=np.int32)
        if segment.kept is None:
            return Encoded(array, spells=spells)
        kept = _kept(segment.kept, pieces)
        return Encoded(array, np.array(kept + [True] * (len(ids) - len(kept))), spells)

    # ------------------------------------------------------------------------------------------------- ids to examples
    def _joined(self, plan: Plan, ids: dict[Segment, Encoded]) -> list[Joined]:
        """Rows of ids that a plan gives, before the limits on their lengths. Raises: BadRow."""
        if plan.refused:
            raise BadRow(plan.refused)
        if plan.whole:
            return [self._cut(plan.stage, ids[plan.whole])]
        turns = [(ids[prompt], ids[answer] if answer else None) for prompt, answer in plan.turns]
        if any(part.spells for turn in turns for part in turn if part):
            raise BadRow("special_token_in_text")
        first, answer = turns[0]
        if plan.stage == "prompts" or answer is None:
            return [Joined(len(first.ids), [first.ids], [])]
        if plan.stage == "preference":
            sides = [np.concatenate([first.ids, answer.ids]) for _, answer in turns if answer]
            return [Joined(len(first.ids), sides, [])]
        rows: list[Joined] = []
        for prompt, answer in turns:
            assert answer is not None  # only prompts have none
            earlier = rows[-1].sides[0] if rows else np.empty(0, dtype=np.int32)
            if not rows or not np.array_equal(prompt.ids[: len(earlier)], earlier):
                rows.append(Joined(len(prompt.ids), [], []))  # the template rewrote an earlier turn, or the first turn
            row, start = rows[-1], len(prompt.ids)
            row.sides[:] = [np.concatenate([prompt.ids, answer.ids])]
            is_whole = plan.stage == "dialogue"  # spans are the turns, for rollouts, not what a template's tags count
            spans = [(0, len(answer.ids))] if is_whole else answer.spans()
            row.spans.extend((start + a, start + b) for a, b in spans)
        if plan.stage == "dialogue" and len(rows) > 1:
            raise BadRow("template_rewrites_history")
        return rows

    def _cut(self, stage: str, whole: Encoded) -> Joined:
        """The row of a dialogue that was tokenised as one. Raises: NotFound."""
        if whole.turns is None:
            raise NotFound
        prompt_len, ids = whole.turns[0][0], whole.ids
        return Joined(prompt_len, *(([ids[:prompt_len]], []) if stage == "prompts" else ([ids], whole.turns)))

    def _build(self, stage: str, place: Place, row: Joined) -> Example:
        """A row with its spans, truncated to `max_length`. Raises: BadRow."""
        prompt_len, sides, longest = row.prompt_len, row.sides, self.args.max_length
        if stage == "dialogue":
            return self._build_dialogue(place, row)
        if stage != "finetune" and prompt_len == 0:
            raise BadRow("empty_prompt")
        if prompt_len > self.args.longest_prompt():
            raise BadRow("prompt_too_long")
        if stage == "prompts":
            return Example(stage, prompt_len, place, sides)
        spans = [(start, min(end, longest)) for start, end in row.spans if start < longest]
        if prompt_len >= longest or (stage == "finetune" and not spans):
            raise BadRow("no_trained_tokens")
        cut = any(len(side) > longest for side in sides)
        shortened = [side[:longest] if len(side) > longest else side for side in sides]
        if stage == "preference" and self.args.remove_same_responses and np.array_equal(shortened[0], shortened[1]):
            raise BadRow("same_responses_after_cut")
        return Example(stage, prompt_len, place, shortened, spans, cut=cut)

    def _build_dialogue(self, place: Place, row: Joined) -> Example:
        (ids,), spans = row.sides, row.spans
        prompts = [start - end for (start, _), end in zip(spans, [0, *(end for _, end in spans)])]
        if len(spans) > self.args.max_turns:
            raise BadRow("too_many_turns")
        if max(prompts) > limit_for(self.args.turn_prompt_length, len(spans)):
            raise BadRow("prompt_too_long")
        if max(end - start for start, end in spans) > limit_for(self.args.turn_response_length, len(spans)):
            raise BadRow("response_too_long")
        if len(ids) > self.args.max_dialogue_length:
            raise BadRow("dialogue_too_long")
        return Example("dialogue", row.prompt_len, place, [ids], spans)


def hash_of(data: bytes) -> int:
    """A 64-bit hash, equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=64)
def limit_for(limits: str, turns: int) -> int:
    """The limit for dialogues of `turns` turns, from "512" (all) or "1024,768,512" (by number of turns)."""
    numbers = [int(number) for number in limits.split(",")]
    return numbers[min(turns, len(numbers)) - 1]


def _parts(plan: Plan) -> list[Segment]:
    """The texts of a plan to tokenise."""
    return [plan.whole] if plan.whole else [part for turn in plan.turns for part in turn if part]


def _letters(text: str) -> str:
    """A text without white space and marks, its accents in one form: tokenizers often change these."""
    return unicodedata.normalize("NFC", "".join(text.replace(MARK, "").split()))


def _kept(spans: Sequence[tuple[int, int]], pieces: list[EncodedPiece]) -> list[bool]:
    """Whether each id has a character within the spans of the text that the pieces are of."""
    kept, begin = [], 0
    for piece, _, offsets in pieces:
        shift = begin - len(piece.prefix)
        kept += [any(a < end + shift and start + shift < b for a, b in spans) for start, end in offsets]
        begin += len(piece.text) + len(MARK)
    return kept
