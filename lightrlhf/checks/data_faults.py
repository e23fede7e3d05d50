"""Faults of one row of data: each check is a pure function of its ids, what is trained of them, and the template.

A check speaks up on positive evidence alone: a header of the template inside or beside what is trained, an end token
that is not trained behind a token that is. So rows that it does not understand raise no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightrlhf.checks.data_rows import Item, Text, runs_of
from lightrlhf.checks.template_marks import Headers, Marks, is_blank, is_gap

PAGE = "howto/check_run.md"
OPEN = "open end"  # a row without an end token; the lengths of all rows decide whether it was cut


class Fault(NamedTuple):
    """A fault by the check that finds it."""

    check: str
    causes: tuple[str, ...]
    look_at: str = PAGE


LEFT_OUT = ("the chat template does not write it", "the rows have it under a name that the template does not read")
FAULTS = {
    "no trained token": Fault(
        "trained",
        ("the answer is empty, or cut off with a long prompt", "the template has no {% generation %} tags"),
        "max_length; assistant_only_loss",
    ),
    "labels shifted already": Fault(
        "labels", ("labels were shifted in the preparation, and the model shifts them again",), "the collator"
    ),
    "labels of other tokens": Fault(
        "labels", ("labels were made from other ids than input_ids, such as of another template or padding side",)
    ),
    "labels of another length": Fault("labels", ("ids and labels were cut, padded or tokenised apart",)),
    "padding trained": Fault("labels", ("labels were copied from padded ids without the attention mask",)),
    "mask one early": Fault(
        "mask", ("the mask belongs to inputs, not to the tokens predicted", "the prompt's length is one less")
    ),
    "mask one late": Fault(
        "mask",
        ("a mask of predicted tokens was shifted once more", "the prompt was tokenised alone with one token more"),
    ),
    "user text trained": Fault(
        "mask",
        (
            "no labels or completion_mask, so that every token is trained",
            "the mask begins at the first answer and goes on over later user turns",
            "the roles are named otherwise than the mask expects",
        ),
        "mask_prompt; completion_only_loss, assistant_only_loss",
    ),
    "double BOS": Fault(
        "bos", ("text that a chat template has rendered was tokenised with special tokens",), "add_special_tokens=False"
    ),
    "end token missing": Fault(
        "end", ("none was added behind the answers", "rows were cut at several lengths"), "eos_token; the template"
    ),
    "end token untrained": Fault(
        "end",
        ("{% generation %} tags end before the end token", "the mask ends one token early", "the end token was masked"),
    ),
    "end token masked as padding": Fault(
        "end", ("pad and end token are one, and labels were masked where ids equal the pad token",), "pad_token"
    ),
    "end token doubled": Fault(
        "end", ("the template writes an end token, and the preparation adds another", "padding is trained"), "eos_token"
    ),
    "prompt cut at its end": Fault(
        "prompt",
        ("long prompts keep their begin, not their end", "rendered without a generation prompt"),
        "truncation_side; add_generation_prompt",
    ),
    "prompt cut at its start": Fault(
        "prompt", ("long prompts keep their end, and lose the system message and BOS",), "max_prompt_length"
    ),
    "answers cut": Fault("lengths", ("the limit is below the length of these rows",), "max_length"),
    "answers cut before their first token": Fault("lengths", ("prompts fill the limit",), "max_length"),
    "ids beyond the vocabulary": Fault("vocabulary", ("the data was prepared with another tokenizer",), "--tokenizer"),
    "duplicates": Fault(
        "duplicates",
        ("the source has rows twice", "files were joined", "rows are repeated as weights"),
        "remove_same_inputs",
    ),
    "prompts in two splits": Fault(
        "splits", ("rows were split at random, not by prompt", "the source has them twice"), "validation_percentage"
    ),
    "contradicting labels": Fault("preferences", ("raters disagree", "chosen and rejected, or labels, are swapped")),
    "chosen equals rejected": Fault(
        "preferences", ("the source has ties", "both were cut before they differ"), "remove_same_responses"
    ),
    "prompts of a pair differ": Fault(
        "preferences", ("the two dialogues part before the last answer", "each side was rendered or cut alone")
    ),
    "template drops text": Fault("template", LEFT_OUT, "--chat_template"),
    "template refuses rows": Fault("template", ("it raises on this order of roles, or this shape",), "--chat_template"),
    "control tokens in texts": Fault(
        "texts",
        ("texts of other templates' renderings", "untrusted users wrote them"),
        "tokenised as they are, they end turns",
    ),
    "rows refused": Fault("rows", ("a format that the preparation does not read",), "howto/datasets.md"),
}


class Found(NamedTuple):
    """A fault, and the token that shows it."""

    fault: str
    place: int = 0


def faults_of_text(text: Text, kind: str, entries: Sequence[str], headers: Headers, marks: Marks) -> Iterator[Found]:
    """The faults of one text. entries: of its ids in the vocabulary."""
    yield from bos_faults(text, marks)
    yield from prompt_faults(text, kind, entries, headers, marks)
    if kind == "prompts":
        return
    runs = runs_of(text.trained)
    if not runs:
        yield Found("no trained token")
    of_mask = [*mask_faults(text, runs, entries, headers, marks)]
    yield from of_mask
    is_early = any(one.fault == "mask one early" for one in of_mask)
    for found in end_faults(text, runs, entries, marks):
        if not (is_early and found.fault == "end token untrained"):  # which follows from it
            yield found


def id_faults(text: Text, marks: Marks) -> Iterator[Found]:
    """Ids that the tokenizer does not have."""
    wrong = (text.ids < 0) | (text.ids >= marks.size)
    if wrong.any():
        yield Found("ids beyond the vocabulary", int(wrong.argmax()))


def bos_faults(text: Text, marks: Marks) -> Iterator[Found]:
    """Two BOS at the start, unless the token pads, too."""
    if marks.bos is None or marks.bos == marks.pad or marks.bos in marks.repeats:
        return
    if len(text.ids) > 1 and text.ids[0] == text.ids[1] == marks.bos:
        yield Found("double BOS", 1)


def mask_faults(
    text: Text, runs: Sequence[tuple[int, int]], entries: Sequence[str], headers: Headers, marks: Marks
) -> Iterator[Found]:
    """Whether what is trained begins behind the header of an answer, and ends before words of others."""
    ends = [place for place, index in enumerate(text.ids.tolist()) if index in marks.ends]
    for start, end in runs:
        answer = max((place for place in headers.answers if place <= start), default=-1)
        other = max((place for place in headers.others if place <= start), default=-1)
        turns_over = [place for place in headers.others if any(start <= stop < place < end for stop in ends)]
        is_behind = answer > other and is_gap(entries[answer:start], marks)
        told = text.prompt_len
        if turns_over:
            yield Found("user text trained", turns_over[0])
        elif is_behind:
            continue
        elif start + 1 in headers.answers or (told is not None and start == told - 1 and not headers.answers):
            yield Found("mask one early", start)
        elif not marks.tags and (0 <= answer == start - 1 if headers.answers else start - 1 == told):
            yield Found("mask one late", start)
        elif other >= answer and any(place > start for place in headers.answers):
            yield Found("user text trained", start)
        elif told is not None and start < told:
            yield Found("user text trained", start)
        elif other > answer:
            yield Found("prompt cut at its end", start)


def end_faults(text: Text, runs: Sequence[tuple[int, int]], entries: Sequence[str], marks: Marks) -> Iterator[Found]:
    """Whether each answer trains one end token."""
    ids = text.ids.tolist()
    if not marks.ends:
        return
    for start, end in runs:
        last = end - 1
        while last > start and ids[last] not in marks.ends and is_blank(entries[last]):
            last -= 1
        if ids[last] in marks.ends:
            before = last - 1
            while before > start and ids[before] not in marks.ends and is_blank(entries[before]):
                before -= 1
            if before >= start and ids[before] == ids[last] and ids[last] not in marks.repeats:
                yield Found("end token doubled", last)
        elif end == len(ids):
            yield Found(OPEN, last)
        elif ids[end] in marks.ends:
            yield Found("end token masked as padding" if ids[end] == marks.pad else "end token untrained", end)


def prompt_faults(text: Text, kind: str, entries: Sequence[str], headers: Headers, marks: Marks) -> Iterator[Found]:
    """Whether a rendered dialogue begins as the template does, and a prompt alone ends with the header of an answer."""
    if not (headers.answers or headers.others):
        return
    begins = {int(text.ids[0]), int(text.ids[(text.ids != marks.pad).argmax()])}  # the end token may pad on the left
    if marks.starts and not begins & {*marks.starts, marks.bos}:
        yield Found("prompt cut at its start")
    if kind == "prompts" and max(headers.others, default=-1) > max(headers.answers, default=-1):
        yield Found("prompt cut at its end", len(entries) - 1)


def pair_faults(item: Item) -> Iterator[Found]:
    """Whether the two sides of a pair differ, and only behind their prompt."""
    chosen, rejected = item.texts
    if len(chosen.ids) == len(rejected.ids) and (chosen.ids == rejected.ids).all():
        yield Found("chosen equals rejected")


def with_prompt(item: Item, headers: Sequence[Headers]) -> Item:
    """A pair of whole dialogues with the prompt that both begin with, where their last headers show it."""
    lasts = [max(one.answers, default=None) for one in headers]
    if lasts[0] is None or lasts[1] is None:
        return item
    prompts = [text.ids[:last].tolist() for text, last in zip(item.texts, lasts)]
    faults = item.faults if prompts[0] == prompts[1] else (*item.faults, "prompts of a pair differ")
    texts = []
    for text, last in zip(item.texts, lasts):
        trained = text.trained.copy()
        trained[:last] = False
        texts.append(text._replace(trained=trained, prompt_len=last))
    return item._replace(texts=tuple(texts), faults=faults)
