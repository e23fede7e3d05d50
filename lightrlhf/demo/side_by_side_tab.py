"""Tab Side by side: one prompt to two to four models at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.dialogue import prompt_of, prompt_values, without_system
from lightrlhf.demo.inputs import (
    NOTHING_TYPED,
    connect_form,
    errors_to_toast,
    form_inputs,
    is_blank,
    markup,
    message_inputs,
    settings_inputs,
)
from lightrlhf.demo.markup import cards_as_html, welcome
from lightrlhf.demo.session import MAX_SIDE_BY_SIDE, DemoBackend
from lightrlhf.rewards.encoding import Messages

EMPTY = welcome("One prompt, several models", told="The answers appear here, with their scores.")


def side_by_side_tab(gr: Any, backend: DemoBackend) -> Any:
    """Builds the tab; returns its model dropdown."""
    safe = functools.partial(errors_to_toast, gr)
    labels, newest = backend.cache.labels(), backend.cache.newest()[-MAX_SIDE_BY_SIDE:]
    form = backend.form(labels[-1])
    with gr.Row(elem_classes="workplace"):
        with gr.Column(scale=3, elem_classes="main"):
            answers = markup(gr, EMPTY, "answers", elem_classes="scrolling")
            with gr.Row(elem_classes="composer"):
                with gr.Column(scale=1, min_width=120):
                    message = message_inputs(gr, form)
                send = gr.Button("Send to all", variant="primary", min_width=110, scale=0, elem_classes="send")
                stop = gr.Button("Stop", variant="primary", min_width=110, scale=0, elem_classes="stop")
            with gr.Row(elem_classes="below-composer"):
                hint = gr.HTML("", elem_classes="hint", apply_default_css=False)
                load_example = gr.Button("Example prompt", size="sm", min_width=60, scale=0)
                load_prompt = gr.Button("Test prompt", size="sm", min_width=60, scale=0)
        with gr.Column(scale=1, min_width=280, elem_classes="side"):
            title = f"Models (2 to {MAX_SIDE_BY_SIDE})"
            models = gr.Dropdown(labels, value=newest, multiselect=True, label=title)
            system, chosen = form_inputs(gr, form)
            with gr.Accordion("Generation settings", open=False):
                seed, sliders = settings_inputs(gr, backend.args)
    connect_form(gr, chosen, system, message)

    def answer(names: list[str], system: str, seed: float, form: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        fields = values[: len(message)]
        if is_blank(form, *fields):
            yield gr.skip(), NOTHING_TYPED
            return
        prompt = prompt_of([], form, *fields)
        for texts, scores in backend.side_by_side(names, prompt, system, seed, *values[len(message) :]):
            yield cards_as_html(names, texts, scores, is_busy=not scores), ""

    def fill(prompt: str | Messages) -> tuple[Any, ...]:
        turns, *values = prompt_values(prompt)
        system, turns = without_system(turns)
        if turns:
            raise UsageError("this prompt has several turns, which only the chat supports; load another one")
        return system, *values

    def newest_of(names: list[str]) -> str:
        return names[-1] if names else backend.cache.labels()[-1]

    quiet = {"show_progress": "hidden"}
    inputs = [models, system, seed, chosen, *message, *sliders]
    answering = gr.on(
        [send.click, message[0].submit], safe(answer), inputs, [answers, hint], api_name="side_by_side", **quiet
    )
    settle = "html => html.replace('aria-busy=\"true\"', 'aria-busy=\"false\"')"
    for ended in (answering.failure, stop.click(None, cancels=[answering], api_visibility="private", **quiet).then):
        ended(None, answers, answers, js=settle, api_visibility="private", **quiet)
    for button, load in ((load_example, backend.example), (load_prompt, backend.test_prompt)):
        loading = safe(lambda names, load=load: fill(load(newest_of(names))))
        button.click(loading, models, [system, chosen, *message], api_visibility="private", **quiet)
    return models
