"""Parts that several tabs have, and errors as messages in the browser."""

from __future__ import annotations

import functools
import html
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gradio as gr

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.dialogue import FORMS
from lightrlhf.demo.session import DemoBackend

QUIET: dict[str, Any] = {"show_progress": "hidden"}
PRIVATE = QUIET | {"api_visibility": "private"}
MESSAGE_SECONDS = 30  # after which an error vanishes, unless a click removes it earlier
NOTHING_TYPED = "Type a message first."


@contextmanager
def errors_as_toasts() -> Iterator[None]:
    """Turn an exception into a message in the browser.

    An unexpected one (neither UsageError nor ValueError) is also printed with its traceback.
    """
    try:
        yield
    except Exception as problem:  # of any kind: the demo keeps running for other users
        line = str(problem).strip().partition("\n")[0]
        if not isinstance(problem, (UsageError, ValueError)):
            traceback.print_exc()
            line = f"{type(problem).__name__}: {line}"
        shown = html.escape(line, quote=False)
        raise gr.Error(shown, duration=MESSAGE_SECONDS, print_exception=False) from problem


def show_errors(function: Callable) -> Callable:
    """Wrap an event handler: its exceptions become messages in the browser."""

    @functools.wraps(function)
    def call(*inputs: Any) -> Any:
        with errors_as_toasts():
            return function(*inputs)

    @functools.wraps(function)
    def stream(*inputs: Any) -> Any:
        with errors_as_toasts():
            yield from function(*inputs)

    return stream if inspect.isgeneratorfunction(function) else call


def event_values(event: gr.EventData) -> dict[str, Any]:
    """Return what the page sent along with an event."""
    return event._data if isinstance(event._data, dict) else {}


def make_html(value: str = "", **more: Any) -> gr.HTML:
    """Make a part of the page that shows HTML of ours."""
    return gr.HTML(value, apply_default_css=False, **more)


class Workplace:
    """A window for answers with a message box below it, and a model and settings at its side.

    window: id and HTML of the window, whose buttons `assets/page.js` handles: they trigger events with the number of
    their turn. send: caption and width of the button. buttons: captions below the message box, with their CSS class.
    model: settings of the models' dropdown.
    """

    def __init__(
        self,
        backend: DemoBackend,
        window: tuple[str, str],
        send: tuple[str, int],
        buttons: Mapping[str, str],
        **model: Any,
    ) -> None:
        names = backend.cache.labels()
        form = backend.form(names[-1])
        with gr.Row(elem_classes="workplace"):
            with gr.Column(scale=3, elem_classes="main"):
                attach = "lightrlhf.attach(element, trigger, watch)"
                self.window = make_html(window[1], elem_id=window[0], js_on_load=attach, elem_classes="scrolling")
                with gr.Row(elem_classes="composer"):
                    with gr.Column(scale=1, min_width=120):
                        self.message = message_inputs(form)
                    wide = {"variant": "primary", "min_width": send[1], "scale": 0}
                    self.send = gr.Button(send[0], elem_classes="send", **wide)
                    self.stop = gr.Button("Stop", elem_classes="stop", **wide)
                with gr.Row(elem_classes="below-composer"):
                    self.hint = make_html(elem_classes="hint")
                    small = {"size": "sm", "min_width": 60, "scale": 0}
                    self.buttons = [gr.Button(name, elem_classes=kind, **small) for name, kind in buttons.items()]
            with gr.Column(scale=1, min_width=280, elem_classes="side") as self.side:
                self.model = gr.Dropdown(names, **model)
                shown = {"lines": 2, "max_lines": 8, "visible": form == "dialogue"}
                self.system = gr.Textbox(label="System prompt", placeholder="None", **shown)
                self.form = gr.Radio(FORMS, value=form, label="Prompt format")
                with gr.Accordion("Generation settings", open=False) as self.settings:
                    self.seed, *self.sliders = settings_inputs(backend)
        self.form.change(self.show_form, self.form, [self.system, *self.message], **PRIVATE)

    def show_form(self, form: str) -> list[Any]:
        """Show the inputs that a prompt format needs."""
        is_summary = form == "summary"
        return [gr.update(visible=shown) for shown in (form == "dialogue", not is_summary, *[is_summary] * 3)]


def message_inputs(form: str) -> list[Any]:
    """Make the inputs of a prompt: text, subreddit, title and post; only those that the form needs are visible."""
    look = {"container": False, "show_label": False, "placeholder": "Type a message", "elem_classes": "message-box"}
    text = gr.Textbox(label="Message", lines=1, max_lines=8, visible=form != "summary", **look)
    fields = [
        gr.Textbox(label=name, lines=lines, max_lines=lines, visible=form == "summary")
        for name, lines in (("subreddit", 1), ("title", 1), ("post", 4))
    ]
    return [text, *fields]


def settings_inputs(backend: DemoBackend) -> list[Any]:
    """Make the inputs of the seed and of `SLIDERS`, in that order."""
    args = backend.args
    return [
        gr.Number(args.seed, label="seed", precision=0, minimum=0),
        gr.Slider(1, max(1024, args.max_new_tokens), args.max_new_tokens, step=1, label="max_new_tokens"),
        gr.Checkbox(args.do_sample, label="do_sample"),
        gr.Slider(0.05, 2.0, args.temperature, step=0.05, label="temperature"),
        gr.Slider(0, 200, args.top_k, step=1, label="top_k (0: all)"),
        gr.Slider(0.01, 1.0, args.top_p, step=0.01, label="top_p"),
    ]


def is_blank(form: str, text: str, *fields: str) -> bool:
    """Whether there is nothing to send: no message, or no post of a summary."""
    return not ((fields[-1] if form == "summary" else text) or "").strip()
