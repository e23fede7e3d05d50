"""HTML of the tab Rollouts: curves, groups of samples, tokens by colour, two steps side by side. Every text is escaped.

A link with the class `view` opens another view; the tab does so without loading the page again, and a new browser tab
opens the same. The style is in `assets/rollouts.css`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightrlhf.demo.rollout_file import Flags, Row, Samples, by_token, mask_of, number, prompt_key, sampled
from lightrlhf.demo.rollouts import (
    COLOURS,
    GROUPS_A_PAGE,
    LEAST_CHANGE,
    Comparison,
    Selection,
    View,
    audit_disagrees,
    compare,
    curves,
    deepest,
    logged_colours,
    neighbours,
    select,
)
from lightrlhf.programs import TRAINING, Program

SAMPLES_A_PAGE, FEWEST_SAMPLES = 80, 4  # of each group at least
TOKENS_A_PAGE, FEWEST_TOKENS = 4000, 40  # of all samples; of each sample at least
CHARACTERS_A_TOKEN = 5  # of a text without tokens that is cut
LONGEST_PROMPT = 600  # characters that are shown unless the prompt is opened
LONGEST_SHOWN = 400  # the same of a user's message or an observation
DEEPEST_LOG_RATIO = 3.0  # nats
STRONGEST = 0.6  # opacity of the deepest colour: text on it stays readable
LINE_SIZE = (180, 36)  # width and height of a curve
OTHER = Program("", "")  # whose runs are shown as a program's that is not known
NAMES = {"kl": "KL", "truncated": "share truncated"}  # names of columns where others than their own are shown
Pieces = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Run:
    """What is shown of a run beside its file."""

    label: str
    program: str  # of `args.json`
    pieces: Pieces | None  # the texts of ids; None without a tokenizer
    problem: str = ""  # why there is no tokenizer


def page(samples: Samples, view: View, run: Run) -> str:
    """The whole page of a view; the root element has the view's address."""
    selection = select(samples, view)
    shown = selection.view
    if shown.against is not None and selection.steps and shown.sample is None:
        comparison = compare(samples, shown, selection.steps)
        shown = comparison.view
        numbers = [place for both in comparison.prompts for side in both for place in side]
        draw = Drawing.of(samples, shown, run, len(numbers))
        body = differences(comparison, shown) + side_by_side(samples, comparison, shown, draw)
        body += pager(shown, comparison.num_prompts, "prompts")
    else:
        most = max(SAMPLES_A_PAGE // max(len(selection.groups), 1), FEWEST_SAMPLES)
        draw = Drawing.of(samples, shown, run, sum(min(len(group), most) for group in selection.groups))
        body = "".join(group_as_html(samples, group, shown, draw, most) for group in selection.groups)
        body += "" if shown.sample is not None else pager(shown, selection.num_groups, "groups")
    if not selection.groups and not selection.problem:
        body += note("no sample fits; empty the search, or show all steps" if len(samples) else "no samples yet")
    parts = [
        *notes(samples, selection, run),
        curves_as_html(curves(samples, selection), shown) if len(samples) else "",
        heading(samples, selection),
        draw.legend(),
        body,
    ]
    whole = f'<div class="rollouts" data-query="{html.escape(shown.query())}">{"".join(parts)}</div>'
    return whole.encode("utf-8", "replace").decode()  # a row may hold halves of characters, which no page can


def note(text: str) -> str:
    """A line that says what is missing or wrong."""
    return f'<p class="note">{html.escape(text)}</p>'


def notes(samples: Samples, selection: Selection, run: Run) -> list[str]:
    """What is missing or wrong, a line each."""
    lines = [selection.problem] if selection.problem else []
    if not samples.is_read:
        lines.append(f"{samples.share_read:.0%} of the file is read so far, {len(samples):,} samples; press Reload")
    elif samples.read_bytes < samples.all_bytes:
        lines.append(f"the last line of {samples.path.name} is not complete yet; it is left out")
    if samples.bad:
        line, problem = next(iter(samples.bad.items()))
        more = f", and {len(samples.bad) - 1:,} more lines" if len(samples.bad) > 1 else ""
        lines.append(f"{samples.path.name} line {line} {problem}{more}; left out")
    if run.problem and len(samples):
        lines.append(f"{run.problem}; texts are shown without their tokens")
    return [note(line) for line in lines]


def link(view: View, caption: str, title: str = "", is_chosen: bool = False) -> str:
    """A link to a view; the caption is text."""
    about = (f' title="{html.escape(title)}"' if title else "") + (' aria-current="true"' if is_chosen else "")
    return f'<a class="view" href="?{html.escape(view.query())}"{about}>{html.escape(caption)}</a>'


def heading(samples: Samples, selection: Selection) -> str:
    """What is shown, and links to what is near it."""
    view, steps = selection.view, selection.steps
    if not steps:
        return ""
    if view.sample is not None:
        parts = [f"Sample {view.sample} of step {view.step}", link(replace(view, sample=None), "back")]
        return f'<p class="where">{" · ".join(parts)}</p>'
    where = f"{len(steps):,} steps" if view.all_steps else f"Step {view.step:,}, {_place(steps, view.step)}"
    parts = [f"<strong>{where}</strong>"]
    if view.against is None:
        parts.append(f"{selection.num_samples:,} samples in {selection.num_groups:,} groups")
    if selection.found is not None:
        found, quoted = int(selection.found.sum()), view.q if view.q.startswith('"') else f"“{view.q}”"
        text = f"{found:,} of the run's {len(samples):,} samples have {html.escape(quoted)}"
        more = "" if view.all_steps else " " + link(view.changed(all_steps=True, against=None), "show them all")
        parts.append(text + more + " " + link(view.changed(q=""), "clear"))
    if not view.all_steps and view.step is not None:
        before, after = neighbours(steps, view.step)
        parts += [link(view.changed(step=before), "previous step")] if before is not None else []
        parts += [link(view.changed(step=after), "next step")] if after is not None else []
        if view.against is not None:
            parts.append(link(view.changed(against=None), "end comparison"))
        elif len(steps) > 1:
            first = steps[0] if view.step != steps[0] else steps[-1]
            parts.append(link(view.changed(against=first), f"compare with step {first:,}"))
    if view.prompt:
        parts.append(f"one prompt at {len(steps):,} steps {link(view.changed(prompt=''), 'show all prompts')}")
    return f'<p class="where" role="status">{" · ".join(parts)} · {link(view, "link to this view")}</p>'


def _place(steps: Sequence[int], step: int | None) -> str:
    return f"{list(steps).index(step) + 1:,} of {len(steps):,} that were logged" if step is not None else ""


def pager(view: View, count: int, things: str) -> str:
    """Links to the pages around this one."""
    pages = max(math.ceil(count / GROUPS_A_PAGE), 1)
    if pages == 1:
        return ""
    parts = [
        f"{things} {(view.page - 1) * GROUPS_A_PAGE + 1:,} to {min(view.page * GROUPS_A_PAGE, count):,} of {count:,}"
    ]
    parts += [link(view.changed(page=view.page - 1), "previous page")] if view.page > 1 else []
    parts += [link(view.changed(page=view.page + 1), "next page")] if view.page < pages else []
    return f'<p class="where">{" · ".join(parts)}</p>'


# ------------------------------------------------------------------------------------------------------------- curves
def curves_as_html(lines: Mapping[str, Sequence[tuple[int, float]]], view: View) -> str:
    """Means by step, small; a mark at the step that is shown."""
    return '<div class="curves">' + "".join(_curve(NAMES.get(n, n), line, view) for n, line in lines.items()) + "</div>"


def _curve(name: str, line: Sequence[tuple[int, float]], view: View) -> str:
    width, height = LINE_SIZE
    values = [value for _, value in line]
    first, last = line[0][0], line[-1][0]
    low, span, length = min(values), max(values) - min(values) or 1.0, max(last - first, 1)

    def x(step: int) -> float:
        return (step - first) / length * (width - 4) + 2

    every = max(len(line) // width, 1)  # no more points than the curve is wide
    points = " ".join(f"{x(s):.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for s, v in line[::every])
    told = f"{name} {short(values[0])} at step {first:,}, {short(values[-1])} at step {last:,}"
    mark = ""
    if view.step is not None and not view.all_steps and first <= view.step <= last:
        mark = f'<line x1="{x(view.step):.1f}" x2="{x(view.step):.1f}" y1="0" y2="{height}" class="mark"/>'
    drawing = f'<polyline points="{points}"/>{mark}'
    return (
        f"<figure><figcaption>{html.escape(name)} <b>{short(values[0])} → {short(values[-1])}</b></figcaption>"
        f'<svg role="img" aria-label="{html.escape(told)}" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><title>{html.escape(told)}</title>{drawing}</svg></figure>'
    )


def short(value: float | None) -> str:
    """A number of up to three significant digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------ samples
@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn."""

    run: Run
    colour: str
    deepest: float
    limit: int  # tokens shown of each sample
    is_alone: bool  # whether a single sample is shown, with all its numbers
    disagrees: Flags
    is_logged: bool  # whether the run has numbers of this colour

    @classmethod
    def of(cls, samples: Samples, view: View, run: Run, num_samples: int) -> Drawing:
        limit = 10**9 if view.sample is not None else max(TOKENS_A_PAGE // max(num_samples, 1), FEWEST_TOKENS)
        is_ratio = view.colour == "log-ratio"
        depth = DEEPEST_LOG_RATIO if is_ratio else deepest(samples, view.colour)
        is_logged = view.colour in logged_colours(samples)
        is_alone = view.sample is not None
        return cls(run, view.colour, depth, limit, is_alone, audit_disagrees(samples), is_logged)

    def legend(self) -> str:
        """What the colours mean."""
        if self.run.pieces is None:
            return ""
        if not self.is_logged:
            return note(f"this run logs no {self.colour}s; its tokens have no colour")
        unit = " nats" if self.colour == "log-ratio" else ""
        more, less = (f'<span class="token {kind}" style="--strength:{STRONGEST}">' for kind in ("more", "less"))
        marks = f"{more}+{short(self.deepest)}</span> 0 {less}−{short(self.deepest)}</span>{unit}"
        shown = '<span class="shown">grey: shown, not sampled (mask 0)</span>'
        return f'<p class="legend">{self.colour} of a token: {marks} · {shown}</p>'

    def tokens(self, row: Row) -> str:
        """The response: each turn of the policy and each text that was shown to it apart, tokens coloured."""
        ids, mask = row.get("response_ids"), mask_of(row)
        if self.run.pieces is None or not isinstance(ids, list) or not ids:
            text, most = str(row.get("response", "")), self.limit * CHARACTERS_A_TOKEN
            return f'<div class="tokens">{html.escape(text[:most])}{"…" if len(text) > most else ""}</div>'
        texts = self.run.pieces(ids[: self.limit])
        columns = {name: by_token(row.get(column), mask) for name, column in COLOURS.items()}
        values = columns[self.colour] or [None] * len(ids)
        program, told, blocks = TRAINING.get(self.run.program, OTHER), 0, []
        has_turns = 0 in mask
        for one, places in groupby(range(len(texts)), key=lambda i: mask[i]):
            told += bool(one)
            spans = "".join(self._token(texts[i], values[i], columns, i) if one else plain(texts[i]) for i in places)
            name = f"{program.turns[0]} {told}" if one else program.turns[1]
            if one and program.trains_one_turn:
                name += ", trained" if told == 1 else ", sampled after it"
            caption = f"<b>{name}</b> " if has_turns else ""
            if not one and len(spans) > LONGEST_SHOWN:
                spans = f"<details><summary>{len(spans):,} characters</summary>{spans}</details>"
            blocks.append(f"<div>{caption}{spans}</div>" if one else f'<div class="shown">{caption}{spans}</div>')
        return f'<div class="tokens">{"".join(blocks)}</div>'

    def _token(self, text: str, value: float | None, columns: Mapping[str, list[float | None] | None], i: int) -> str:
        shown = columns.items() if self.is_alone else [(self.colour, columns[self.colour])]
        told = [f"{name} {short(column[i])}" for name, column in shown if column is not None]
        title = f' title="{", ".join(told)}"' if told else ""
        strength = 0.0 if value is None else min(abs(value) / self.deepest, 1.0) * STRONGEST
        kind = "more" if value is None or value >= 0 else "less"
        style = f' style="--strength:{strength:.2f}"' if strength >= 0.01 else ""
        return f'<span class="token {kind}"{title}{style}>{plain(text)}</span>'


def plain(text: str) -> str:
    """A token's text; the end of a line is visible."""
    return html.escape(text).replace("\n", "↵\n")


def group_as_html(samples: Samples, numbers: Sequence[int], view: View, draw: Drawing, most: int) -> str:
    """A prompt and its samples, at most so many."""
    rows = [(place, samples.row(place)) for place in numbers[:most]]
    prompt, step = rows[0][1]["prompt"], rows[0][1]["step"]
    shown = "".join(sample_as_html(place, row, view, draw) for place, row in rows)
    same = view.changed(step=step, all_steps=False, prompt=prompt_key(prompt), q="", against=None)
    where = f"step {step:,} · " if view.all_steps else ""
    times = f"{len(numbers):,} samples" if len(numbers) > 1 else "1 sample"
    times += f", the first {most} shown" if len(numbers) > most else ""
    through = "" if view.prompt else f" · {link(same, 'this prompt through training')}"
    return f'<section class="group"><header>{where}{times}{through}</header>{prompt_as_html(prompt)}{shown}</section>'


def prompt_as_html(prompt: str) -> str:
    """A prompt; of a long one the end, which is nearest to the response."""
    if len(prompt) <= LONGEST_PROMPT:
        return f'<div class="prompt">{html.escape(prompt)}</div>'
    hidden = f"<details><summary>{len(prompt) - LONGEST_PROMPT:,} characters before</summary>"
    return (
        f'<div class="prompt">{hidden}{html.escape(prompt[:-LONGEST_PROMPT])}</details>'
        f"{html.escape(prompt[-LONGEST_PROMPT:])}</div>"
    )


def sample_as_html(place: int, row: Row, view: View, draw: Drawing) -> str:
    """A sample: its numbers as badges, its response below."""
    mask = mask_of(row)
    length = sum(mask)
    ratios, advantages = sampled(row.get("log_ratio"), mask), sampled(row.get("advantages"), mask)
    score, audit, version = (number(row.get(name)) for name in ("score", "audit", "version"))
    badges = [badge("reward", "not scored" if math.isnan(score) else short(score), "main")]
    rewards = row.get("rewards")
    if isinstance(rewards, dict) and (len(rewards) > 1 or list(rewards.values()) != [row.get("score")]):
        badges += [badge(str(name), short(number(value))) for name, value in rewards.items()]
    if not math.isnan(audit):
        badges.append(badge("audit", short(audit), "problem" if draw.disagrees[place] else ""))
    if draw.disagrees[place]:
        badges.append('<li class="problem" title="reward above, audit below the mean of the run">audit disagrees</li>')
    badges += [badge("advantage", short(sum(advantages) / len(advantages)))] if advantages else []
    badges += [badge("KL", short(sum(ratios)))] if ratios else []
    badges.append(badge("", f"{length:,} tokens" + (f" of {len(mask):,}" if length < len(mask) else "")))
    badges += [badge("", "truncated")] if row.get("truncated") is True else []
    badges += [] if math.isnan(version) else [badge("", f"weights of step {version:,.0f}")]
    is_cut = len(mask) > draw.limit
    caption = f"all {len(mask):,} tokens" if is_cut else "open"
    alone = "" if view.sample is not None else f"<li>{link(replace(view, sample=place), caption)}</li>"
    details = details_as_html(row) if view.sample is not None else ""
    head = f'<ul class="scores" aria-label="Scores">{"".join(badges)}{alone}</ul>'
    return f'<article class="sample" aria-label="Sample {place}">{head}{draw.tokens(row)}{details}</article>'


def badge(name: str, value: str, kind: str = "") -> str:
    """A number with its name."""
    caption = f"<span>{html.escape(name)}</span> " if name else ""
    return f"<li{f' class={kind}' if kind else ''}>{caption}{html.escape(value)}</li>"


def details_as_html(row: Row) -> str:
    """The other columns of the data, of a sample alone."""
    columns = row.get("columns")
    if not isinstance(columns, dict) or not columns:
        return ""
    rows = [(html.escape(str(name)), html.escape(str(value))) for name, value in columns.items()]
    return table("columns of the data", ("column", "value"), rows)


# ---------------------------------------------------------------------------------------------------------- two steps
def differences(comparison: Comparison, view: View) -> str:
    """Tables of the means and of the words that differ."""
    one, two = comparison.steps
    steps = (f"step {one:,}", f"step {two:,}", "difference")
    means = [
        (html.escape(NAMES.get(name, name)), short(before), short(after), signed(after - before))
        for name, before, after in comparison.means
    ]
    words = [
        (word_link(word, view), f"{before:.0%}", f"{after:.0%}", f"{after - before:+.0%}")
        for word, before, after in comparison.words
    ]
    counts = f"means of {comparison.counts[0]:,} and {comparison.counts[1]:,} samples"
    least = f"no word's share of the responses differs by {LEAST_CHANGE:.0%} or more"
    shares = table("share of the responses that have a word", ("word", *steps), words) if words else note(least)
    return f'<div class="tables">{table(counts, ("", *steps), means)}{shares}</div>'


def signed(value: float) -> str:
    """A difference, with its sign."""
    return "–" if math.isnan(value) else f"{value:+.3g}"


def word_link(word: str, view: View) -> str:
    """A link to the samples of all steps that have a word."""
    text = f'"{word}"' if word[0].isalnum() else word
    return link(view.changed(q=text, all_steps=True, against=None, prompt=""), word, "all samples that have it")


def table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its cells are HTML."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headers)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>"
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def side_by_side(samples: Samples, comparison: Comparison, view: View, draw: Drawing) -> str:
    """The samples of each prompt at both steps."""
    if not comparison.prompts:
        return note("no prompt was logged at both steps")
    parts = []
    for sides in comparison.prompts:
        columns = []
        for step, numbers in zip(comparison.steps, sides):
            shown = "".join(sample_as_html(place, samples.row(place), view, draw) for place in numbers)
            columns.append(f"<div><h3>step {step:,}</h3>{shown}</div>")
        prompt = prompt_as_html(samples.row(sides[0][0])["prompt"])
        parts.append(f'<section class="group">{prompt}<div class="sides">{"".join(columns)}</div></section>')
    return "".join(parts)
