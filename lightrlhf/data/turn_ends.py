"""Where an assistant turn ends: the control tokens with which the chat template closes it.

The end is found by rendering known exchanges of words and of tool calls, whose turns may end with different tokens.
Adjacent control tokens, such as `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`, all belong to the turn, up to the tokenizer's
end token. The last of them ends a response, so sampling stops where training stopped. The turn excludes the header of
the next turn, and text that a template writes only after the last turn of a dialogue, such as `<|endoftext|>`, since
the next prompt lacks it. `{% generation %}` tags that reach further take precedence.

Left out: turns of tool calls without a control token at their end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.data.chat import any_of, controls
from lightrlhf.data.rendering import (
    ANSWERED,
    ARGUMENT,
    ASKED,
    CALL_ID,
    NAME,
    TOOLS,
    VALUE,
    Unrendered,
    called,
    generated_spans,
    has_generation_tags,
    render_shown,
    said,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LATER, RESULT, OTHER_VALUE = "later-user-words", "tool-result-words", "second-value"


class TurnEnd(NamedTuple):
    """The end of a turn as the chat template writes it."""

    ids: tuple[int, ...]  # control tokens, of which the last ends a response
    text: str  # starts with the first of them; longer if generation tags reach further
    behind: str  # the text after it, which belongs to the next prompt


class _Control(NamedTuple):
    """A control token in a text."""

    id: int
    start: int
    end: int


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the token that ends an assistant's answer; None if the chat template leaves turns open.

    Also None without a template, or if it cannot render the known exchange.
    """
    end = answer_end(tokenizer)
    return end.ids[-1] if end and end.ids else None


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an assistant turn: an answer, and tool calls where the chat template ends them otherwise."""
    ends = (answer_end(tokenizer), call_end(tokenizer))
    return list(dict.fromkeys(end.ids[-1] for end in ends if end and end.ids))


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all tokens with which a chat template ends assistant turns."""
    ends = (answer_end(tokenizer), call_end(tokenizer))
    return {index for end in ends if end for index in end.ids}


def answer_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """How the chat template ends an assistant's answer; None if it cannot render one."""
    return _answer_end(tokenizer, *_key(tokenizer)) if tokenizer.chat_template else None


def call_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """How the chat template ends a turn of tool calls; None if it renders none, or ends them like answers."""
    return _call_end(tokenizer, *_key(tokenizer)) if tokenizer.chat_template else None


def answer_text(tokenizer: PreTrainedTokenizerBase, prompt: str, rendered: str) -> str | None:
    """The assistant turn that `rendered` adds to a prompt, with its end; None if `rendered` does not begin with it.

    Text after the end, such as a line break, belongs to the next prompt.
    """
    if not rendered.startswith(prompt):
        return None
    turn = rendered[len(prompt) :]
    usual, of_calls = answer_end(tokenizer), call_end(tokenizer)
    if usual and usual.ids:
        before, found, _ = turn.partition(usual.text)
        if found:
            return before + found
    for end in (of_calls, usual):
        if end and turn.endswith(end.text + end.behind):
            return turn.removesuffix(end.behind)
    return turn.rstrip()


def close_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Ids of a turn with the tokenizer's end token behind it, where the template leaves it open."""
    end = turn_end(tokenizer)
    ends = {tokenizer.eos_token_id} | (set() if end is None else controls(tokenizer).ending_ids)
    last = next((i for i in reversed(ids) if i in ends or str(tokenizer.decode([i])).strip()), -1)  # then white space
    return ids if last in ends else [*ids, tokenizer.eos_token_id]


def without_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Ids of a whole response without the tokens at its end."""
    ends = {tokenizer.eos_token_id, *end_tokens(tokenizer)}
    length = max((place for place, index in enumerate(ids) if index in ends), default=len(ids))
    while length and ids[length - 1] in ends:
        length -= 1
    return list(ids[:length])


# -------------------------------------------------------------------------------------------------- known exchanges
def _key(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What an end depends on besides the tokenizer."""
    return str(tokenizer.chat_template), tokenizer.eos_token


@functools.lru_cache(maxsize=16)
def _answer_end(tokenizer: PreTrainedTokenizerBase, template: str, eos_token: str) -> TurnEnd | None:
    exchange = [said("user", ASKED), said("assistant", ANSWERED)]
    behind = _behind(tokenizer, exchange, [ANSWERED])
    if behind is None:
        return None
    run = _controls_in(tokenizer, behind)
    headers = _headers(tokenizer)
    for place, (before, control) in enumerate(pairwise(run), start=1):
        if before.id == tokenizer.eos_token_id or control.start > before.end or control.id in headers:
            run = run[:place]
            break
    later = _behind(tokenizer, [*exchange, said("user", LATER)], [ANSWERED]) or behind
    stays = [control for control in run if later.startswith(behind[: control.end])]
    return _end_of(tokenizer, exchange, None, behind, stays or run)


