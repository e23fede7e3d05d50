"""Encoding text as token ids and decoding ids, for training, generation, data preparation and the demo.

Prompt and response are tokenised separately and their ids concatenated, so that no token spans the border between them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import (
    MARK,
    Messages,
    check_spelling,
    controls,
    ends_with_control,
    model_of,
    protect,
    shown_messages,
    shown_tools,
)
from lightrlhf.data.flat import Facts, Rows, View
from lightrlhf.data.rendering import Unrendered, left_out_of_answer, left_out_of_prompt, render
from lightrlhf.data.splits import Row
from lightrlhf.data.thinking import Asked, answer_behind
from lightrlhf.data.turn_ends import close_turn, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\x01"  # merges with no character behind it, but see `_is_parted`


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a prompt, exactly as in the prepared data.

    A string is tokenised without special tokens, after one BOS if the tokenizer adds one by default. Messages are
    rendered by the tokenizer's chat template, which writes its own special tokens. Neither text nor contents yield a
    control token.
    Raises: UsageError when the template refuses the messages.
    """
    if not isinstance(prompt, str):
        return encode_text(tokenizer, prompt_text(tokenizer, prompt, tools))
    if tokenizer.bos_token is None or not adds_bos(tokenizer):
        return encode_text(tokenizer, protect(tokenizer, prompt))
    text = prompt.removeprefix(tokenizer.bos_token)  # that a prompt may bring
    return [tokenizer.bos_token_id, *encode_text(tokenizer, protect(tokenizer, text))]


def num_characters(given: Any) -> int:
    """Characters of all texts in JSON values, such as contents, calls and schemas; keys do not count."""
    count, left = 0, [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict | list):
            left.extend(one.values() if isinstance(one, dict) else one)
    return count


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[dict[str, Any]] | None = None
) -> str:
    """Text of a prompt of messages, with marks. Raises: UsageError when the template refuses it or leaves some out."""
    text = render(tokenizer, messages, tools, add_generation_prompt=True)
    if lacking := left_out_of_prompt(text, shown_messages(tokenizer, messages), shown_tools(tokenizer, tools)):
        raise UsageError(f"the chat template leaves out the {lacking.replace('_', ' ')} of a prompt; use another one")
    return text


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, behind: str | None = None) -> list[int]:
    """Token ids of a text from `data.chat`; `behind`: the text that it continues, None at the start.

    Raises: UsageError when a content becomes a control token all the same (see `chat.check_spelling`).
    """
    ids: list[int] = []
    for piece in text_pieces(tokenizer, text, behind):
        own = own_ids(tokenizer, piece, _ids(tokenizer, piece.prefix + piece.text))
        ids += _ids(tokenizer, piece.text) if own is None else own
    check_spelling(tokenizer, text, ids)
    return ids


def encode_pair(tokenizer: PreTrainedTokenizerBase, first: str, second: str) -> dict[str, list[int]]:
    """Inputs of an encoder that reads two texts: ids, and masks and types where it takes them.

    The tokenizer writes its own control tokens around the texts, which yield none (Raises: see `encode_text`).
    """
    shown = [protect(tokenizer, text) for text in (first, second)]
    if controls(tokenizer).by_other_texts:
        for text in shown:
            check_spelling(tokenizer, text, [index for piece in text.split(MARK) for index in _ids(tokenizer, piece)])
    if not any(MARK in text for text in shown):
        # Raw text: behind marks.
        inputs = dict(tokenizer(first, second))
    elif not tokenizer.is_fast:
        pieces = [[tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in t.split(MARK)] for t in shown]
        inputs = dict(tokenizer.prepare_for_model(*([index for ids in part for index in ids] for part in pieces)))
    else:
        from tokenizers import Encoding

        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        encoded = [
            Encoding.merge([backend.encode(piece, add_special_tokens=False) for piece in text.split(MARK)])
            for text in shown
        ]
        whole = backend.post_process(*encoded)
        inputs = {"input_ids": whole.ids, "token_type_ids": whole.type_ids, "attention_mask": whole.attention_mask}
    return {name: inputs[name] for name in ("input_ids", *tokenizer.model_input_names) if name in inputs}


class Piece(NamedTuple):
    """A text that is tokenised separately, and what it is tokenised behind; see `continuation_prefix`."""

    text: str
    prefix: str = ""


def text_pieces(tokenizer: PreTrainedTokenizerBase, text: str, behind: str | None) -> Iterator[Piece]:
    """Yields the pieces of a text between its marks; see `encode_text`."""
    for piece in text.split(MARK):
        yield Piece(piece, "" if behind is None else continuation_prefix(tokenizer, piece, behind))
        behind = piece


def own_ids(tokenizer: PreTrainedTokenizerBase, piece: Piece, ids: list[int]) -> list[int] | None:
    """The ids of a piece, from the ids of its prefix and text together; None where the two have merged."""
    before = _ids_of_prefix(tokenizer, len(tokenizer), piece.prefix)
    return ids[len(before) :] if ids[: len(before)] == before else None


