"""Tab Chat: one model, streaming, with the reward of each answer, its KL and its tokens by log-ratio."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.dialogue import Turn, edited, prompt_of, prompt_values, user_turn, without_pending, without_system
from lightrlhf.demo.inputs import (
    NOTHING_TYPED,
    connect_form,
    errors_to_toast,
    form_inputs,
    given,
    is_blank,
    markup,
    message_inputs,
    settings_inputs,
)
from lightrlhf.demo.markup import dialogue_as_html
from lightrlhf.demo.session import AS_TRAINED, DemoBackend
from lightrlhf.rewards.encoding import Messages


def chat_tab(gr: Any, backend: DemoBackend) -> Any:
    """Builds the tab; returns its model dropdown."""
    safe = functools.partial(errors_to_toast, gr)
    chat = Chat(gr, backend)
    parts = chat_parts(gr, backend)
    turns, window, hint, model, system = gr.State([]), parts.window, parts.hint, parts.model, parts.system
    connect_form(gr, parts.form, system, parts.message)

    def edit(turns: list[Turn], event: gr.EventData) -> tuple[Any, ...]:
        data = given(event)
        turns = edited(turns, data.get("turn"), data.get("text"))
        return turns, dialogue_as_html(turns)

    def show_tokens(turns: list[Turn], macro_length: str, event: gr.EventData) -> tuple[Any, ...]:
        turns = backend.with_tokens(turns, given(event).get("turn"), macro_length)
        return turns, dialogue_as_html(turns)

    def suggest(label: str, event: gr.EventData) -> tuple[Any, ...]:
        prompts, index = backend.suggestions(label), given(event).get("turn")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(prompts):
            raise UsageError("this prompt is no longer there; reload the page")
        return chat.fill(prompts[index])

    for handler in (edit, show_tokens, suggest):
        handler.__annotations__["event"] = gr.EventData  # the annotation is a string, and gr is not a global name
    quiet = {"show_progress": "hidden"}
    private = {**quiet, "api_visibility": "private"}
    asking = gr.on(
        [parts.message[0].submit, parts.send.click],
        safe(chat.ask),
        [turns, parts.form, *parts.message],
        [turns, window, parts.message[0], hint],
        **quiet,
    )
    inputs = [turns, model, system, parts.seed, *parts.sliders]
    editing = window.edit(safe(edit), turns, [turns, window], **private)
    answering = [
        asking.success(safe(chat.answer), inputs, [turns, window], api_name="answer", **quiet),
        parts.regenerate.click(safe(chat.reply), inputs, [turns, window], api_name="regenerate", **quiet),
        editing.success(safe(chat.answer), inputs, [turns, window], **private),
    ]
    scoring = safe(chat.score), [turns, model, parts.sliders[2]], [turns, window]
    for answered in answering:
        answered.success(*scoring, **private)
    stopped = parts.stop.click(lambda: None, cancels=answering, **private)
    stopped.then(*scoring, **private)  # after the stream has ended
    clearing = safe(lambda label: ([], chat.shown([], label), "")), model, [turns, window, hint]
    parts.clear.click(*clearing, **private)
    window.select(safe(show_tokens), [turns, parts.macro_length], [turns, window], **private)
    filled = [turns, window, system, parts.form, *parts.message]
    window.example_select(safe(suggest), model, filled, **private)
    parts.load_prompt.click(safe(lambda label: chat.fill(backend.test_prompt(label))), model, filled, **private)
    parts.load_settings.click(safe(backend.stored_settings), model, parts.sliders, **private)
    greeting = safe(lambda turns, label: gr.skip() if turns else chat.shown([], label))
    model.change(greeting, [turns, model], window, **private)
    return model


def chat_parts(gr: Any, backend: DemoBackend) -> SimpleNamespace:
    """Makes the parts of the tab."""
    names, first = backend.cache.labels(), backend.cache.labels()[-1]
    form, tab = backend.form(first), SimpleNamespace()
    small = {"size": "sm", "min_width": 60, "scale": 0}
    with gr.Row(elem_classes="workplace"):
        with gr.Column(scale=3, elem_classes="main"):
            tab.window = markup(gr, Chat(gr, backend).shown([], first), "dialogue", elem_classes="scrolling")
            with gr.Row(elem_classes="composer"):
                with gr.Column(scale=1, min_width=120):
                    tab.message = message_inputs(gr, form)
                tab.send = gr.Button("Send", variant="primary", min_width=90, scale=0, elem_classes="send")
                tab.stop = gr.Button("Stop", variant="primary", min_width=90, scale=0, elem_classes="stop")
            with gr.Row(elem_classes="below-composer"):
                tab.hint = gr.HTML("", elem_classes="hint", apply_default_css=False)
                tab.regenerate = gr.Button("Regenerate", elem_classes="needs-answer", **small)
                tab.load_prompt = gr.Button("Test prompt", **small)
                tab.clear = gr.Button("Clear", elem_classes="needs-answer", **small)
        with gr.Column(scale=1, min_width=280, elem_classes="side"):
            tab.model = gr.Dropdown(names, value=first, label="Model")
            tab.system, tab.form = form_inputs(gr, form)
            with gr.Accordion("Generation settings", open=False):
                tab.seed, tab.sliders = settings_inputs(gr, backend.args)
                tab.load_settings = gr.Button("As the model was trained", size="sm")
            lengths = [AS_TRAINED, "1", "2", "3", "5", "10"]
            tab.macro_length = gr.Dropdown(lengths, value=AS_TRAINED, label="Tokens in a macro action")
    return tab


class Chat:
    """Handlers of the tab's events."""

    def __init__(self, gr: Any, backend: DemoBackend) -> None:
        self.gr, self.backend = gr, backend

    def shown(self, turns: list[Turn], label: str) -> str:
        told = [] if turns else [last_message(prompt) for prompt in self.backend.suggestions(label)]
        return dialogue_as_html(turns, f"Ask {label}", told)

    def ask(self, turns: list[Turn], form: str, text: str, *fields: str) -> tuple[Any, ...]:
        if is_blank(form, text, *fields):
            return turns, self.gr.skip(), self.gr.skip(), NOTHING_TYPED
        prompt = prompt_of(turns, form, text, *fields)
        turns = [*turns, user_turn(prompt if isinstance(prompt, str) else text, prompt)]
        return turns, dialogue_as_html(turns), "", ""

    def reply(
        self, turns: list[Turn], label: str, system: str, seed: float, *sliders: Any
    ) -> Iterator[tuple[Any, ...]]:
        for partial in self.backend.reply(turns, label, system, seed, *sliders):
            yield partial, dialogue_as_html(partial)

    def answer(self, turns: list[Turn], *inputs: Any) -> Iterator[tuple[Any, ...]]:
        if turns and turns[-1]["role"] == "user":
            yield from self.reply(turns, *inputs)
        else:  # nothing was asked; without a value Gradio would empty the window
            yield self.gr.skip(), self.gr.skip()

    def score(self, turns: list[Turn], label: str, temperature: float) -> Iterator[tuple[Any, ...]]:
        ended = without_pending(turns)
        yield ended, self.shown(ended, label)
        scored = self.backend.score_last(ended, temperature)
        yield scored, self.shown(scored, label)

    def fill(self, prompt: str | Messages) -> tuple[Any, ...]:
        turns, *values = prompt_values(prompt)
        system, turns = without_system(turns)
        return turns, dialogue_as_html(turns) if turns else self.gr.skip(), system, *values


def last_message(prompt: str | Messages) -> str:
    """The message that a prompt ends with."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
