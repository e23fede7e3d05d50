"""HTML of the tab Rollouts: curves, groups of samples, tokens by colour, two steps side by side.

A link with the class `view` opens another view; the tab does so without loading the page again, and a new browser tab
opens the same. The style is in `assets/rollouts.css`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pandas as pd
from markupsafe import Markup

from lightrlhf.demo import rollouts
from lightrlhf.demo.markup import DEEPEST_COLOUR, STRONGEST, badge, join, plain, table_as_html, tag, token_as_html
from lightrlhf.demo.rollout_file import (
    Row,
    Samples,
    by_token,
    episode_of,
    list_of,
    mask_of,
    number,
    prompt_key,
    sampled_numbers,
)
from lightrlhf.demo.rollouts import COLOURS, GROUPS_A_PAGE, LEAST_CHANGE, Comparison, Selection, View
from lightrlhf.demo.traces import pairs_of
from lightrlhf.programs import TRAINING, Program

SAMPLES_A_PAGE, FEWEST_SAMPLES = 80, 4  # of each group at least
TOKENS_A_PAGE, FEWEST_TOKENS = 4000, 40  # of all samples; of each sample at least
CHARACTERS_A_TOKEN = 5  # of a text without tokens that is cut
LONGEST_PROMPT = 600  # characters that are shown unless the prompt is opened
LONGEST_SHOWN = 400  # the same of a user's message or an observation
LINE_SIZE = (180, 36)  # width and height of a curve
OTHER = Program("", "")  # in place of an unknown program
NAMES = {"kl": "KL", "truncated": "share truncated"}  # names of columns, if not their own
Pieces = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Run:
    """The run of a file: its name, program and tokenizer."""

    label: str
    program: str  # of `args.json`
    pieces: Pieces | None  # the texts of ids; None without a tokenizer
    problem: str = ""  # why there is no tokenizer


def page(samples: Samples, view: View, run: Run) -> str:
    """Draw a view; the root element has its query."""
    selection = rollouts.select(samples, view)
    shown = selection.view
    if shown.against is not None and selection.steps and shown.sample is None:
        comparison = rollouts.compare(samples, shown, selection.steps)
        shown = comparison.view
        draw = Drawing(samples, shown, run, sum(len(side) for both in comparison.prompts for side in both))
        body = [differences(comparison, shown), side_by_side(samples, comparison, draw)]
        body += [pager(shown, comparison.num_prompts, "prompts")]
    else:
        most = max(SAMPLES_A_PAGE // max(len(selection.groups), 1), FEWEST_SAMPLES)
        draw = Drawing(samples, shown, run, sum(min(len(group), most) for group in selection.groups))
        body = [group_as_html(samples, group, draw, most) for group in selection.groups]
        body += [] if shown.sample is not None else [pager(shown, selection.num_groups, "groups")]
    if not selection.groups and not selection.problem:
        body.append(note("no sample fits; empty the search, or show all steps" if len(samples) else "no samples yet"))
    lines = [
        curve_as_html(NAMES.get(name, name), line, shown) for name, line in rollouts.curves(samples, selection).items()
    ]
    parts = [
        *(note(line) for line in notes(samples, selection, run)),
        tag("div", *lines, class_="curves") if len(samples) else "",
        heading(samples, selection),
        draw.legend(),
        *body,
    ]
    whole = tag("div", *parts, class_="rollouts", data_query=shown.query())
    return whole.encode("utf-8", "replace").decode()  # a row may hold halves of characters, which no page can


def note(text: str) -> Markup:
    """Draw a line on something missing or wrong."""
    return tag("p", text, class_="note")


def notes(samples: Samples, selection: Selection, run: Run) -> list[str]:
    """Return lines on anything missing or wrong."""
    lines = [selection.problem] if selection.problem else []
    if not samples.is_read:
        share = samples.read_bytes / samples.all_bytes if samples.all_bytes else 1.0
        lines.append(f"{share:.0%} of the file is read so far, {len(samples):,} samples; press Reload")
    elif samples.read_bytes < samples.all_bytes:
        lines.append(f"the last line of {samples.path.name} is not complete yet; it is left out")
    if samples.bad:
        line, problem = next(iter(samples.bad.items()))
        more = f", and {len(samples.bad) - 1:,} more lines" if len(samples.bad) > 1 else ""
        lines.append(f"{samples.path.name} line {line} {problem}{more}; left out")
    if run.problem and len(samples):
        lines.append(f"{run.problem}; texts are shown without their tokens")
    return lines


def link(view: View, caption: str, title: str | None = None) -> Markup:
    """Make a link to a view."""
    return tag("a", caption, class_="view", href=f"?{view.query()}", title=title)


def where(parts: Sequence[Any], **attributes: Any) -> Markup:
    """Draw a line of facts and links."""
    return tag("p", Markup(" · ").join(parts), class_="where", **attributes)


def heading(samples: Samples, selection: Selection) -> Markup | str:
    """Draw a line on the shown samples, with links to neighbouring views."""
    view, steps = selection.view, selection.steps
    if not steps:
        return ""
    assert view.step is not None
    if view.sample is not None:
        return where([f"Sample {view.sample} of step {view.step}", link(replace(view, sample=None), "back")])
    place = steps.index(view.step)
    one_step = f"Step {view.step:,}, {place + 1:,} of {len(steps):,} that were logged"
    parts: list[Any] = [tag("strong", f"{len(steps):,} steps" if view.all_steps else one_step)]
    if view.against is None:
        parts.append(f"{selection.num_samples:,} samples in {selection.num_groups:,} groups")
    if selection.found is not None:
        quoted = view.q if view.q.startswith('"') else f"“{view.q}”"
        text = f"{selection.found.sum():,} of the run's {len(samples):,} samples have {quoted} "
        more = [] if view.all_steps else [link(view.change(all_steps=True, against=None), "show them all"), " "]
        parts.append(join([text, *more, link(view.change(q=""), "clear")]))
    if not view.all_steps:
        parts += [link(view.change(step=steps[place - 1]), "previous step")] if place else []
        parts += [link(view.change(step=step), "next step") for step in steps[place + 1 : place + 2]]
        if view.against is not None:
            parts.append(link(view.change(against=None), "end comparison"))
        elif len(steps) > 1:
            first = steps[0] if place else steps[-1]
            parts.append(link(view.change(against=first), f"compare with step {first:,}"))
    if view.prompt:
        text = f"one prompt at {len(steps):,} steps "
        parts.append(join([text, link(view.change(prompt=""), "show all prompts")]))
    return where([*parts, link(view, "link to this view")], role="status")


def pager(view: View, count: int, things: str) -> Markup:
    """Draw links to the previous and the next page."""
    pages, last = rollouts.count_pages(count), view.page * GROUPS_A_PAGE
    parts: list[Any] = [f"{things} {last - GROUPS_A_PAGE + 1:,} to {min(last, count):,} of {count:,}"]
    parts += [link(view.change(page=view.page - 1), "previous page")] if view.page > 1 else []
    parts += [link(view.change(page=view.page + 1), "next page")] if view.page < pages else []
    return where(parts) if pages > 1 else Markup()


def curve_as_html(name: str, line: pd.Series, view: View) -> Markup:
    """Draw a small curve of means by step, with a mark at the shown step."""
    name, (width, height) = NAMES.get(name, name), LINE_SIZE
    steps, values = line.index.to_numpy(), line.to_numpy()
    (first, last), ends = steps[[0, -1]], [short(value) for value in values[[0, -1]]]

    def x(step: Any) -> Any:
        return (step - first) / max(last - first, 1) * (width - 4) + 2

    y = height - 2 - (values - values.min()) / (values.max() - values.min() or 1.0) * (height - 4)
    every = max(len(line) // width, 1)  # no more points than the curve is wide
    marks = []
    if view.step is not None and not view.all_steps and first <= view.step <= last:
        place = f"{x(view.step):.1f}"
        marks.append(tag("line", x1=place, x2=place, y1=0, y2=height, class_="mark"))
    title = f"{name} {ends[0]} at step {first:,.0f}, {ends[1]} at step {last:,.0f}"
    points = tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x(steps)[::every], y[::every])))
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    drawing = tag("svg", tag("title", title), points, *marks, role="img", aria_label=title, **size)
    return tag("figure", tag("figcaption", name, " ", tag("b", " → ".join(ends))), drawing)


def short(value: float | None) -> str:
    """Format a number with up to three significant digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------ samples