def continuation_prefix(tokenizer: PreTrainedTokenizerBase, text: str, behind: str) -> str:
    """A prefix after which `text` gets the ids that it has in the middle of a text.

    An end token, for SentencePiece tokenizers prepend a space to a text. Some prepend one behind each special token,
    too, and some end tokens take the spaces behind them; then it takes a character that merges with none.
    """
    end = tokenizer.eos_token
    prepends, strips = _at_end_token(tokenizer, len(tokenizer), end)
    as_text = prepends and not ends_with_control(tokenizer, behind)
    as_text = as_text or (strips and text[:1].isspace())
    is_parted = as_text and _is_parted(tokenizer, len(tokenizer), end + SEPARATOR, text[:1])
    return end + SEPARATOR if is_parted else end


def check_end_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that a tokenizer has an end token, which is split off from text beside it. Raises: UsageError."""
    end, index = tokenizer.eos_token, tokenizer.eos_token_id
    if index is None:
        raise UsageError(f"{name} has no end token; set its eos_token")
    is_split = index in tokenizer.added_tokens_decoder
    for text in ("a", ".", "\n"):
        with contextlib.suppress(Exception):  # what a tokenizer of whole words raises for an unknown one
            is_split = is_split and _ids(tokenizer, end + text)[:1] == [index]
    if not is_split:
        raise UsageError(
            f"{name} does not split its end token {end!r} off from text, as responses need it; add it as a special "
            "token"
        )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=64)
def _ids_of_prefix(tokenizer: PreTrainedTokenizerBase, size: int, prefix: str) -> list[int]:
    return _ids(tokenizer, prefix) if prefix else []


@functools.lru_cache(maxsize=16)
def _at_end_token(tokenizer: PreTrainedTokenizerBase, size: int, eos_token: str) -> tuple[bool, bool]:
    """Whether the tokenizer prepends a space behind an end token, and whether that takes the spaces behind it.

    Neither, where a token within a word is another one than at its beginning: text behind SEPARATOR is within one.
    """

    def behind(prefix: str, text: str) -> list[int]:
        return _ids(tokenizer, prefix + text)[len(_ids(tokenizer, prefix)) :]

    if getattr(model_of(tokenizer), "continuing_subword_prefix", None):
        return False, False
    try:
        plain, spaced, as_text = behind(eos_token, "a"), behind(eos_token, " a"), behind(eos_token + SEPARATOR, "a")
    except Exception:  # what a tokenizer of whole words raises for an unknown one if it has no token for these
        return False, False
    return plain != as_text, plain == spaced


@functools.lru_cache(maxsize=4096)
def _is_parted(tokenizer: PreTrainedTokenizerBase, size: int, prefix: str, character: str) -> bool:
    """Whether a character has ids of its own behind a prefix that ends with SEPARATOR.

    Not with a tokenizer of whole words, which reads both as one, nor where unknown characters in a row are one token.
    """
    return len(_ids(tokenizer, prefix + character)) > len(_ids(tokenizer, prefix))


def messages_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Messages | None:
    """Messages that the chat template renders as exactly these prompt ids, or None.

    Inverts the template: the text it writes around the turns is found by rendering a dialogue of known words, with and
    without a system message.
    """
    if not tokenizer.chat_template:
        return None
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    for first in ([], ["system"]):
        messages = _parsed_messages(tokenizer, text, first)
        if messages and encode_prompt(tokenizer, messages) == list(ids):
            return messages
    return None


def _parsed_messages(tokenizer: PreTrainedTokenizerBase, text: str, first: list[str]) -> Messages | None:
    """Messages of a rendered prompt that begins with the roles `first` and goes on with user and assistant."""
    words = ["first-turn-words", "second-turn-words", "third-turn-words"]
    turns = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    opening = [{"role": role, "content": "opening-words"} for role in first]
    try:
        shape = render(tokenizer, [*opening, *turns], add_generation_prompt=True)
    except UsageError:
        return None
    parts = re.split("|".join(["opening-words", *words]), shape)
    start, *before_user = parts[: len(first) + 1]
    after_user, after_assistant, end = parts[len(first) + 1 :] if len(parts) == len(first) + 4 else ("", "", "")
    if not (after_user and after_assistant and all(before_user) and text.startswith(start) and text.endswith(end)):
        return None
    text = text[len(start) : len(text) - len(end)]
    contents = []
    for separator in before_user:
        content, found, text = text.partition(separator)
        if not found:
            return None
        contents.append(content)
    *answered, last = [turn.split(after_user) for turn in text.split(after_assistant)]
    if len(last) != 1 or any(len(turn) != 2 for turn in answered):
        return None
    said = [content for turn in (*answered, last) for content in turn]
    roles = [*first, *(("user", "assistant")[i % 2] for i in range(len(said)))]
    return [{"role": role, "content": content} for role, content in zip(roles, [*contents, *said])]


def encode_response(
    tokenizer: PreTrainedTokenizerBase,
    response: str | dict[str, Any],
    prompt: str | Messages = "",
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a response, ending with exactly one end token.

    After messages it is one assistant message (a text stands for its content), as the chat template writes it.
    Raises: UsageError when the template refuses the messages, or writes an answer in another way than it asks for one.
    """
    if isinstance(prompt, str):
        text = protect(tokenizer, str(response), keep_tags=True)
        return [*encode_text(tokenizer, text, behind=prompt), tokenizer.eos_token_id]
    message = {"role": "assistant", "content": response} if isinstance(response, str) else response
    start = render(tokenizer, prompt, tools, add_generation_prompt=True)
    answer = _answer(tokenizer, start, prompt, message, tools)
    return close_turn(tokenizer, encode_text(tokenizer, answer, behind=start))