@functools.lru_cache(maxsize=16)
def _call_end(tokenizer: PreTrainedTokenizerBase, template: str, eos_token: str) -> TurnEnd | None:
    usual = answer_end(tokenizer)
    exchange = [said("user", ASKED), called(VALUE)]
    behind = _behind(tokenizer, exchange, [VALUE, NAME, ARGUMENT], TOOLS)
    if behind is None or (usual and usual.ids and usual.text in behind):
        return None
    result = {"role": "tool", "content": RESULT, "name": NAME, "tool_call_id": CALL_ID}
    headers = _headers(tokenizer) | _last_before(tokenizer, [*exchange, result], RESULT, TOOLS)
    between = _between_calls(tokenizer)
    end: _Control | None = None
    for control in _controls_in(tokenizer, behind):
        if end and (end.id == tokenizer.eos_token_id or control.id in headers):
            break
        if control.id not in between:
            end = control
    return _end_of(tokenizer, exchange, TOOLS, behind, [end]) if end else None


def _end_of(
    tokenizer: PreTrainedTokenizerBase,
    exchange: list[dict[str, Any]],
    tools: list[Any] | None,
    behind: str,
    run: list[_Control],
) -> TurnEnd | None:
    """The end of the last turn of an exchange; `run`: the control tokens in the text after its words."""
    stop = run[-1].end if run else 0
    reach = max(stop, len(behind) + _reach_of_tags(tokenizer, exchange, tools))
    if reach == 0:
        return None
    if tokenizer.eos_token_id not in [control.id for control in run]:
        run = run + [control for control in _controls_in(tokenizer, behind) if stop <= control.start < reach]
    start = run[0].start if run else 0
    return TurnEnd(tuple(control.id for control in run), behind[start:reach], behind[reach:])


def _reach_of_tags(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None) -> int:
    """Where the last `{% generation %}` tag of a rendered dialogue ends, counted from the end of its text."""
    if not has_generation_tags(tokenizer, tools):
        return -sys.maxsize
    try:
        text, spans = generated_spans(tokenizer, messages, tools)
    except Unrendered:
        return -sys.maxsize
    return spans[-1][1] - len(text) if spans else -sys.maxsize


def _headers(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Control tokens with which a turn begins, but for the tokenizer's end token."""
    asked = [said("user", ASKED)]
    plain, asking = (_behind(tokenizer, asked, [ASKED], prompts=prompts) for prompts in (False, True))
    of_plain, of_prompt = (_controls_in(tokenizer, text or "") for text in (plain, asking))
    added = {control.id for control in of_prompt if control not in of_plain}
    return (added | _last_before(tokenizer, asked, ASKED)) - {tokenizer.eos_token_id}


def _last_before(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], word: str, tools: list[Any] | None = None
) -> set[int]:
    """The last control token before a word, if there is one."""
    before, found, _ = (_rendered(tokenizer, messages, tools) or "").rpartition(word)
    return {control.id for control in _controls_in(tokenizer, before)[-1:]} if found else set()


def _between_calls(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Control tokens between two calls of a turn; none where the chat template takes one call alone."""
    text = _rendered(tokenizer, [said("user", ASKED), called(VALUE, OTHER_VALUE)], TOOLS) or ""
    _, found, rest = text.partition(VALUE)
    between, also_found, _ = rest.partition(OTHER_VALUE)
    return {control.id for control in _controls_in(tokenizer, between)} if found and also_found else set()


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, prompts: bool = False
) -> str | None:
    """Text of messages, with a generation prompt if `prompts`; None if the chat template refuses them."""
    try:
        return render_shown(tokenizer, messages, tools, add_generation_prompt=prompts)
    except Unrendered:
        return None


def _behind(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    words: list[str],
    tools: list[Any] | None = None,
    prompts: bool = False,
) -> str | None:
    """The text that a chat template writes after the last of some words; None if it refuses them or lacks the first."""
    text = _rendered(tokenizer, messages, tools, prompts)
    if text is None or words[0] not in text:
        return None
    return text[max(text.rfind(word) + len(word) for word in words if word in text) :]


def _controls_in(tokenizer: PreTrainedTokenizerBase, text: str) -> list[_Control]:
    """The control tokens of a rendered text, in order."""
    found = controls(tokenizer)
    names = dict(zip(tokenizer.convert_ids_to_tokens(sorted(found.ending_ids)), sorted(found.ending_ids)))
    # Raw text: known exchanges.
    ids = set(tokenizer(tokenizer.eos_token + text, add_special_tokens=False)["input_ids"])
    matches = any_of(set(names)).finditer(text)
    return [_Control(names[m[0]], m.start(), m.end()) for m in matches if names[m[0]] in ids]
