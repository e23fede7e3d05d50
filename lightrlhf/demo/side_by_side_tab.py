"""Tab Side by side: one prompt to two to four models at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gradio import on, skip

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.dialogue import prompt_of, prompt_values, split_system
from lightrlhf.demo.inputs import NOTHING_TYPED, PRIVATE, QUIET, Workplace, is_blank
from lightrlhf.demo.markup import cards_as_html, welcome
from lightrlhf.demo.session import MAX_SIDE_BY_SIDE, DemoBackend
from lightrlhf.rewards.encoding import Messages

EMPTY = welcome("One prompt, several models", hint="The answers appear here, with their scores.")


def side_by_side_tab(backend: DemoBackend) -> Any:
    """Build the tab; returns its model dropdown."""
    models = {"value": backend.cache.newest()[-MAX_SIDE_BY_SIDE:], "label": f"Models (2 to {MAX_SIDE_BY_SIDE})"}
    buttons = {"Example prompt": "", "Test prompt": ""}
    tab = Workplace(backend, ("answers", EMPTY), ("Send to all", 110), buttons, multiselect=True, **models)

    def answer(names: list[str], system: str, seed: float, form: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        fields, sliders = values[: len(tab.message)], values[len(tab.message) :]
        if is_blank(form, *fields):
            yield skip(), NOTHING_TYPED
            return
        for texts, scores in backend.side_by_side(names, prompt_of([], form, *fields), system, seed, *sliders):
            yield cards_as_html(names, texts, scores, is_busy=not scores), ""

    def fill(load: Callable[[str], str | Messages], names: list[str]) -> tuple[Any, ...]:
        turns, *values = prompt_values(load(names[-1] if names else backend.cache.labels()[-1]))
        system, turns = split_system(turns)
        if turns:
            raise UsageError("this prompt has several turns, which only the chat supports; load another one")
        return system, *values

    inputs = [tab.model, tab.system, tab.seed, tab.form, *tab.message, *tab.sliders]
    events, shown = [tab.send.click, tab.message[0].submit], [tab.window, tab.hint]
    answering = on(events, answer, inputs, shown, api_name="side_by_side", **QUIET)
    settle = "html => html.replace('aria-busy=\"true\"', 'aria-busy=\"false\"')"
    for ended in (answering.failure, tab.stop.click(None, cancels=[answering], **PRIVATE).then):
        ended(None, tab.window, tab.window, js=settle, **PRIVATE)
    for button, load in zip(tab.buttons, (backend.example, backend.test_prompt)):
        filling = functools.partial(fill, load)
        button.click(filling, tab.model, [tab.system, tab.form, *tab.message], **PRIVATE)
    return tab.model
