"""Tab Runs: curves of the experiments over seeds, the audit's warnings, samples during training, model cards.

Left out: changes of a page's choices by its address, and curves of experiments that the demo was not started with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from markupsafe import Markup

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo import runs
from lightrlhf.demo.chart import chart
from lightrlhf.demo.inputs import PRIVATE, event_values, make_html
from lightrlhf.demo.markup import join, scores_as_html, table_as_html, tag
from lightrlhf.demo.models import format_score
from lightrlhf.demo.session import DemoBackend
from lightrlhf.demo.theme import ASSETS
from lightrlhf.storage.results import usual_metrics
from lightrlhf.training.rollout_log import FILE, SAMPLES

FOLLOW_SECONDS = 10  # between two readings of experiments that are followed
MAX_SMOOTHING = 201  # points
FINAL = ["runs", "seeds", "first", "last", "± standard error", "best", "at step"]
HINT = "Samples that were logged nearest the point under the mouse are shown here."


def runs_tab(backend: DemoBackend, tab: Any) -> None:
    """Build the tab; opening it or pressing Reload reads the files again."""
    names = list(backend.runs())
    policies = [name for name, folder in backend.runs().items() if folder in backend.args.model_name]
    (chosen, by_settings, metric, axis, smoothing), follow, reload = chart_inputs(names)
    warnings = make_html()
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            drawing = make_html(js_on_load=(ASSETS / "runs.js").read_text(encoding="utf-8"))
        with gr.Column(scale=2, min_width=320):
            beside = make_html(beside_html(tag("p", HINT, class_="hint")))
    final = make_html()
    with gr.Accordion("Values by step", open=False):
        values = make_html()
    with gr.Accordion("Arguments in which the runs differ", open=False):
        arguments = make_html()
    run = gr.Dropdown(names, value=policies[-1] if policies else None, label="Run of the samples and the model card")
    with gr.Accordion("Samples during training", open=True):
        table = make_html()
    with gr.Accordion("Model card", open=False):
        text = gr.Markdown()

    def draw(chosen: list[str], *settings: Any) -> list[Any]:
        folders = {label: folder for label, folder in backend.runs().items() if label in chosen}
        names, metric, *html = views_of(folders, *settings)
        return [gr.update(choices=names, value=metric), *html]

    def show(event: gr.EventData) -> str:
        asked, step = (event_values(event).get(name) for name in ("runs", "step"))
        if not isinstance(asked, list) or not isinstance(step, int | float) or not math.isfinite(step):
            raise UsageError("this point of the chart has no runs and no step; reload the page")
        return beside_html(*(samples_html(*run, int(step)) for run in backend.runs().items() if run[0] in asked))

    def describe(run: str | None) -> list[Any]:
        folder = backend.runs().get(run or "")
        return [samples_table(folder), runs.card(folder)]

    inputs = [chosen, by_settings, metric, axis, smoothing]
    drawing_all = draw, inputs, [metric, drawing, warnings, final, values, arguments]
    describing = describe, run, [table, text]
    timer = gr.Timer(FOLLOW_SECONDS, active=False)
    for event in (tab.select, reload.click):
        event(*drawing_all, api_visibility="private")
        event(*describing, api_visibility="private")
    for event in (chosen.input, by_settings.input, metric.input, axis.input, smoothing.release):
        event(*drawing_all, api_visibility="private")
    timer.tick(*drawing_all, **PRIVATE)
    follow.input(lambda on: gr.Timer(active=on), follow, timer, api_visibility="private")
    drawing.select(show, None, beside, trigger_mode="always_last", **PRIVATE)
    run.input(*describing, api_visibility="private")


def chart_inputs(names: list[str]) -> tuple[list[Any], Any, Any]:
    """Make the inputs of the chart, in the order of `views_of`, the box to follow the files, and the reload button."""
    chosen = gr.CheckboxGroup(names, value=names, label="Runs")
    with gr.Row():
        metric = gr.Dropdown([], label="Metric")
        axis = gr.Dropdown(runs.AXES, value=runs.AXES[0], label="By")
        smoothing = gr.Slider(1, MAX_SMOOTHING, 1, step=2, label="Smoothing (points)")
    with gr.Row():
        by_settings = gr.Checkbox(True, label="One line for runs that differ by their seed alone")
        follow = gr.Checkbox(False, label=f"Read the files every {FOLLOW_SECONDS} s")
        reload = gr.Button("Reload", scale=0)
    return [chosen, by_settings, metric, axis, smoothing], follow, reload


# --------------------------------------------------------------------------------------------------------------- HTML
def views_of(
    folders: Mapping[str, str], by_settings: bool, metric: str | None, axis: str, smoothing: float
) -> tuple[list[str], str | None, str, str, str, str, str]:
    """Return the names of the logged metrics, the shown one, and HTML: its chart, warnings and tables."""
    lines = runs.lines_of(folders, by_settings)
    names = runs.metric_names(lines)
    metric = metric if metric in names else next(iter(usual_metrics(set(names))), None)
    found, name = runs.curves(metric, lines) if metric else {}, metric or "no metric"
    warnings = [each for label, folder in folders.items() for each in runs.find_warnings(label, folder)]
    drawn = [line for line in (runs.make_line(line, found, axis, warnings) for line in lines) if line]
    return (
        names,
        metric,
        chart(metric or "", axis, drawn, max(1, min(int(smoothing), MAX_SMOOTHING))),
        warnings_html(warnings),
        scrolling_table(FINAL, runs.final_values(metric or "", found), f"Values of {name}"),
        scrolling_table(["step", *found], runs.value_rows(found), f"{name} by step, as logged"),
        scrolling_table(*runs.argument_table(folders), "Arguments in which the runs differ"),
    )


def beside_html(*content: Markup) -> Markup:
    return tag("section", *content, class_="beside", aria_label="Samples of the point", aria_live="polite", tabindex=0)


def samples_html(label: str, folder: str, step: int) -> Markup:
    """Draw the samples of a run that were logged nearest to a step, and a link to the rollouts there."""
    found, title = runs.nearest_samples(folder, step), runs.name_run(label, folder)
    if not found:
        return tag("h2", title) + tag("p", "This run has logged no samples.", class_="hint")
    parts = [tag("h2", f"{title}: step {found[0]['step']}")]
    for row in found:
        texts = tag("div", row["prompt"], class_="text asked") + tag("div", row["response"], class_="text")
        parts.append(tag("article", texts, scores_as_html([("score", format_score(row.get("score")))]), class_="card"))
    for name, suffix, where in ((FILE, "", "Rollouts"), (SAMPLES, runs.HELD_OUT, "Held-out prompts")):
        if (Path(folder) / name).is_file():
            address = "/?" + urlencode({"tab": "rollouts", "run": label + suffix, "step": step})
            parts.append(tag("p", tag("a", f"{where} at step {step}", href=address)))
    return join(parts)


def samples_table(folder: str | None) -> Markup:
    """Draw a table of the last samples of a run."""
    found, count = runs.last_samples(folder)
    caption = f"The last {len(found)} of {count} samples" if count > len(found) else f"{count} samples"
    rows = [[row["step"], row["prompt"], row["response"], format_score(row.get("score"))] for row in found]
    return scrolling_table(["step", "prompt", "response", "score"], rows, caption)


def scrolling_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], caption: str) -> Markup:
    """Draw a table that scrolls by itself."""
    table, look = table_as_html(headers, rows, caption), {"class_": "scroller", "tabindex": 0, "role": "region"}
    return tag("div", table, aria_label=caption, **look)


def warnings_html(warnings: Sequence[runs.Warned]) -> Markup:
    """Draw a line for each range of steps at which an audit warned; empty without warnings."""
    if not warnings:
        return Markup()
    title = "The audit warned that the policy may exploit the reward; read the samples of these steps:"
    lines = tag("ul", *(tag("li", runs.warning_line(each)) for each in warnings))
    return tag("div", tag("p", title), lines, class_="warnings", role="note")
