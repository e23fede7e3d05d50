"""Plain dialogues rendered and tokenised once, with the prompts and answers of their turns cut out of the one text.

Most chat templates write a dialogue of texts as its contents with constant texts between them. The constants are read
off a known exchange, rendered turn by turn (`turns.Dialogue`). A dialogue is cut only if its rendering is exactly its
contents between these constants. What such a rendering cannot show, a template that writes a prompt otherwise once it
is history, is looked for in a sample of each chunk of rows (`encoding`).

The ids of the whole are cut as well where the tokenizer reads words one by one, an answer ends with a control token,
and the words of each prompt and answer are the same apart. The turns are then found by the ids with which prompts end.

Left out: rows with tools, reasoning, weights, generation tags, or control tokens spelled in a content.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from datasets_prep.borders import Borders, is_bytes_of_words
from datasets_prep.turns import BadRow, Cut, Dialogue, Turn
from lightrlhf.data.chat import MARK, controls
from lightrlhf.data.rendering import Unrendered, render_plain, render_shown, said
from lightrlhf.data.turn_ends import answer_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REACH = 4  # characters of an answer's content that decide how the end of its prompt is tokenised
THINKING = ("think>", "thinking>")
KNOWN = ("known-system-words", *(word for n in range(3) for word in (f"known-question-{n}", f"known-answer-{n}")))


class Constants(NamedTuple):
    """What a template writes around the contents of a plain dialogue."""

    start: str  # before the first content
    after_system: str
    asks: str  # behind a question: the end of its prompt
    opens: str  # what an answer begins with, before its content
    closes: str  # behind its content: the end of its turn
    between: str  # behind the turn, before the next question
    end: str  # behind the last turn


class Cuts:
    """Cuts dialogues by the chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.controls, self.special_tokens = controls(tokenizer), tokenizer.special_tokens_map
        self.constants = {has_system: _constants(tokenizer, has_system) for has_system in (False, True)}
        self.borders: Borders | None = None  # of a tokenizer whose ids can be cut
        ways = {(one.asks, one.opens, one.closes) for one in self.constants.values() if one}
        end = answer_end(tokenizer)
        if len(ways) != 1 or not (end and end.ids and tokenizer.is_fast) or not is_bytes_of_words(tokenizer):
            return
        ((asks, opens, closes),) = ways
        self.ending, self.reach = end.ids[-1], len(opens) + REACH
        tokens = list(self.controls.spelled.finditer(asks))
        self.marker = asks[tokens[0].start() :] if tokens else asks.lstrip()
        token = tokenizer.convert_ids_to_tokens(self.ending)
        if self.marker and token in self.controls.texts and closes.endswith(token) and not self.controls.by_other_texts:
            # Raw text: the template's own.
            encoded = tokenizer.backend_tokenizer.encode(self.marker, add_special_tokens=False)
            self.marker_ids = list(encoded.ids)
            self.borders = Borders(tokenizer, asks[tokens[-1].end() :] if tokens else self.marker)

    def __call__(self, messages: Sequence[dict[str, Any]], shown: list[dict[str, Any]]) -> Cut | None:
        """The turns of a dialogue; None where they have to be rendered one by one."""
        has_system = messages[0]["role"] == "system"
        constants = self.constants[has_system]
        if constants is None or (len(messages) - has_system) % 2 or len(messages) < 2:
            return None
        roles = cycle(("user", "assistant"))
        for message, one, role in zip(messages[has_system:], shown[has_system:], roles):
            if message["role"] != role or len(message) != 2 or len(one) != 2:
                return None
        contents = [message["content"] for message in shown]
        if any(text != text.strip() for text in contents):
            return None
        system = contents.pop(0) + constants.after_system if has_system else ""
        text, turns = constants.start + system, []
        for number, (question, answer) in enumerate(zip(contents[::2], contents[1::2])):
            text += (constants.between if number else "") + question + constants.asks
            turns.append(Turn(text, constants.opens + answer + constants.closes))
            text += turns[-1].answer
        try:
            rendered = render_plain(self.tokenizer, shown, self.special_tokens)
        except Unrendered:
            return None
        if rendered != text + constants.end or MARK in text or any(tag in text for tag in THINKING):
            return None
        is_parted = self.borders and all(self.borders.are_kept(turn.answer[: self.reach]) for turn in turns)
        return Cut(turns, text if is_parted and text.count(self.marker) == len(turns) else None)

    def spans(self, ids: list[int], whole: str) -> list[tuple[int, int]] | None:
        """[start, end) of the answers of a dialogue in the ids of its text; None where they are not found."""
        starts, at = [], 0
        while (place := _find(ids, self.marker_ids, at)) is not None:
            at = place + len(self.marker_ids)
            starts.append(at)
        if len(starts) != whole.count(self.marker):
            return None
        try:
            ends = [ids.index(self.ending, start) + 1 for start in starts]
        except ValueError:  # none follows
            return None
        is_apart = all(start > end for start, end in zip(starts[1:], ends))
        return list(zip(starts, ends)) if is_apart and ends[-1] == len(ids) else None


def _find(values: list[int], part: list[int], start: int) -> int | None:
    """Where a part of a list begins, at `start` or later."""
    try:
        while values[(start := values.index(part[0], start)) : start + len(part)] != part:
            start += 1
    except ValueError:
        return None
    return start


def _constants(tokenizer: PreTrainedTokenizerBase, has_system: bool) -> Constants | None:
    """The texts around the contents of a known exchange of three turns; None where they are not the same each time."""
    system, *words = KNOWN
    roles = cycle(("user", "assistant"))
    messages = [*([said("system", system)] if has_system else []), *(said(role, w) for role, w in zip(roles, words))]
    try:
        talk = Dialogue(tokenizer, messages, None)
        turns = [talk.turn(i) for i, message in enumerate(messages) if message["role"] == "assistant"]
        rendered = render_shown(tokenizer, talk.shown)
    except (BadRow, Unrendered):
        return None
    if talk.has_tags or not rendered.startswith(turns[-1].prompt + turns[-1].answer):
        return None
    start, _, after_system = turns[0].prompt.partition(words[0])[0].partition(system)
    asks = turns[0].prompt.partition(words[0])[2]
    opens, _, closes = turns[0].answer.partition(words[1])
    between = turns[1].prompt.removeprefix(turns[0].prompt + turns[0].answer).partition(words[2])[0]
    text = start + (system if has_system else "") + after_system
    for number, (turn, question, answer) in enumerate(zip(turns, words[::2], words[1::2])):
        text += (between if number else "") + question + asks
        if turn != Turn(text, opens + answer + closes):
            return None
        text += turn.answer
    return Constants(start, after_system, asks, opens, closes, between, rendered.removeprefix(text))
