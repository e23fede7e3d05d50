"""The answer behind the prompt that a chat template serves, which may open or close thinking.

DeepSeek-R1's generation prompt opens `<think>`, Gemma 4's closes an empty thought, and a stored answer is rendered with
neither. A response is what the model has to write behind the served prompt:

| the prompt | answer without reasoning | answer with reasoning |
|---|---|---|
| opens thinking | the end of thinking as the template writes it, the answer | the reasoning, that end, the answer |
| closes thinking | the answer | as where it is opened, by a variable of the template; without one it is refused |

`<think>…</think>` at the start of a content, or text that `</think>` ends, is its reasoning there. A template that
rewrites what stands before the last message, as Mistral's move the system's words into the last question, is read from
that message on.

Left out: generation prompts that begin the answer itself ("Let's think step by step.").
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.data.chat import LONGEST, MARK, template_of
from lightrlhf.data.rendering import ANSWERED, ASKED, THOUGHT, Unrendered, render_shown, said
from lightrlhf.data.turn_ends import answer_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENED = (
    r"(?:<(?:\w+:)?think(?:ing)?(?::\w+)?>|<\|START_THINKING\|>|<\|channel>thought|\[THINK\]|"
    r"Here are my reasoning steps:)"
)
CLOSED = r"(?:</(?:\w+:)?think(?:ing)?(?::\w+)?>|<\|END_THINKING\|>|<channel\|>|\[/THINK\]|\[BEGIN FINAL RESPONSE\])"
AT_END = re.compile(rf"(?P<opened>{OPENED}\s*)?(?P<closed>{CLOSED}\s*)?$")  # of a prompt; matches nothing, too
OPENS, CLOSES = re.compile(rf"\s*{OPENED}"), re.compile(CLOSED)  # an answer at its start; anywhere
WITHOUT = re.compile(rf"\s*(?:{OPENED}\s*)?(?P<closed>{CLOSED})")  # the start of an answer without reasoning
TAG = re.compile(r"<[^|<>]+>")
IN_CONTENT = re.compile(rf"\s*(<{MARK}?think(?:ing)?>)?(.*?)<{MARK}?/think(?:ing)?>\s*", re.DOTALL)
VARIABLES = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}  # that open thinking in templates


def has_reasoning(message: dict[str, Any]) -> bool:
    """Whether an assistant's message has reasoning, in a field of its own or in tags at the start of its content."""
    content = message.get("content") or ""
    found = IN_CONTENT.match(content) if "think" in content else None  # faster by far
    return bool((message.get("reasoning_content") or "").strip() or (found and found[1]))


class Closed(NamedTuple):
    """How a template's generation prompt closes thinking by default."""

    opened: str  # empty where it only closes it
    closed: str
    variables: dict[str, Any]  # with which it does not


