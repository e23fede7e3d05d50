"""HTML of the demo: dialogues, cards of answers, scores, tokens and tables. `tag` escapes every text.

The page's style is `assets/page.css`; what its buttons do is `assets/page.js`, which reads `data-act` and `data-turn`.
Left out: Markdown of answers, which are shown as the model wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup, escape

from lightrlhf.demo.dialogue import Turn, split_thinking

DEEPEST_COLOUR = 3.0  # |log-ratio| in nats at which a token's colour saturates
STRONGEST = 0.6  # opacity of the deepest colour: text on it stays readable
LONGEST_SUGGESTION = 160  # characters
Scores = Sequence[tuple[str, str]]  # (name, value), the name empty where the value says it
HEADER = """<header class="masthead">
<span class="logo" aria-hidden="true"></span>
<h1>lightrlhf</h1>
<p>Talk to models that you trained, see what training changed, and vote on their answers.</p>
</header>"""


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """Make an element; texts and attributes are escaped, Markup is not.

    `class_` loses its underscore; an attribute of None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(parts: Iterable[Any]) -> Markup:
    """Join parts; those that are not Markup are escaped."""
    return Markup("").join(map(escape, parts))


def button(caption: str, act: str, turn: int, **attributes: Any) -> Markup:
    """Make a button whose click `assets/page.js` handles."""
    return tag("button", caption, type="button", data_act=act, data_turn=turn, **attributes)


# --------------------------------------------------------------------------------------------------------- dialogues
def dialogue_as_html(turns: Sequence[Turn], title: str = "", suggestions: Sequence[str] = ()) -> Markup:
    """The dialogue, or what an empty one shows: a title and prompts to begin with."""
    log = {"role": "log", "aria_label": "Dialogue"}
    if not turns:
        return tag("div", welcome(title, suggestions), class_="dialogue empty", **log)
    is_busy = "pending" in turns[-1] or "streaming" in turns[-1]  # screen readers wait for the end of a stream
    shown = (turn_as_html(index, turn) for index, turn in enumerate(turns))
    return tag("div", *shown, class_="dialogue", **log, aria_busy=str(is_busy).lower())


def welcome(title: str, suggestions: Sequence[str] = (), hint: str = "") -> Markup:
    """A title, a hint and suggestions, shown before anything was asked."""
    choices = [
        tag("li", button(shorten(text), "suggest", index, class_="suggestion"))
        for index, text in enumerate(suggestions)
    ]
    listed = tag("ul", *choices, class_="suggestions") if choices else ""
    return tag("div", tag("h2", title), tag("p", hint) if hint else "", listed, class_="welcome")


def shorten(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SUGGESTION else line[: LONGEST_SUGGESTION - 1] + "…"


def turn_as_html(index: int, turn: Turn) -> Markup:
    """One message: who wrote it, its thinking, its text or its tokens, and below it scores and buttons."""
    content, copy = turn["content"], button("Copy", "copy", index)
    if turn["role"] == "user":
        own = tag("div", button("Edit", "edit", index), copy, class_="tools")
        return tag("article", tag("div", content, class_="text"), own, class_="user message", aria_label="Your message")
    label, pending = turn.get("label") or turn["role"], turn.get("pending")
    parts = [tag("p", label, class_="who"), turn.get("tokens") or answer_as_html(content)]
    parts += [tag("p", pending, class_="pending", role="status")] if pending else []
    tools = [copy] if split_thinking(content)[1] else []
    if turn.get("measures"):
        tools.append(button("Tokens", "tokens", index, aria_pressed=str("tokens" in turn).lower()))
    below = tag("div", scores_as_html(turn.get("scores", ())), tag("div", *tools, class_="tools"), class_="below")
    return tag("article", *parts, below, class_="bot message", aria_label=f"Answer of {label}")


def answer_as_html(text: str) -> Markup:
    """An answer, its thinking folded above it."""
    thinking, answer = split_thinking(text)
    fold: Markup | str = ""
    if thinking or text != answer:
        summary = tag("summary", "Thinking" if answer else "Thinking …")
        fold = tag("details", summary, tag("div", thinking, class_="thought"), class_="thinking")
    return join([fold, tag("div", answer, class_="text") if answer else ""])


def badge(name: str, value: str, **attributes: Any) -> Markup:
    """A number with its name."""
    return tag("li", *([tag("span", name), " "] if name else []), value, **attributes)


def scores_as_html(scores: Scores) -> Markup | str:
    """Scores as badges, apart from the text that they judge."""
    badges = [badge(name, value) for name, value in scores]
    return tag("ul", *badges, class_="scores", aria_label="Scores") if badges else ""


def cards_as_html(
    titles: Sequence[str], texts: Sequence[str], scores: Sequence[Scores] = (), is_busy: bool = False
) -> Markup:
    """Answers to one prompt as cards, side by side where there is room, else one below the other."""
    cards = []
    for title, text, own in zip(titles, texts, scores or [()] * len(titles)):
        waiting = tag("p", "Loading the model …" if is_busy else "…", class_="pending")
        body = answer_as_html(text) or waiting, scores_as_html(own)
        cards.append(tag("article", tag("h2", title), *body, class_="card", aria_label=title))
    return tag("div", *cards, class_="cards", aria_busy=str(is_busy).lower())


def prompt_as_html(text: str) -> Markup:
    """The prompt above the answers to it."""
    return tag("section", tag("h2", "Prompt"), tag("div", text, class_="text"), class_="prompt card")


# ------------------------------------------------------------------------------------------------------------ tokens
def plain(text: str) -> str:
    """A token's text; the end of a line is visible."""
    return text.replace("\n", "↵\n")


def token_as_html(text: Any, value: float, deepest: float, title: str | None, first: bool = False) -> Markup:
    """A token, green for a positive value and red for a negative one, darkest from `deepest` on."""
    strength = min(abs(value) / deepest, 1.0) * STRONGEST
    kind = f"token {'more' if value >= 0 else 'less'}{' first' if first else ''}"
    style = f"--strength:{strength:.2f}" if strength >= 0.01 else None
    return tag("span", text, class_=kind, title=title, style=style)


def tokens_as_html(texts: Sequence[str], log_ratios: Sequence[float], segments: Sequence[int]) -> Markup:
    """Tokens coloured by log-ratio (green: more likely than under the reference, red: less likely).

    A bar separates segments unless each token is one. The end token, which has no text, is shown as *end*.
    """
    spans, has_bars = [], len(set(segments)) < len(segments)
    for text, ratio, segment, before in zip(texts, log_ratios, segments, [*segments[:1], *segments]):
        shown, title = plain(text) or tag("i", " end"), f"log-ratio {ratio:+.3f}, segment {segment}"
        spans.append(token_as_html(shown, ratio, DEEPEST_COLOUR, title, has_bars and segment != before))
    legend = "green: training made the token more likely; red: less likely"
    return tag("div", *spans, class_="tokens") + tag("p", legend, class_="legend")


# ------------------------------------------------------------------------------------------------------------ tables
def table_as_html(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    caption: str,
    empty: str = "none yet",
    class_: str | None = "stacked",
) -> Markup:
    """A table; if stacked, its rows become blocks on a narrow screen, each cell with its column's name."""
    title = tag("caption", caption)
    if not rows:
        return tag("table", title, tag("tr", tag("td", empty, class_="none")), class_=class_)
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in headers)))
    lines = [tag("tr", *(tag("td", value, data_name=name) for name, value in zip(headers, row))) for row in rows]
    return tag("table", title, head, tag("tbody", *lines), class_=class_)
