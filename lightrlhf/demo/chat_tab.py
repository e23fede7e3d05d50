"""Tab Chat: one model, streaming, with the reward of each answer, its KL and its tokens by log-ratio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.dialogue import Turn, edit_turn, end_stream, prompt_of, prompt_values, split_system, user_turn
from lightrlhf.demo.inputs import NOTHING_TYPED, PRIVATE, QUIET, Workplace, event_values, is_blank
from lightrlhf.demo.markup import dialogue_as_html
from lightrlhf.demo.session import AS_TRAINED, DemoBackend
from lightrlhf.rewards.encoding import Messages

BUTTONS = {"Regenerate": "needs-answer", "Test prompt": "", "Clear": "needs-answer"}  # with their CSS class


def chat_tab(backend: DemoBackend) -> Any:
    """Build the tab; returns its model dropdown."""
    chat, turns, first = Chat(backend), gr.State([]), backend.cache.labels()[-1]
    window = "dialogue", chat.draw([], first)
    tab = Workplace(backend, window, ("Send", 90), BUTTONS, value=first, label="Model")
    regenerate, load_prompt, clear = tab.buttons
    with tab.settings:
        load_settings = gr.Button("As the model was trained", size="sm")
    with tab.side:
        lengths = [AS_TRAINED, "1", "2", "3", "5", "10"]
        macro_length = gr.Dropdown(lengths, value=AS_TRAINED, label="Tokens in a macro action")
    shown, model = [turns, tab.window], tab.model
    asking = gr.on(
        [tab.message[0].submit, tab.send.click],
        chat.ask,
        [turns, tab.form, *tab.message],
        [*shown, tab.message[0], tab.hint],
        **QUIET,
    )
    inputs = [turns, model, tab.system, tab.seed, *tab.sliders]
    editing = tab.window.edit(chat.edit, turns, shown, **PRIVATE)
    answering = [
        asking.success(chat.answer, inputs, shown, api_name="answer", **QUIET),
        regenerate.click(chat.reply, inputs, shown, api_name="regenerate", **QUIET),
        editing.success(chat.answer, inputs, shown, **PRIVATE),
    ]
    stopping = tab.stop.click(lambda: None, cancels=answering, **PRIVATE)
    for ended in (*(answered.success for answered in answering), stopping.then):
        ended(chat.score, [turns, model, tab.sliders[2]], shown, **PRIVATE)
    clear.click(chat.clear, model, [*shown, tab.hint], **PRIVATE)
    tab.window.select(chat.show_tokens, [turns, macro_length], shown, **PRIVATE)
    filled = [*shown, tab.system, tab.form, *tab.message]
    tab.window.example_select(chat.suggest, model, filled, **PRIVATE)
    load_prompt.click(chat.load_prompt, model, filled, **PRIVATE)
    load_settings.click(backend.stored_settings, model, tab.sliders, **PRIVATE)
    model.change(chat.greet, [turns, model], tab.window, **PRIVATE)
    return model


class Chat:
    """Handlers of the tab's events; most return the dialogue and its HTML."""

    def __init__(self, backend: DemoBackend) -> None:
        self.backend = backend

    def draw(self, turns: list[Turn], label: str) -> str:
        """Draw a dialogue; an empty one shows prompts to begin with."""
        suggestions = [] if turns else self.backend.suggestions(label)
        texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in suggestions]
        return dialogue_as_html(turns, f"Ask {label}", texts)

    def ask(self, turns: list[Turn], form: str, text: str, *fields: str) -> tuple[Any, ...]:
        if is_blank(form, text, *fields):
            return turns, gr.skip(), gr.skip(), NOTHING_TYPED
        prompt = prompt_of(turns, form, text, *fields)
        turns = [*turns, user_turn(prompt if isinstance(prompt, str) else text, prompt)]
        return turns, dialogue_as_html(turns), "", ""

    def edit(self, turns: list[Turn], event: gr.EventData) -> tuple[Any, ...]:
        values = event_values(event)
        turns = edit_turn(turns, values.get("turn"), values.get("text"))
        return turns, dialogue_as_html(turns)

    def reply(self, turns: list[Turn], *inputs: Any) -> Iterator[tuple[Any, ...]]:
        for partial in self.backend.reply(turns, *inputs):
            yield partial, dialogue_as_html(partial)

    def answer(self, turns: list[Turn], *inputs: Any) -> Iterator[tuple[Any, ...]]:
        if turns and turns[-1]["role"] == "user":
            yield from self.reply(turns, *inputs)
        else:  # nothing was asked; without a value Gradio would empty the window
            yield gr.skip(), gr.skip()

    def score(self, turns: list[Turn], label: str, temperature: float) -> Iterator[tuple[Any, ...]]:
        ended = end_stream(turns)
        yield ended, self.draw(ended, label)
        scored = self.backend.score_last(ended, temperature)
        yield scored, self.draw(scored, label)

    def show_tokens(self, turns: list[Turn], macro_length: str, event: gr.EventData) -> tuple[Any, ...]:
        turns = self.backend.with_tokens(turns, event_values(event).get("turn"), macro_length)
        return turns, dialogue_as_html(turns)

    def suggest(self, label: str, event: gr.EventData) -> tuple[Any, ...]:
        prompts, index = self.backend.suggestions(label), event_values(event).get("turn")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(prompts):
            raise UsageError("this prompt no longer exists; reload the page")
        return fill(prompts[index])

    def load_prompt(self, label: str) -> tuple[Any, ...]:
        return fill(self.backend.test_prompt(label))

    def clear(self, label: str) -> tuple[Any, ...]:
        return [], self.draw([], label), ""

    def greet(self, turns: list[Turn], label: str) -> Any:
        return gr.skip() if turns else self.draw([], label)


def fill(prompt: str | Messages) -> tuple[Any, ...]:
    """Return the dialogue of a prompt, its HTML, and values of the system prompt, the form and the message inputs."""
    turns, *values = prompt_values(prompt)
    system, turns = split_system(turns)
    return turns, dialogue_as_html(turns) if turns else gr.skip(), system, *values