def closed_thinking(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> Closed | None:
    """How the chat template closes thinking, and the variable that opens it if there is one; None if it does not."""
    return _closed_thinking(tokenizer, template_of(tokenizer, tools))


@lru_cache(maxsize=16)
def _closed_thinking(tokenizer: PreTrainedTokenizerBase, template: str) -> Closed | None:
    def markup(**variables: Any) -> re.Match[str] | None:
        try:
            text = render_shown(tokenizer, [said("user", ASKED)], add_generation_prompt=True, **variables)
        except Unrendered:
            return None
        return _markup(text, ASKED)

    found = markup()
    if not found or not found["closed"]:
        return None
    possible = [{name: value} for name, value in VARIABLES.items() if name in template]
    tried = [(variables, markup(**variables)) for variables in possible]
    opening = next((variables for variables, one in tried if one and not one["closed"]), {})
    return Closed(found["opened"] or "", found["closed"], opening)


@dataclass(frozen=True)
class Asked:
    """A rendered prompt with its protected messages and tools, behind which answers are looked for."""

    tokenizer: PreTrainedTokenizerBase
    prompt: str
    messages: Sequence[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """The content of the last message."""
        return str(self.messages[-1].get("content") or "").strip() if self.messages else ""

    def behind(self, start: str, answer: dict[str, Any]) -> str | None:
        """The answer, rendered behind a text with which its turn starts; None if the template writes another one."""
        text = self._rendered(answer)
        found = start.rfind(self.last) if self.last and self.messages[-1]["role"] != "assistant" else -1
        if text.startswith(start) or found < 0:
            return answer_text(self.tokenizer, start, text)
        known = self._rendered(said("assistant", ANSWERED))
        before, same, _ = known.rpartition(start[found:])  # the last message, and what begins the turn
        is_parted = same.strip() not in ("", self.last) and text.startswith(before + same)
        return answer_text(self.tokenizer, before + same, text) if is_parted else None

    def _rendered(self, answer: dict[str, Any]) -> str:
        return render_shown(self.tokenizer, [*self.messages, answer], self.tools, **self.variables)


def answer_behind(asked: Asked, message: dict[str, Any]) -> str:
    """What a model has to write behind a prompt for an assistant's message, protected as well. Raises: Unrendered."""
    markup = _markup(asked.prompt, asked.last)
    head = asked.prompt[: len(asked.prompt) - len(markup[0])]
    parted = _parted(message)
    thought = (parted.get("reasoning_content") or "").strip()
    answer = asked.behind(asked.prompt, parted if asked.variables else message)
    if markup["opened"] and not markup["closed"]:
        if not answer or not answer.lstrip().startswith(thought) or OPENS.match(answer) or not CLOSES.search(answer):
            answer = _behind_opened(asked, head, parted, thought)
    elif markup["closed"] and answer is None:
        if thought:
            raise Unrendered(_on_closed(asked), "generation_prompt_closes_thinking")
        answer = asked.behind(head, message)
        answer = answer and _cut(WITHOUT, answer)
    elif asked.variables and answer and thought:
        tags = closed_thinking(asked.tokenizer, asked.tools)
        known = asked.behind(asked.prompt, parted | {"reasoning_content": THOUGHT}) or ""
        if tags and THOUGHT not in known:  # such a template writes the reasoning of calls alone
            answer = _thought_in(thought, tags.opened, tags.closed) + answer
    if answer is None:
        line = "an answer begins otherwise than the generation prompt: give another chat template"
        raise Unrendered(line, "generation_prompt_is_not_the_answers_beginning")
    return answer


def _behind_opened(asked: Asked, head: str, message: dict[str, Any], thought: str) -> str | None:
    """An answer with the end of the thinking that its prompt opens, behind its reasoning if it has any."""
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    answer = asked.behind(head, plain)
    if answer is None:
        return None
    own_end = WITHOUT.match(answer)  # as the template writes it without reasoning
    if own_end and not thought:
        return answer[own_end.start("closed") :]
    reasoned = _cut(OPENS, asked.behind(head, plain | {"reasoning_content": THOUGHT}) or "").lstrip()
    if reasoned.startswith(THOUGHT):
        return thought + reasoned.removeprefix(THOUGHT)
    if own_end:
        return thought + answer[own_end.start("closed") :]
    opened = asked.prompt[len(head) :]
    if not TAG.fullmatch(opened.strip()):
        return None  # whose end the template does not tell
    closed = opened.strip().replace("<", "</") + "\n\n"
    return _thought_in(thought, opened, closed).removeprefix(opened) + answer.removeprefix(opened)


def _thought_in(thought: str, opened: str, closed: str) -> str:
    """Reasoning between its tags, on lines of its own if the first tag has one."""
    return opened + thought + ("\n" if opened.endswith("\n") else "") + closed


def _cut(start: re.Pattern[str], text: str) -> str:
    """A text without what a pattern matches at its start."""
    found = start.match(text)
    return text[found.end() :] if found else text


def _on_closed(asked: Asked) -> str:
    """What to do about reasoning behind a prompt that closes thinking."""
    found = closed_thinking(asked.tokenizer, asked.tools)
    unset = [(name, value) for name, value in (found.variables.items() if found else ()) if name not in asked.variables]
    for name, value in unset:
        return f"leave out the reasoning, or begin the chat template with {{% set {name} = {json.dumps(value)} %}}"
    return "leave out the reasoning, or give another chat template"


def _parted(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the reasoning at the start of its content in a field of its own."""
    content = message.get("content") or ""
    found = IN_CONTENT.match(content)
    if not found or (message.get("reasoning_content") or "").strip():
        return message
    return {**message, "reasoning_content": found[2].strip(), "content": content[found.end() :]}


def _markup(prompt: str, last: str) -> re.Match[str]:
    """What opens or closes thinking at the end of a prompt, behind the content of its last message."""
    found = AT_END.search((prompt.rpartition(last)[2] if last else prompt)[-LONGEST:])
    assert found  # at least the end itself
    return found
