"""Tab Compare blind: two anonymous answers, a vote, and the tally of all votes."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator
from typing import Any

from lightrlhf.data.responses import are_identical
from lightrlhf.demo.inputs import errors_to_toast
from lightrlhf.demo.markup import cards_as_html, prompt_as_html, table_as_html, tag, welcome
from lightrlhf.demo.session import DemoBackend
from lightrlhf.rewards.functions import as_text

CAPTIONS = {"A": "A is better", "B": "B is better", "tie": "Tie", "skip": "Skip"}  # their keys are 1 to 4
HEADERS = ("model", "against", "pairs", "votes", "wins", "ties", "losses", "win rate [95%]", "A preferred")


def compare_tab(gr: Any, backend: DemoBackend, app: Any) -> tuple[Any, Any]:
    """Builds the tab of a page; returns its two model dropdowns."""
    safe = functools.partial(errors_to_toast, gr)
    pair, voted = gr.State(None), gr.State(None)
    start = welcome("Two answers, one vote", told="Enter your name and press Next pair. Keys 1 to 4 vote.")
    with gr.Column(elem_classes="rating"):
        rater, one, other, load = pair_inputs(gr, backend)
        shown = gr.HTML(start, elem_id="pair", apply_default_css=False)
        with gr.Row(elem_classes="verdicts"):
            buttons = [
                gr.Button(caption, interactive=False, min_width=130, elem_classes="verdict")
                for caption in CAPTIONS.values()
            ]
        with gr.Row(elem_classes="after-vote"):
            comment = gr.Textbox(
                label="Comment", show_label=False, container=False, max_lines=2, placeholder="Comment (optional)"
            )
            undo = gr.Button("Undo last vote", size="sm", min_width=120, scale=0, interactive=False)
        told = gr.HTML("", elem_classes="hint", apply_default_css=False)
        table = gr.HTML(tally_as_html(backend), elem_id="tally", apply_default_css=False)
    outputs = [pair, shown, *buttons]

    def show(one: str, other: str, rater: str) -> Iterator[list[Any]]:
        yield waiting(gr)
        try:
            found = backend.next_pair(one, other, rater)
        except Exception:
            yield [None, start, *[gr.update(interactive=False)] * len(buttons)]
            raise
        yield pair_shown(gr, found)

    def vote(verdict: str, pair: dict[str, Any] | None, comment: str) -> list[Any]:
        is_new = backend.vote(pair, verdict, comment)
        line = f"Voted: {CAPTIONS[verdict]}." if is_new else "You have already voted on this pair."
        return [pair, line, "", gr.update(interactive=True), tally_as_html(backend), *waiting(gr)]

    def withdraw(voted: dict[str, Any] | None) -> list[Any]:
        backend.withdraw(voted)
        line = "Your last vote is withdrawn; vote again."
        return [None, line, gr.update(interactive=False), tally_as_html(backend), *pair_shown(gr, voted or {})]

    quiet = {"show_progress": "hidden"}
    showing = safe(show), [one, other, rater], outputs
    load.click(*showing, api_name="next_pair", **quiet)
    next_pairs = []
    for verdict, button in zip(CAPTIONS, buttons):
        casting = safe(functools.partial(vote, verdict)), [pair, comment], [voted, told, comment, undo, table, *outputs]
        voting = button.click(*casting, api_name=f"vote_{verdict}", **quiet)
        next_pairs.append(voting.success(*showing, api_visibility="private", **quiet))
    taken_back = safe(withdraw), voted, [voted, told, undo, table, *outputs]
    undo.click(*taken_back, api_name="undo_vote", cancels=next_pairs, **quiet)  # the next pair would replace the last

    def refresh(request: gr.Request) -> list[Any]:
        name = request.username or gr.skip()  # without login the user may be typing a name already
        return [name, tally_as_html(backend)]

    refresh.__annotations__["request"] = gr.Request  # the annotation is a string, and gr is not a global name
    app.load(safe(refresh), None, [rater, table], api_visibility="private", **quiet)
    return one, other


def pair_inputs(gr: Any, backend: DemoBackend) -> tuple[Any, Any, Any, Any]:
    """Makes the inputs of the rater's name and both models, and the button for the next pair."""
    labels, newest = backend.cache.labels(), backend.cache.newest()
    with gr.Row(elem_classes="raters"):
        rater = gr.Textbox(label="Your name", max_lines=1, min_width=140)
        one = gr.Dropdown(labels, value=newest[max(len(newest) - 2, 0)], label="First model", min_width=180)
        other = gr.Dropdown(labels, value=newest[-1], label="Second model", min_width=180)
        load = gr.Button("Next pair", variant="primary", min_width=110, scale=0)
    return rater, one, other, load


def waiting(gr: Any) -> list[Any]:
    """Values of the pair, its HTML and the buttons while a pair is made."""
    cards = cards_as_html(["Answer A", "Answer B"], ["", ""])
    return [None, cards, *[gr.update(interactive=False)] * len(CAPTIONS)]


def pair_shown(gr: Any, chosen: dict[str, Any]) -> list[Any]:
    """The same values for a pair; neither of two identical answers can be voted the better one."""
    prompt = prompt_as_html(as_text(chosen["prompt"]))
    cards = cards_as_html(["Answer A", "Answer B"], chosen["responses"])
    differ = not are_identical(*chosen["responses"])
    return [chosen, prompt + cards, *(gr.update(interactive=differ or name in ("tie", "skip")) for name in CAPTIONS)]


def tally_as_html(backend: DemoBackend) -> str:
    """The tally of all votes, and a line with their number and the agreement of raters."""
    rows, line = backend.vote_table()
    return table_as_html(HEADERS, rows, "Tally of all votes", "no votes yet") + tag(
        "p", html.escape(line), class_="hint"
    )