class Drawing:
    """Settings with which the samples of a view are drawn."""

    def __init__(self, samples: Samples, view: View, run: Run, num_samples: int) -> None:
        self.run, self.view, self.colour = run, view, view.colour
        self.is_alone = view.sample is not None  # a single sample is shown with all its numbers
        self.limit = 10**9 if self.is_alone else max(TOKENS_A_PAGE // max(num_samples, 1), FEWEST_TOKENS)
        self.deepest = DEEPEST_COLOUR if view.colour == "log-ratio" else rollouts.deepest(samples, view.colour)
        self.disagrees = rollouts.audit_disagrees(samples)
        self.is_logged = view.colour in rollouts.logged_colours(samples)

    def legend(self) -> Markup | str:
        """Draw the scale of the colours."""
        if self.run.pieces is None:
            return ""
        if not self.is_logged:
            return note(f"this run logs no {self.colour}s; its tokens have no colour")
        depth, unit = short(self.deepest), " nats" if self.colour == "log-ratio" else ""
        more, less = (
            tag("span", sign + depth, class_=f"token {kind}", style=f"--strength:{STRONGEST}")
            for sign, kind in (("+", "more"), ("−", "less"))
        )
        shown = tag("span", "grey: shown, not sampled (mask 0)", class_="shown")
        return tag("p", f"{self.colour} of a token: ", more, " 0 ", less, f"{unit} · ", shown, class_="legend")

    def tokens(self, row: Row) -> Markup:
        """Draw a response: a block for each turn of the policy, tokens coloured, and for each text shown to it."""
        ids, mask = row.get("response_ids"), mask_of(row)
        if self.run.pieces is None or not isinstance(ids, list) or not ids:
            text, most = str(row.get("response", "")), self.limit * CHARACTERS_A_TOKEN
            return tag("div", text[:most], "…" if len(text) > most else "", class_="tokens")
        texts = list(map(plain, self.run.pieces(ids[: self.limit])))
        values = {name: by_token(row.get(column), mask) for name, column in COLOURS.items()}
        program, turns, blocks = TRAINING.get(self.run.program, OTHER), 0, []
        facts = episode_of(row)
        other = "observation" if facts else program.turns[1]
        for is_sampled, places in groupby(range(len(texts)), key=lambda i: mask[i]):
            if is_sampled:
                turns += 1
                name = f"{program.turns[0]} {turns}"
                if program.trains_one_turn:
                    name += ", trained" if turns == 1 else ", sampled after it"
                if facts.get("rows") == 1:  # of several rows of an episode it is not known which one this is
                    name += told_of_turn(facts, turns)
                content = join(self.token(texts[i], values, i) for i in places)
            else:
                name, content = other, join(texts[i] for i in places)
                if len(content) > LONGEST_SHOWN:
                    content = tag("details", tag("summary", f"{len(content):,} characters"), content)
            caption = [tag("b", name), " "] if facts or 0 in mask else []
            blocks.append(tag("div", *caption, content, class_=None if is_sampled else "shown"))
        return tag("div", *blocks, class_="tokens")

    def token(self, text: str, columns: dict[str, list[float | None] | None], place: int) -> Markup:
        """Draw a token of the policy in the colour of its number, with its numbers as a title."""
        values = {name: column[place] for name, column in columns.items() if column is not None}
        title = [f"{name} {short(value)}" for name, value in values.items() if self.is_alone or name == self.colour]
        return token_as_html(text, values.get(self.colour) or 0.0, self.deepest, ", ".join(title) or None)


def told_of_turn(facts: Row, turn: int) -> str:
    """Return calls and reward of a turn of an episode, for its caption."""
    calls, rewards = list_of(facts, "calls")[turn - 1 : turn], list_of(facts, "rewards")[turn - 1 : turn]
    names = [str(name) for name in calls[0]] if calls and isinstance(calls[0], list) else []
    told = [f"calls {', '.join(names)}"] if names else []
    told += [f"reward {short(number(value))}" for value in rewards]
    return "".join(f" · {text}" for text in told)


def episode_badges(facts: Row) -> list[Markup]:
    """Draw the end of an episode, its calls, and a fault of its environment."""
    counts = facts.get("counts")
    counts = {name: number(value, 0) for name, value in counts.items()} if isinstance(counts, dict) else {}
    badges = [badge("turns", short(number(facts.get("turns"))))]
    if calls := counts.get("calls", 0):
        failed = counts.get("failed_calls", 0) + counts.get("unreadable_calls", 0)
        badges.append(badge("calls", short(calls) + (f", {short(failed)} failed" if failed else "")))
    fault = facts.get("fault")
    if number(facts.get("rows"), 1) > 1:
        rewards = ", ".join(short(number(value)) for value in list_of(facts, "rewards"))
        badges += [badge("rewards by turn", rewards), badge("", f"one of {facts['rows']} rows")]
    badges.append(badge("stopped by", str(facts.get("stop_reason")), class_="problem" if fault else None))
    if fault:
        badges.append(badge("", f"the environment failed: {fault}", class_="problem"))
    return badges


def group_as_html(samples: Samples, numbers: Sequence[int], draw: Drawing, most: int) -> Markup:
    """Draw a prompt and its samples, at most `most`."""
    rows, view = [samples.row(place) for place in numbers[:most]], draw.view
    prompt, step = rows[0]["prompt"], rows[0]["step"]
    text = f"step {step:,} · " if view.all_steps else ""
    text += f"{len(numbers):,} samples" if len(numbers) > 1 else "1 sample"
    text += f", the first {most} shown" if len(numbers) > most else ""
    same = view.change(step=step, all_steps=False, prompt=prompt_key(prompt), q="", against=None)
    through = [] if view.prompt else [" · ", link(same, "this prompt through training")]
    shown = (sample_as_html(place, row, draw) for place, row in zip(numbers, rows))
    return tag("section", tag("header", text, *through), prompt_as_html(prompt), *shown, class_="group")


def prompt_as_html(prompt: str) -> Markup:
    """Draw a prompt; a long one shows its end, and the rest on a click."""
    cut = len(prompt) - LONGEST_PROMPT if len(prompt) > 2 * LONGEST_PROMPT else 0  # a click hides no few characters
    before, end = prompt[:cut], prompt[cut:]
    hidden = [tag("details", tag("summary", f"{len(before):,} characters before"), before)] if before else []
    return tag("div", *hidden, end, class_="prompt")


def sample_as_html(place: int, row: Row, draw: Drawing) -> Markup:
    """Draw a sample: its numbers as badges, its response below."""
    mask, view = mask_of(row), draw.view
    ratios, advantages = sampled_numbers(row.get("log_ratio"), mask), sampled_numbers(row.get("advantages"), mask)
    score, audit, version = (number(row.get(name)) for name in ("score", "audit", "version"))
    badges = [badge("reward", "not scored" if math.isnan(score) else short(score), class_="main")]
    rewards = row.get("rewards")
    if isinstance(rewards, dict) and (len(rewards) > 1 or list(rewards.values()) != [row.get("score")]):
        badges += [badge(str(name), short(number(value))) for name, value in rewards.items()]
    disagrees = "problem" if draw.disagrees[place] else None
    badges += [] if math.isnan(audit) else [badge("audit", short(audit), class_=disagrees)]
    if disagrees:
        title = "reward above, audit below the mean of the run"
        badges.append(badge("", "audit disagrees", class_=disagrees, title=title))
    badges += [badge("advantage", short(sum(advantages) / len(advantages)))] if advantages else []
    badges += [badge("KL", short(sum(ratios)))] if ratios else []
    of_all = f" of {len(mask):,}" if sum(mask) < len(mask) else ""
    badges.append(badge("", f"{sum(mask):,} tokens{of_all}"))
    badges += episode_badges(facts) if (facts := episode_of(row)) else []
    badges += [badge("", "truncated")] if row.get("truncated") is True else []
    badges += [] if math.isnan(version) else [badge("", f"weights of step {version:,.0f}")]
    details: Markup | str = ""
    if not draw.is_alone:
        caption = f"all {len(mask):,} tokens" if len(mask) > draw.limit else "open"
        badges.append(tag("li", link(replace(view, sample=place), caption)))
    elif isinstance(columns := row.get("columns"), dict) and columns:
        details = table_as_html(("column", "value"), list(columns.items()), "columns of the data", class_=None)
    if pairs := pairs_of(row):
        count = sum(one != other for one, other in pairs)
        badges.append(badge("template differs", f"in {count:,} places" if count else "nowhere"))
        details = join([details, rendering_as_html(pairs)]) if draw.is_alone else details
    head = tag("ul", *badges, class_="scores", aria_label="Scores")
    return tag("article", head, draw.tokens(row), details, class_="sample", aria_label=f"Sample {place}")


def rendering_as_html(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Draw the text of ids; where the chat template writes another one now, the ids' struck out and the template's."""
    parts: list[Any] = []
    for own, written in pairs:
        both = (("del", own), ("ins", written))
        parts += [own] if own == written else [tag(name, text) for name, text in both if text]
    legend = join([tag("b", "text"), " ", tag("del", "of the ids"), " ", tag("ins", "of the template now")])
    return tag("div", tag("p", legend, class_="legend"), tag("div", *parts, class_="tokens"), class_="rendering")


# ---------------------------------------------------------------------------------------------------------- two steps
def differences(comparison: Comparison, view: View) -> Markup:
    """Draw tables of the means and of the words that differ."""
    steps = (*(f"step {step:,}" for step in comparison.steps), "difference")
    means = []
    for name, before, after in comparison.means:
        change = "–" if math.isnan(after - before) else f"{after - before:+.3g}"
        means.append((NAMES.get(name, name), short(before), short(after), change))
    words = [
        (word_link(word, view), f"{before:.0%}", f"{after:.0%}", f"{after - before:+.0%}")
        for word, before, after in comparison.words
    ]
    counts = f"means of {comparison.counts[0]:,} and {comparison.counts[1]:,} samples"
    shares = note(f"no word's share of the responses differs by {LEAST_CHANGE:.0%} or more")
    if words:
        caption = "share of the responses that have a word"
        shares = table_as_html(("word", *steps), words, caption, class_=None)
    return tag("div", table_as_html(("", *steps), means, counts, class_=None), shares, class_="tables")


def word_link(word: str, view: View) -> Markup:
    """Make a link to the samples of all steps that have a word."""
    text = f'"{word}"' if word[0].isalnum() else word
    return link(view.change(q=text, all_steps=True, against=None, prompt=""), word, "all samples that have it")


def side_by_side(samples: Samples, comparison: Comparison, draw: Drawing) -> Markup:
    """Draw the samples of each prompt at both steps."""
    parts = []
    for sides in comparison.prompts:
        columns = []
        for step, numbers in zip(comparison.steps, sides):
            shown = (sample_as_html(place, samples.row(place), draw) for place in numbers)
            columns.append(tag("div", tag("h3", f"step {step:,}"), *shown))
        prompt = prompt_as_html(samples.row(sides[0][0])["prompt"])
        parts.append(tag("section", prompt, tag("div", *columns, class_="sides"), class_="group"))
    return join(parts) if parts else note("no prompt was logged at both steps")
