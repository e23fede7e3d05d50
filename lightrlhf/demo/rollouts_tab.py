"""Tab Rollouts: the samples that runs learned from (`rollouts.jsonl`) and their answers to the same held-out prompts
throughout training (`samples.jsonl`); nothing is written.

The view is the query of the page's address, so a link opens the same one. The files are read in a background thread
when the demo starts; rows that a running experiment adds are read with the next view.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import Tokenizer
from lightrlhf.demo.inputs import PRIVATE, event_values, make_html
from lightrlhf.demo.models import token_texts
from lightrlhf.demo.rollout_file import Samples, rollout_file
from lightrlhf.demo.rollouts import ALL, COLOURS, LONGEST_TEXT, ORDERS, SORTS, View, logged_colours, nearest, steps_of
from lightrlhf.demo.rollouts_html import Pieces, Run, note, page
from lightrlhf.demo.runs import HELD_OUT
from lightrlhf.demo.session import DemoBackend
from lightrlhf.demo.theme import ASSETS
from lightrlhf.demo.traces import SUFFIX, TRACES
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import locate, read_arg
from lightrlhf.training.rollout_log import FILE, SAMPLES

LONGEST_ADDRESS = 4000  # characters
READ_SECONDS = 0.2  # that a view waits for what has been added to a file
NOTHING = (
    "No run shown here has logged samples: --log_rollouts keeps some of each logged step, where a program samples, "
    "and of each evaluation (--eval_interval)."
)
INPUTS = ("run", "step", "all", "against", "q", "sort", "order", "colour")  # but for `all` as in an address


def rollouts_tab(backend: DemoBackend, app: Any, tabs: Any, tab: Any) -> None:
    """Build the tab; an address that names it opens it."""
    rollouts = Rollouts(backend)
    rollouts.read_ahead()
    now = gr.State("")  # the query of the view
    with gr.Column(visible=bool(rollouts.paths())) as controls:
        inputs, reload = view_inputs(list(rollouts.paths()))
    run, step, every, against, text, sort, order, colour = inputs
    script = (ASSETS / "rollouts.js").read_text(encoding="utf-8")
    shown = make_html(note("The samples are being read."), js_on_load=script)
    parts = [*inputs, shown, now, controls]

    def reopen(query: str) -> list[Any]:
        return rollouts.open(dict(parse_qsl(query)))

    def open_address(request: gr.Request) -> list[Any]:
        query = dict(request.query_params)
        if query.get("tab") != "rollouts":
            return [gr.skip() for _ in (tabs, *parts)]
        return [gr.update(selected="rollouts"), *rollouts.open(query)]

    def enter(query: str) -> list[Any]:
        is_open = view_at(query).run  # a link that names the tab selects it, too
        return [gr.skip() for _ in parts] if is_open else rollouts.open({})

    def change_run(label: str | None, query: str) -> list[Any]:
        view = view_at(query)
        return rollouts.open({"run": label or "", "sort": view.sort, "order": view.order})

    def follow(clicked: gr.EventData) -> list[Any]:
        return reopen(str(event_values(clicked).get("query", ""))[:LONGEST_ADDRESS])

    def look(query: str, *values: Any) -> list[Any]:
        view = replace(view_of(values), prompt=view_at(query).prompt)
        return [rollouts.show(view), view.query()]

    def search(query: str, *values: Any) -> list[Any]:
        is_same = view_of(values).q == view_at(query).q  # a view that was opened fills the box, too
        return [gr.skip(), gr.skip()] if is_same else look(query, *values)

    # One queue for all events that make a view, so that the view shown is the last one: with a queue each, an
    # earlier event that takes longer would overwrite it.
    quiet = PRIVATE | {"concurrency_id": "rollouts", "concurrency_limit": 1}
    app.load(open_address, None, [tabs, *parts], **quiet)
    tab.select(enter, now, parts, **quiet)
    reload.click(reopen, now, parts, **quiet)
    shown.click(follow, None, parts, **quiet)
    run.input(change_run, [run, now], parts, **quiet)
    quiet["trigger_mode"] = "always_last"
    text.change(search, [now, *inputs], [shown, now], **quiet)  # Gradio has no input event for a paste
    for part in (step, every, against, sort, order, colour):
        part.input(look, [now, *inputs], [shown, now], **quiet)


def view_inputs(labels: list[str]) -> tuple[list[Any], Any]:
    """Make the inputs of a view, in the order of `INPUTS`, and the button that reads the files again."""
    with gr.Row(elem_classes="rollout-inputs"):
        run = gr.Dropdown(labels, value=None, label="Run", scale=2)
        step = gr.Slider(0, 1, 0, step=1, label="Step", scale=3, buttons=[])
        every = gr.Checkbox(False, label="All steps")
        against = gr.Number(None, label="Compare with step", precision=0, minimum=0)
    with gr.Row(elem_classes="rollout-inputs"):
        text = gr.Textbox("", label="Search prompts and responses", scale=3, max_length=LONGEST_TEXT)
        sort = gr.Dropdown(list(SORTS), value="reward", label="Sort by")
        order = gr.Dropdown(list(ORDERS), value=ORDERS[0], label="Order")
        colour = gr.Dropdown(list(COLOURS), value="log-ratio", label="Colour of tokens")
        reload = gr.Button("Reload", scale=0)
    return [run, step, every, against, text, sort, order, colour], reload


def view_at(query: str) -> View:
    """Return the view of a query."""
    return View.from_query(dict(parse_qsl(query)))


def view_of(values: Sequence[Any]) -> View:
    """Return the view of the inputs, in the order of `INPUTS`."""
    chosen = {name: value for name, value in zip(INPUTS, values) if value is not None}
    if chosen.pop("all", False) is True:
        chosen["step"] = ALL
    return View.from_query({k: f"{v:.0f}" if isinstance(v, float) else str(v) for k, v in chosen.items()})


class Rollouts:
    """The files of the runs, and the tokenizers of their samples."""

    def __init__(self, backend: DemoBackend) -> None:
        self.backend = backend
        self.pieces: dict[str, Pieces] = {}  # by folder
        self.lock = threading.Lock()

    def paths(self) -> dict[str, Path]:
        """Return the files of samples by label, which ends with `HELD_OUT` or `traces.SUFFIX` for other samples."""
        found = {
            label + suffix: Path(folder) / name
            for label, folder in self.backend.runs().items()
            for name, suffix in ((FILE, ""), (SAMPLES, HELD_OUT), (TRACES, SUFFIX))
        }
        return {label: path for label, path in found.items() if path.is_file()}

    def read_ahead(self) -> None:
        """Read the files, and load the tokenizers of their runs, in a background thread."""

        def read() -> None:
            for path in self.paths().values():
                with suppress(OSError, UsageError):  # the view says why
                    while (samples := rollout_file(path).refresh(READ_SECONDS)) is not None and not samples.is_read:
                        pass
                    self.load_pieces(str(path.parent))

        threading.Thread(target=read, name="rollouts", daemon=True).start()

    def samples(self, view: View) -> Samples | None:
        """Return what has been read of the view's file. Raises: UsageError when it cannot be read."""
        path = self.paths().get(view.run)
        try:
            return rollout_file(path).refresh(READ_SECONDS) if path is not None else None
        except OSError as problem:
            raise UsageError(f"{path} cannot be read: {problem.strerror}") from None

    def open(self, query: Mapping[str, str]) -> list[Any]:
        """Return the inputs for the view of an address, its HTML, its own query, and whether there are any runs.

        The default run is the last one that learned from samples, the default colour the first one logged.
        """
        view, labels = View.from_query(query), list(self.paths())
        if not view.run and labels:
            learned = [label for label in labels if not label.endswith((HELD_OUT, SUFFIX))]
            view = replace(view, run=(learned or labels)[-1])
        samples = self.samples(view)
        if samples is not None and "colour" not in query:
            view = replace(view, colour=next(iter(logged_colours(samples)), view.colour))
        steps = steps_of(samples, view) if samples is not None else []
        ends = {"minimum": steps[0], "maximum": max(steps[-1], steps[0] + 1)} if steps else {"minimum": 0, "maximum": 1}
        value = nearest(steps, view.step) if steps else 0
        run = gr.update(choices=labels, value=view.run if view.run in labels else None)
        step = gr.update(**ends, interactive=len(steps) > 1, value=value)
        others = view.all_steps, view.against, view.q, view.sort, view.order, view.colour
        return [run, step, *others, self.show(view), view.query(), gr.update(visible=bool(labels))]

    def show(self, view: View) -> str:
        """Draw a view."""
        samples = self.samples(view)
        if samples is None:
            named = f"{view.run} has logged no samples, or is not served here; choose a run"
            return note(named if view.run else NOTHING)
        folder = str(self.paths()[view.run].parent)
        try:
            run = Run(view.run, str(read_arg(folder, "program")), self.load_pieces(folder))
        except UsageError as problem:
            run = Run(view.run, "", None, str(problem))
        return page(samples, view, run)

    def load_pieces(self, folder: str) -> Pieces:
        """Return the function from ids to the texts of tokens. Raises: UsageError when the run has no tokenizer yet."""
        with self.lock:
            if folder not in self.pieces:
                saved = checkpoints(Path(folder))
                data = self.backend.args.data_dir or (None if saved else locate(folder, "data_dir"))
                tokenizer = load_tokenizer(data, str(saved[-1]) if saved else None, verify=self.backend.args.verify)
                self.pieces[folder] = functools.partial(name_tokens, tokenizer)
            return self.pieces[folder]


def name_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, the name of a special one; ids that the tokenizer does not have are numbers."""
    special = set(tokenizer.all_special_ids)
    if any(not isinstance(i, int) or not 0 <= i < len(tokenizer) for i in ids):
        return [f"[{i}]" for i in ids]
    names, before = [], ""
    for i, text in zip(ids, token_texts(tokenizer, ids)):  # a special token has the text of the next one
        names.append(str(tokenizer.convert_ids_to_tokens(i)) if i in special else before + text)
        before = before + text if i in special else ""
    return names
