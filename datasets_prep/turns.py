"""Turns of a dialogue as the chat template writes them: for each assistant turn the text of its prompt and its answer.

A prompt is what serving renders at that turn, the dialogue so far with the generation prompt; the answer is what the
model has to write behind it for the assistant's message (`data.thinking`). A template that leaves out what it was given
(a system message, a tool result, the reasoning of the answer to be trained) is noticed by looking for it in the text,
and the row is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lightrlhf.data.chat import MARK, ROLES, Controls, controls, shown_messages, shown_tools
from lightrlhf.data.rendering import (
    Unrendered,
    generated_spans,
    has_generation_tags,
    left_out_of_answer,
    left_out_of_prompt,
    render_shown,
)
from lightrlhf.data.thinking import Asked, answer_behind, closed_thinking, has_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
KNOWN_ROLES = frozenset(ROLES.values())


class BadRow(Exception):
    """The reason for dropping a row, by which the report counts."""


class Turn(NamedTuple):
    """One assistant turn, as texts."""

    prompt: str
    answer: str
    kept: tuple[tuple[int, int], ...] | None = None  # characters of the answer in generation tags; None: no tags


class Cut(NamedTuple):
    """A dialogue that was rendered once."""

    turns: list[Turn]
    whole: str | None  # its text, whose ids may be cut as well; None: they may not


class Cutter(Protocol):
    """Cuts the turns of plain dialogues out of one rendering, see `cuts`."""

    controls: Controls

    def __call__(self, messages: Sequence[dict[str, Any]], shown: list[dict[str, Any]]) -> Cut | None:
        """The turns of a dialogue; None where they have to be rendered one by one."""


class Dialogue:
    """Messages of one row with their tools, rendered prefix by prefix.

    trained: the answers to be trained. Where one has reasoning, a template that closes thinking is told to open it, in
    all prompts of the row. cuts: renders a plain dialogue once instead; `whole` is its text then, if that may be
    tokenised as one.
    Raises: BadRow when the messages are malformed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        trained: Sequence[dict[str, Any]] = (),
        cuts: Cutter | None = None,
    ) -> None:
        check_messages(messages)
        self.tokenizer = tokenizer
        self.messages = messages
        self.shown = shown_messages(tokenizer, messages, cuts.controls if cuts else None)
        self.tools = shown_tools(tokenizer, tools)
        self.has_tags = has_generation_tags(tokenizer, tools)
        closed = closed_thinking(tokenizer, tools) if any(map(has_reasoning, trained)) else None
        self.variables = closed.variables if closed else {}
        cut = cuts(messages, self.shown) if cuts and not (tools or self.variables or self.has_tags) else None
        answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        self.whole = cut.whole if cut else None
        self.turns: dict[int, Turn] = dict(zip(answers, cut.turns if cut else ()))
        self.prompts = {index: turn.prompt for index, turn in self.turns.items()}

    def prompt(self, end: int) -> str:
        """Text of the first `end` messages with the generation prompt. Raises: BadRow."""
        if end not in self.prompts:
            text = self._render(self.shown[:end], add_generation_prompt=True)
            if lacking := left_out_of_prompt(text, self.shown[:end], self.tools):
                raise BadRow(f"template_drops_{lacking}")
            self.prompts[end] = text
        return self.prompts[end]

    def turn(self, index: int, message: dict[str, Any] | None = None) -> Turn:
        """The assistant turn of message `index`, or of another message in its place. Raises: BadRow."""
        if message is not None:
            check_messages([message])
            return self._turn(index, *shown_messages(self.tokenizer, [message]))
        if index not in self.turns:
            self.turns[index] = self._turn(index, self.shown[index])
        return self.turns[index]

    def _turn(self, index: int, shown: dict[str, Any]) -> Turn:
        prompt, history = self.prompt(index), self.shown[:index]
        try:
            answer = answer_behind(Asked(self.tokenizer, prompt, history, self.tools, self.variables), shown)
        except Unrendered as problem:
            raise BadRow(problem.reason) from None
        if lacking := left_out_of_answer(answer, shown):
            raise BadRow(f"template_drops_{lacking}")
        if not self.has_tags:
            return Turn(prompt, answer)
        if not self.tokenizer.is_fast:
            raise BadRow("generation_tags_need_a_fast_tokenizer")
        rendered = self._render([*history, shown])
        if not rendered.startswith(prompt + answer):
            return Turn(prompt, answer)  # behind a prompt that opens or closes thinking, all of it counts
        text, spans = generated_spans(self.tokenizer, [*history, shown], self.tools, **self.variables)
        if text != rendered:
            raise BadRow("generation_tags_change_the_text")
        start, end = len(prompt), len(prompt) + len(answer)
        return Turn(prompt, answer, tuple((max(a, start) - start, min(b, end) - start) for a, b in spans if b > start))

    def _render(self, shown: list[Any], add_generation_prompt: bool = False) -> str:
        try:
            return render_shown(self.tokenizer, shown, self.tools, add_generation_prompt, **self.variables)
        except Unrendered as problem:
            raise BadRow(problem.reason) from None


def check_messages(messages: Any) -> None:
    """Check roles and types, not the order of roles, which the template decides. Raises: BadRow."""
    if not messages:
        raise BadRow("no_messages")
    for message in messages:
        role, content = message["role"], message.get("content")
        if len(message) == 2 and role in KNOWN_ROLES and type(content) is str and content.isascii() and content.strip():
            continue  # nothing else to check
        if role not in KNOWN_ROLES:
            raise BadRow("unknown_role")
        if message.get("weight", 1) not in (0, 1):
            raise BadRow("message_weight_is_not_0_or_1")
        has_more = bool(message.get("tool_calls") or message.get("reasoning_content"))
        may_be_empty = role in ("system", "developer", "tool") or (role == "assistant" and has_more)
        check_text(message["content"], "message", may_be_empty)
        if message.get("reasoning_content") is not None:
            check_text(message["reasoning_content"], "reasoning", may_be_empty=True)
        for call in message.get("tool_calls") or []:
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict) or not (
                {"name", "arguments"} <= call["function"].keys()
            ):  # fmt: skip
                raise BadRow("malformed_tool_call")


def check_text(text: Any, what: str, may_be_empty: bool = False) -> None:
    """Check that a value is text, not empty, and can be encoded as UTF-8. Raises: BadRow."""
    if text is None:
        raise BadRow(f"{what}_is_null")
    if not isinstance(text, str):
        raise BadRow(f"{what}_is_{type(text).__name__}")
    if not (may_be_empty or text.strip()):
        raise BadRow(f"empty_{what}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("lone_surrogate") from None


def spells_control_token(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a content of this rendered text spells a control token, which is encoded as plain text.

    A mark stands within it then; one behind the mere beginning of a control token stands in none.
    """
    if MARK not in text:
        return False
    marks = list(accumulate(len(piece) for piece in text.split(MARK)))
    found = controls(tokenizer).spelled.finditer(text.replace(MARK, ""))
    return any(match.start() < mark < match.end() for match in found for mark in marks)