def _answer(
    tokenizer: PreTrainedTokenizerBase, start: str, prompt: Messages, message: dict[str, Any], tools: Any
) -> str:
    """The text of a response behind a rendered prompt. Raises: UsageError."""
    asked = Asked(tokenizer, start, shown_messages(tokenizer, prompt), shown_tools(tokenizer, tools))
    try:
        return answer_behind(asked, *shown_messages(tokenizer, [message]))
    except Unrendered as problem:
        raise UsageError(f"the chat template cannot write this response: {problem}") from None


def check_shown(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    response: dict[str, Any] | None,
    tools: Sequence[dict[str, Any]] | None,
) -> None:
    """Check that the chat template writes all of a prompt and of a response to be trained. Raises: UsageError."""
    start = render(tokenizer, prompt, tools, add_generation_prompt=True)
    lacking = left_out_of_prompt(start, shown_messages(tokenizer, prompt), shown_tools(tokenizer, tools))
    if not lacking and response is not None:
        answer = _answer(tokenizer, start, prompt, response, tools)
        lacking = left_out_of_answer(answer, *shown_messages(tokenizer, [response]))
    if lacking:
        raise UsageError(f"the chat template leaves out its {lacking.replace('_', ' ')}; use another template")


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of token ids, without special tokens and without a clean-up of spaces.

    The tokens that end a turn are also left out, although some tokenizers do not declare them as special. Like their
    own decoders, SentencePiece tokenizers drop a leading space.
    """
    ends = end_tokens(tokenizer)
    ids = [index for index in ids if index not in ends]
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def marked_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spans: Iterable[Sequence[int]]) -> str:
    """Text of token ids, control tokens too, with ⟦ and ⟧ around the tokens of each span [start, end), in order.

    A part is what its tokens add to the text before them: SentencePiece drops the space that a text begins with.
    """

    def text(start: int, end: int) -> str:
        before, whole, alone = (
            str(tokenizer.decode(list(part), clean_up_tokenization_spaces=False))
            for part in (ids[:start], ids[:end], ids[start:end])
        )
        return whole.removeprefix(before) if whole.startswith(before) else alone

    parts, at = [], 0
    for start, end in spans:
        parts += [text(at, start), "⟦", text(start, end), "⟧"]
        at = end
    return "".join([*parts, text(at, len(ids))])


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer prepends its BOS token to a text by default."""
    ids = tokenizer("a")["input_ids"]
    return ids != _ids(tokenizer, "a") and ids[:1] == [tokenizer.bos_token_id]


def pair_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> list[int]:
    """Input ids of a pair-preference model, whose score is the logit that the first response is the better one."""
    marks = pair_marks(tokenizer)
    return [*prompt, *marks[0], *first, *marks[1], *second, *marks[2]]


def pair_marks(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids before the first response of a pair, before the second one, and at the end."""
    return [tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in ("\n\n[A]", "\n\n[B]", "\n\n[?]")]


def pair_rows(tokenizer: PreTrainedTokenizerBase, rows: Rows) -> Rows:
    """Preference rows for a pair-preference model: both orders of the two responses, the better one first in `chosen`.

    As in other preference rows, the score of `chosen` must be the higher one, so all code for those applies. Each row
    is made when it is read.
    """

    def both_orders(row: Row) -> Row:
        start = row["prompt_len"]
        chosen, rejected = (torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected"))
        prompt, better, worse = chosen[:start], chosen[start:], rejected[start:]
        sides = {
            "chosen_input_ids": pair_prompt(tokenizer, prompt, better, worse),
            "rejected_input_ids": pair_prompt(tokenizer, prompt, worse, better),
        }
        return {**row, **sides}

    if not len(rows):
        return rows
    marks = [index for ids in pair_marks(tokenizer) for index in ids]
    lengths = rows.lengths() - rows.column("prompt_len") + len(marks)  # of the prompt, once, and both responses
    columns = dict.fromkeys(rows.texts, lengths)
    return View([rows], None, both_orders, f"pairs {marks}", columns, Facts(min(marks), max(marks), 0, {}))


def spelled_control(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """A control token that a plain text spells, but for one BOS at its start, which `encode_prompt` takes as such."""
    has_bos = tokenizer.bos_token is not None and adds_bos(tokenizer)
    found = controls(tokenizer).spelled.search(text.removeprefix(tokenizer.bos_token if has_bos else ""))
    return found[0] if found else None
