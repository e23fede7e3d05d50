"""Ollama's Modelfile: which GGUF file, the chat template in Go's language, what ends a response, the temperature.

Go cannot run a Jinja template. Most chat templates only put fixed texts around the messages of a dialogue, so these
texts are read off a rendered dialogue, and dialogues of several lengths are then rendered by them: where one differs
from what the Jinja template makes of it, the template does more and is refused.

Left out: tools, pictures and reasoning. Ollama itself is not run by the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rendering import render
from lightrlhf.data.tokens import adds_bos
from lightrlhf.data.types import Tokenizer

SYSTEM, USER, ANSWER, NEXT = "system-words", "user-words", "assistant-words", "more-user-words"
TRIED = ("Be brief.", "Two lattes, please.\n\nTo go.", "Of course!", "And a muffin?", "Yes: 3 {left}.", "Thank you")


@dataclass(frozen=True)
class ChatTexts:
    """The texts that a chat template puts around messages."""

    start: str  # before the first user message
    around_system: tuple[str, str] | None  # instead of `start`; None if the template takes no system message
    answer: str  # between a user message and its answer
    between: str  # between an answer and the next user message
    end: str  # behind the last user message

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of a dialogue that ends with a user message."""
        text, answered = self.start, False
        for message in messages:
            if message["role"] == "system" and self.around_system:
                text = message["content"].join(self.around_system)
            elif message["role"] == "user":
                text += (self.between if answered else "") + message["content"]
            elif message["role"] == "assistant":
                text, answered = text + self.answer + message["content"], True
        return text + self.end

    def without_start(self, text: str) -> ChatTexts:
        """The same without a text at the start of a dialogue."""
        around = self.around_system and (self.around_system[0].removeprefix(text), self.around_system[1])
        return replace(self, start=self.start.removeprefix(text), around_system=around)

    def in_go(self) -> str:
        """The same as a template in Go's language, for Ollama."""
        start = _literal(self.start)
        if self.around_system:
            before, behind = map(_literal, self.around_system)
            start = "{{ if .System }}" + before + "{{ .System }}" + behind + "{{ else }}" + start + "{{ end }}"
        user = "{{ if $answered }}" + _literal(self.between) + "{{ end }}{{ .Content }}"
        answer = _literal(self.answer) + "{{ .Content }}{{ $answered = true }}"
        turns = '{{ if eq .Role "user" }}' + user + '{{ else if eq .Role "assistant" }}' + answer + "{{ end }}"
        return "{{ $answered := false }}" + start + "{{ range .Messages }}" + turns + "{{ end }}" + _literal(self.end)


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def chat_texts(tokenizer: Tokenizer) -> ChatTexts:
    """The texts of a tokenizer's chat template. Raises: UsageError when it has none, or one that does more."""
    if not tokenizer.chat_template:
        raise UsageError("--to ollama needs a chat template, and the tokenizer has none; use --to gguf")
    turns = [("user", USER), ("assistant", ANSWER), ("user", NEXT)]
    start, answer, between, end = split(_render(tokenizer, turns), USER, ANSWER, NEXT)
    try:
        before, behind, *rest = split(_render(tokenizer, [("system", SYSTEM), *turns]), SYSTEM, USER, ANSWER, NEXT)
        around = (before, behind) if rest == [answer, between, end] else None
    except UsageError:
        around = None
    texts = ChatTexts(start, around, answer, between, end)
    system, *contents = TRIED
    for length in (1, 3, 5):
        dialogue = [("assistant" if i % 2 else "user", content) for i, content in enumerate(contents[:length])]
        for messages in [dialogue, [("system", system), *dialogue]] if around else [dialogue]:
            if texts.render(_messages(messages)) != _render(tokenizer, messages):
                raise _refusal()
    return texts


def split(text: str, *words: str) -> list[str]:
    """What stands before, between and behind words that follow one another in a text. Raises: UsageError."""
    parts = []
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            raise _refusal()
        parts.append(before)
    return [*parts, text]


def _refusal() -> UsageError:
    return UsageError(
        "--to ollama: the chat template does more than put texts around messages, which is all that its Modelfile can "
        "say here; use --to gguf, which carries the template itself"
    )


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _render(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> str:
    return render(tokenizer, _messages(turns), add_generation_prompt=True)


def modelfile(tokenizer: Tokenizer, ends: set[int], gguf_name: str, temperature: float) -> str:
    """The text of a Modelfile beside a GGUF file. Raises: UsageError when the template cannot be written in it.

    ends: ids at which a response ends. A BOS that llama.cpp puts before a text by itself is left out of the template.
    """
    texts = chat_texts(tokenizer)
    if adds_bos(tokenizer):
        texts = texts.without_start(tokenizer.bos_token)
    template = texts.in_go()
    stops = tokenizer.convert_ids_to_tokens(sorted(ends))
    if '"""' in template or any('"' in stop for stop in stops):
        raise UsageError("--to ollama: a quotation mark in the chat template or an end token ends the Modelfile's text")
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{stop}"' for stop in stops)]
    return "\n".join([*lines, f"PARAMETER temperature {temperature:g}"]) + "\n"
