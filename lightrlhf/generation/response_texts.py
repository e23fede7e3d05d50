"""Texts of sampled ids: of whole responses, and of responses that grow, of which only a short window is decoded.

Left out: an exact text of more than `LONGEST` tokens in a row that complete no character; a stream of it may differ
from the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightrlhf.data.tokens import decode
from lightrlhf.data.tool_calls import schema_of, visible
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.sampling import first_stop

HALF = "\ufffd"  # written for a character that is not complete
PENDING = 4  # tokens after which a character that is not complete never will be
LONGEST = 64  # tokens of a window


class Texts:
    """The texts of a tokenizer's ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.of_tokens: dict[int, str] = {}

    def of_token(self, index: int) -> str:
        """The text of one token, remembered; half of a character is U+FFFD."""
        if index not in self.of_tokens:
            self.of_tokens[index] = str(self.tokenizer.decode([index], clean_up_tokenization_spaces=False))
        return self.of_tokens[index]

    def of_ids(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids, with or without special tokens and those that end a turn."""
        if skip_special_tokens:
            return decode(self.tokenizer, ids)
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def of_turn(self, ids: Sequence[int]) -> str:
        """The text of ids of a response with tools: with the special tokens by which its calls are found."""
        shown = visible(self.tokenizer, schema_of(self.tokenizer), ids)
        return str(self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    def of_response(self, ids: list[int], decoded: Callable[[list[int]], str], stops: Sequence[str]) -> str:
        """The text of a complete response, up to the stop text that ended it."""
        text = decoded(ids)
        if (end := first_stop(self.tokenizer, ids, stops)) is None:
            return text
        known = len(decoded(ids[: end - 1]).rstrip(HALF))  # the stop text ends after it
        starts = [at for stop in stops if (at := text.find(stop, max(known - len(stop) + 1, 0))) >= 0]
        return text[: min(starts, default=None)]


class Growing:
    """The text of ids that come one after another.

    Each time only the ids since the last complete character but one are decoded: a decoder writes a text differently at
    its start, so that the ids before the new ones stay in the window. An incomplete character is held back.
    """

    def __init__(self, decoded: Callable[[list[int]], str]) -> None:
        self.decoded = decoded
        self.window: list[int] = []
        self.complete = 0  # ids of the window that end with a complete character
        self.shown = 0  # characters of the window's text that were returned

    def add(self, ids: Sequence[int]) -> str:
        """What further ids add to the text."""
        self.window += ids
        text = self.decoded(self.window)
        end = len(text.rstrip(HALF))
        is_whole = end == len(text)
        if not is_whole and len(self.window) - self.complete > PENDING:
            end = max(end, len(text) - PENDING + 1)
        more = text[self.shown : end]
        self.shown = max(self.shown, end)
        if is_whole or len(self.window) > LONGEST:
            self._move()
        return more

    def _move(self) -> None:
        """Let the window begin behind the last complete character, if there is a text behind it."""
        rest = self.window[max(self.complete, len(self.window) - LONGEST // 2) :]
        text = self.decoded(rest)
        if text and self.complete:
            self.window, self.shown = rest, len(text)
        elif not text and len(self.window) > LONGEST:
            self.window = self.window[: self.complete]
        self.complete = len(self.window)


def begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may become a stop text: the longest beginning of one."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)
