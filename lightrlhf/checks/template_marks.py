"""The text of a chat template around turns, by which masks and ends of any trainer's rows are judged.

Found by rendering known exchanges. Rows are compared as the joined entries of their ids in the vocabulary, so that it
does not matter where a tokenizer splits or merges the text of a header.

Left out: templates that write nothing before an answer, and words that a template writes within an answer.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import controls
from lightrlhf.data.rendering import ANSWERED, ASKED, TOOLS, VALUE, called, has_generation_tags, render, said
from lightrlhf.data.tokens import encode_text
from lightrlhf.data.turn_ends import LATER, turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AGAIN, ORDERS = "second-answer-words", "system-turn-words"
BLANK = re.compile(r"[\sĊĠ▁ĉč]*")  # of entries, too, in the alphabets of byte-level BPE and SentencePiece
BLANK_AT_END = re.compile(rf"{BLANK.pattern}\Z")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
THINKING = re.compile(rf"(?:{BLANK.pattern}</?think(?:ing)?>)*{BLANK.pattern}")
THINKING_AT_END = re.compile(rf"(?:</?think(?:ing)?>{BLANK.pattern})+$")


class Marks(NamedTuple):
    """The marks of turns; headers are joined entries of the vocabulary, "" or empty where unknown."""

    answer: str = ""  # what stands before each answer
    gaps: frozenset[str] = frozenset()  # what the template may write between that and the words
    others: tuple[str, ...] = ()  # what stands before words of users and systems
    ends: frozenset[int] = frozenset()  # tokens of which one ends each answer
    repeats: frozenset[int] = frozenset()  # those that the template itself writes twice in a row
    starts: frozenset[int] = frozenset()  # control tokens with which a dialogue begins; empty: with words
    tags: bool = False  # whether `{% generation %}` tags may leave any part of an answer without loss
    bos: int | None = None
    pad: int | None = None
    size: int = 0  # of the vocabulary


class Headers(NamedTuple):
    """Where the headers of a row end, as numbers of tokens before that."""

    answers: Sequence[int]  # but for those that end within a token
    others: Sequence[int]


def marks_of(tokenizer: PreTrainedTokenizerBase, pad: int | None) -> Marks:
    """The marks of a tokenizer; pad: its own pad token, None where it has none."""
    known = {tokenizer.eos_token_id} - {None}
    marks = Marks(ends=frozenset(known), bos=tokenizer.bos_token_id, pad=pad, size=len(tokenizer))
    if not tokenizer.chat_template:
        return marks
    marks = marks._replace(ends=frozenset({*known, *turn_ends(tokenizer)}), tags=has_generation_tags(tokenizer))
    asked, answered = said("user", ASKED), said("assistant", ANSWERED)
    exchange = [asked, answered, said("user", LATER), said("assistant", AGAIN)]
    whole = _ids(tokenizer, exchange)
    if whole is None:
        return marks
    entries = entries_of(tokenizer, whole)
    marks = marks._replace(ends=marks.ends | _history_end(tokenizer, marks.ends, whole, entries))
    return marks._replace(
        repeats=_repeats(whole) & (marks.ends | {marks.bos}),
        starts=_starts(tokenizer),
        **_headers(tokenizer, exchange, "".join(entries)),
    )


def _headers(tokenizer: PreTrainedTokenizerBase, exchange: list[dict[str, Any]], whole: str) -> dict[str, Any]:
    """The headers in an exchange of two turns; none where they do not tell its turns apart."""
    asked, orders = exchange[0], said("system", ORDERS)
    asking = [_behind(_entries(tokenizer, given, asks=True), ASKED) for given in ([asked], [orders, asked])]
    asking.append(_behind(_entries(tokenizer, exchange[:3], asks=True), LATER))
    if _entries(tokenizer, [asked, called(VALUE)], TOOLS):
        asking.append(_behind(_entries(tokenizer, [asked], TOOLS, asks=True), ASKED))
    answer = THINKING_AT_END.sub("", _common_end(asking))
    before = [_before(whole, words) for words in (ANSWERED, AGAIN)]
    gaps = {text.rpartition(answer)[2] for text in before} if answer else set()
    if not re.search(r"\w", answer) or whole.count(answer) != 2 or not all(answer in text for text in before):
        return {}
    ordered = _entries(tokenizer, [orders, *exchange[:2]])
    turns = [_before(whole, ASKED), _before(whole, LATER)]
    users = [_common_end([*turns, _before(ordered, ASKED)]), _common_end(turns)]  # a system message may be in the turn
    headers = [one for one in (*users, _before(ordered, ORDERS)) if _says_something(tokenizer, one)]
    others = {headers[0], headers[-1]} if headers else set()
    apart = (one for one in others if not answer.endswith(BLANK_AT_END.sub("", one)))  # a system may speak as a model
    return {"answer": answer, "gaps": frozenset(gaps), "others": tuple(apart)}


def _says_something(tokenizer: PreTrainedTokenizerBase, header: str) -> bool:
    """Whether a header is more than a BOS."""
    return re.search(r"\w", header.replace(tokenizer.bos_token or "\0", "")) is not None


def _before(entries: str, words: str) -> str:
    """The entries before known words; "" where they are not found."""
    before, found, _ = entries.partition(words)
    return before if found else ""


def _behind(entries: str, words: str) -> str | None:
    """The entries behind known words; None where they are not found."""
    _, found, behind = entries.rpartition(words)
    return behind if found else None


def _common_end(texts: Iterable[str | None]) -> str:
    """The longest text with which all known ones end."""
    return os.path.commonprefix([text[::-1] for text in texts if text is not None])[::-1]


def _ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any = None, asks: bool = False
) -> list[int] | None:
    try:
        return encode_text(tokenizer, render(tokenizer, messages, tools, add_generation_prompt=asks))
    except UsageError:
        return None


def _entries(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any = None, asks: bool = False
) -> str:
    """The joined entries of rendered messages; "" where the template refuses them."""
    return "".join(entries_of(tokenizer, _ids(tokenizer, messages, tools, asks) or []))


def _history_end(
    tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], whole: list[int], entries: list[str]
) -> set[int]:
    """The token that ends an answer before a later turn, unless it ends other answers, too."""
    places = [*accumulate(map(len, entries), initial=0)]
    text = "".join(entries)
    first, last = text.find(ANSWERED), text.find(LATER)
    between = [index for index, start in zip(whole, places) if first < start < last]
    found = [index for index in between if index in controls(tokenizer).ending_ids]
    return set(found[:1]) if not ends & {*between} else set()


def _repeats(ids: list[int]) -> frozenset[int]:
    return frozenset(one for one, other in pairwise(ids) if one == other)


def _starts(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The first tokens of dialogues with and without a system message and tools; none where one is a word."""
    asked = said("user", ASKED)
    given = [_ids(tokenizer, messages, tools) for messages in ([asked], [said("system", ORDERS), asked])
             for tools in (None, TOOLS)]  # fmt: skip
    firsts = {ids[0] for ids in given if ids}
    return frozenset(firsts if firsts <= controls(tokenizer).ids else ())


