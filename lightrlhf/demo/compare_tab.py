"""Tab Compare blind: two anonymous answers, a vote, and the tally of all votes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gradio as gr

from lightrlhf.data.responses import are_identical
from lightrlhf.demo.inputs import PRIVATE, QUIET, make_html
from lightrlhf.demo.markup import cards_as_html, prompt_as_html, table_as_html, tag, welcome
from lightrlhf.demo.session import DemoBackend
from lightrlhf.rewards.functions import as_text

CAPTIONS = {"A": "A is better", "B": "B is better", "tie": "Tie", "skip": "Skip"}  # their keys are 1 to 4
HEADERS = ("model", "against", "pairs", "votes", "wins", "ties", "losses", "win rate [95%]", "A preferred")
EMPTY = welcome("Two answers, one vote", hint="Enter your name and press Next pair. Keys 1 to 4 vote.")


def compare_tab(backend: DemoBackend, app: Any) -> tuple[Any, Any]:
    """Build the tab of a page; returns its two model dropdowns."""
    pair, voted = gr.State(None), gr.State(None)
    with gr.Column(elem_classes="rating"):
        rater, one, other, load = pair_inputs(backend)
        shown = make_html(EMPTY, elem_id="pair")
        with gr.Row(elem_classes="verdicts"):
            look = {"interactive": False, "min_width": 130, "elem_classes": "verdict"}
            buttons = [gr.Button(caption, **look) for caption in CAPTIONS.values()]
        with gr.Row(elem_classes="after-vote"):
            look = {"show_label": False, "container": False, "max_lines": 2}
            comment = gr.Textbox(label="Comment", placeholder="Comment (optional)", **look)
            undo = gr.Button("Undo last vote", size="sm", min_width=120, scale=0, interactive=False)
        hint, table = make_html(elem_classes="hint"), make_html(tally_as_html(backend), elem_id="tally")

    def show(one: str, other: str, rater: str) -> Iterator[list[Any]]:
        yield draw_pair(None)
        try:
            found = backend.next_pair(one, other, rater)
        except Exception:
            yield [None, EMPTY, *draw_pair(None)[2:]]
            raise
        yield draw_pair(found)

    def vote(verdict: str, pair: dict[str, Any] | None, comment: str) -> list[Any]:
        is_new = backend.vote(pair, verdict, comment)
        line = f"Voted: {CAPTIONS[verdict]}." if is_new else "You have already voted on this pair."
        return [pair, line, "", gr.update(interactive=True), tally_as_html(backend), *draw_pair(None)]

    def withdraw(voted: dict[str, Any] | None) -> list[Any]:
        backend.withdraw(voted)
        line = "Your last vote is withdrawn; vote again."
        return [None, line, gr.update(interactive=False), tally_as_html(backend), *draw_pair(voted)]

    def refresh(request: gr.Request) -> list[Any]:
        name = request.username or gr.skip()  # without a login the user may be typing a name already
        return [name, tally_as_html(backend)]

    outputs = [pair, shown, *buttons]
    load.click(show, [one, other, rater], outputs, api_name="next_pair", **QUIET)
    next_pairs = []
    for verdict, button in zip(CAPTIONS, buttons):
        casting = functools.partial(vote, verdict)
        changed = [voted, hint, comment, undo, table, *outputs]
        voting = button.click(casting, [pair, comment], changed, api_name=f"vote_{verdict}", **QUIET)
        next_pairs.append(voting.success(show, [one, other, rater], outputs, **PRIVATE))
    changed = [voted, hint, undo, table, *outputs]  # the next pair would replace the last
    undo.click(withdraw, voted, changed, api_name="undo_vote", cancels=next_pairs, **QUIET)
    app.load(refresh, None, [rater, table], **PRIVATE)
    return one, other


def pair_inputs(backend: DemoBackend) -> tuple[Any, Any, Any, Any]:
    """Make the inputs of the rater's name and both models, and the button for the next pair."""
    labels, newest = backend.cache.labels(), backend.cache.newest()
    with gr.Row(elem_classes="raters"):
        rater = gr.Textbox(label="Your name", max_lines=1, min_width=140)
        one = gr.Dropdown(labels, value=newest[max(len(newest) - 2, 0)], label="First model", min_width=180)
        other = gr.Dropdown(labels, value=newest[-1], label="Second model", min_width=180)
        load = gr.Button("Next pair", variant="primary", min_width=110, scale=0)
    return rater, one, other, load


def draw_pair(pair: dict[str, Any] | None) -> list[Any]:
    """Return values of the pair, its HTML and the buttons; None stands for a pair that is being made.

    Neither of two identical answers can be voted the better one.
    """
    prompt = prompt_as_html(as_text(pair["prompt"])) if pair else ""
    cards = cards_as_html(["Answer A", "Answer B"], pair["responses"] if pair else ["", ""])
    offered = () if pair is None else ("tie", "skip") if are_identical(*pair["responses"]) else CAPTIONS
    return [pair, prompt + cards, *(gr.update(interactive=name in offered) for name in CAPTIONS)]


def tally_as_html(backend: DemoBackend) -> str:
    """Draw the tally of all votes, and a line with their number and the agreement of raters."""
    rows, line = backend.vote_table()
    hint = tag("p", line, class_="hint")
    return table_as_html(HEADERS, rows, "Tally of all votes", "no votes yet") + hint