# ------------------------------------------------------------------------------------------------------------- of a row
def entries_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The entries of ids in the vocabulary, a byte as its character; "" for an id without one."""
    found = (entry or "" for entry in tokenizer.convert_ids_to_tokens(list(ids)))
    return [chr(int(one[3:5], 16)) if len(one) == 6 and BYTE.fullmatch(one) else one for one in found]


def headers_in(entries: Sequence[str], marks: Marks) -> Headers:
    """Where the headers of a row end. entries: of its ids."""
    text = "".join(entries)
    places = [*accumulate(map(len, entries), initial=0)]  # of the begin of each token, and of the end
    number_of = {place: number for number, place in enumerate(places)}

    def ends(header: str) -> list[int]:
        return [match.end() for match in re.finditer(re.escape(header), text)] if header else []

    answers = [number_of[place] for place in ends(marks.answer) if place in number_of]
    others = sorted(place for header in marks.others for place in ends(header))
    return Headers(answers, [bisect_right(places, place) - 1 for place in others])


def is_blank(entries: Iterable[str]) -> bool:
    """Whether entries are white space alone."""
    return BLANK.fullmatch("".join(entries)) is not None


def is_gap(entries: Iterable[str], marks: Marks) -> bool:
    """Whether entries may stand between a header and what is trained: of reasoning, or what the template writes."""
    text = "".join(entries)
    return text in marks.gaps or THINKING.fullmatch(text) is not None
