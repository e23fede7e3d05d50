"""What the tab Runs shows: lines over seeds, axes, warnings of the audit, samples, arguments, tables, the chart."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from helpers.demo_runs import experiment, said, scores

from lightrlhf.demo.chart import COLOURS, MAX_POINTS, Drawn, chart, ticks
from lightrlhf.demo.runs import (
    MAX_ROWS,
    argument_table,
    card,
    curves,
    final_values,
    find_warnings,
    last_samples,
    lines_of,
    locate_steps,
    make_line,
    metric_names,
    metrics,
    nearest_samples,
    value_rows,
    warning_line,
)

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")

from lightrlhf.demo.runs_tab import samples_html, samples_table, warnings_html


@pytest.fixture
def folders(tmp_path) -> dict[str, str]:
    """Two seeds of one setting, the second of which was warned of, and a run with another setting."""
    return {
        "one": experiment(tmp_path / "1", scores(10, 0.0), said([4, 8], "one"), seed=1, lr=1e-3),
        "two": experiment(tmp_path / "2", scores(10, 2.0, warned=[4, 5, 9]), said([4, 8], "two"), seed=2, lr=1e-3),
        "other": experiment(tmp_path / "3", [{"step": 3, "val/loss": 1.0}, {"step": 6, "val/loss": 2.0}], seed=1, lr=1),
    }


def data_of(text: str) -> list[dict]:
    return json.loads(html.unescape(re.search(r'data-lines="([^"]*)"', text)[1]))


# -------------------------------------------------------------------------------------------------------------- lines
def test_lines_are_settings_over_seeds_or_single_runs(folders):
    grouped = lines_of(folders, True)
    assert [(line.label, line.runs, len(line.seeds)) for line in grouped] == [
        ("ppo, lr 0.001", ["one", "two"], 2),
        ("ppo, lr 1", ["other"], 1),
    ]
    assert [line.label for line in lines_of(folders, False)] == ["one", "two", "other"]
    assert metric_names(grouped)[:3] == ["objective/score", "val/loss", "audit/score"] and "my/metric" in metric_names(
        grouped
    )


def test_a_line_has_the_mean_and_the_standard_error_of_its_seeds(folders):
    found = curves("objective/score", lines_of(folders, True))
    (label, curve), *others = found.items()
    assert label == "ppo, lr 0.001" and not others
    assert curve.means.tolist() == [step + 1 for step in range(1, 11)]
    assert curve.errors == pytest.approx([1.0] * 10)  # of two values 2 apart: sqrt(2) / sqrt(2)


def test_places_by_step_tokens_and_hours(folders):
    line, other = lines_of(folders, True)
    steps = np.array([1, 5, 10])
    assert locate_steps("step", line, steps).tolist() == [1, 5, 10]
    assert locate_steps("tokens", line, steps).tolist() == [100, 500, 1000]
    assert locate_steps("hours", line, steps) == pytest.approx(np.array([5, 25, 50]) / 3600)
    assert locate_steps("tokens", other, steps) is None and locate_steps("hours", other, steps) is None


def test_steps_between_logged_ones_count_as_much(tmp_path):
    rows = [row for row in scores(10, 0.0) if row["step"] in (1, 5, 10)]
    (line,) = lines_of({"a": experiment(tmp_path / "run", rows)}, True)
    assert locate_steps("tokens", line, np.array([1, 3, 5, 10])).tolist() == [100, 300, 500, 1000]


def test_final_values_know_the_better_direction_by_the_name(folders):
    lines = lines_of(folders, True)
    assert final_values("objective/score", curves("objective/score", lines)) == [
        ["ppo, lr 0.001", 2, "2", "11", "1", "11", 10]
    ]
    assert final_values("val/loss", curves("val/loss", lines)) == [["ppo, lr 1", 1, "1", "2", "–", "1", 3]]
    assert final_values("my/metric", curves("my/metric", lines))[0][-2:] == ["–", "–"]


def test_values_by_step_are_few_and_keep_both_ends(tmp_path, folders):
    long = {"long": experiment(tmp_path / "long", scores(5000, 0.0))}
    rows = value_rows(curves("objective/score", lines_of(long, True)))
    assert len(rows) == MAX_ROWS and rows[0][0] == 1 and rows[-1] == [5000, "5000"]
    rows = value_rows(curves("objective/score", lines_of(folders, False)))
    assert rows[1] == [2, "2", "4"]
    assert value_rows(curves("objective/score", lines_of(folders, True)))[1] == [2, "3 ± 1"]
    assert value_rows({}) == []


# ------------------------------------------------------------------------------------------------ audit and arguments
def test_warned_steps_in_a_row_are_one_range(folders):
    found = find_warnings("two", folders["two"])
    assert [(each.first, each.last, each.score) for each in found] == [(4, 5, 7.0), (9, 9, 11.0)]
    assert warning_line(found[0]) == "two, seed 2: steps 4 to 5, in the end with score 7 and audit 1"
    assert warning_line(found[1]._replace(audit=None)) == "two, seed 2: step 9"
    assert find_warnings("one", folders["one"]) == find_warnings("other", folders["other"]) == []
    assert warnings_html(found).count("<li>") == 2 and warnings_html([]) == ""


def test_the_ranges_lie_on_the_axis_of_the_line(folders):
    line = lines_of(folders, True)[0]
    told = [each for label, folder in folders.items() for each in find_warnings(label, folder)]
    found = curves("objective/score", [line])
    assert make_line(line, found, "step", told).warned == [(4.0, 5.0), (9.0, 9.0)]
    assert make_line(line, found, "tokens", told).warned == [(400.0, 500.0), (900.0, 900.0)]
    assert make_line(line, {}, "step", told) is None


def test_the_table_of_arguments_has_those_that_differ(folders):
    headers, rows = argument_table(folders)
    assert headers == ["argument", "one", "two", "other"]
    assert rows == [["seed", "1", "2", "1"], ["lr", "0.001", "0.001", "1"]]


# -------------------------------------------------------------------------------------------------------------- files
def test_the_nearest_samples_are_those_of_one_step(folders):
    assert [row["response"] for row in nearest_samples(folders["one"], 5)] == ["one 0 at 4", "one 1 at 4"]
    assert {row["step"] for row in nearest_samples(folders["one"], 99)} == {8}
    assert nearest_samples(folders["other"], 5) == [] and "no samples" in samples_html("other", folders["other"], 5)


def test_samples_are_escaped_and_linked_to_the_rollouts_where_there_are_some(folders):
    shown = samples_html("one", folders["one"], 7)
    assert "one, seed 1: step 8" in shown and "<b>" not in shown
    assert shown.count("href") == 1 and "run=one%2C+held-out+prompts&amp;step=7" in shown
    Path(folders["one"], "rollouts.jsonl").write_text("")
    assert 'href="/?tab=rollouts&amp;run=one&amp;step=7"' in samples_html("one", folders["one"], 7)


def test_without_samples_of_evaluations_those_of_training_are_shown(tmp_path):
    folder = experiment(tmp_path / "run", [])
    Path(folder, "rollouts.jsonl").write_text(json.dumps({"step": 2, "prompt": "p", "response": "r", "score": 1.0}))
    assert nearest_samples(folder, 9) == []  # an incomplete line
    with Path(folder, "rollouts.jsonl").open("a") as file:
        file.write("\n")
    assert [row["response"] for row in nearest_samples(folder, 9)] == ["r"]


def test_files_are_read_again_when_they_have_grown(folders):
    assert len(metrics(folders["one"])["objective/score"].steps) == 10 and last_samples(folders["one"])[1] == 4
    for name in ("metrics.jsonl", "samples.jsonl"):
        with Path(folders["one"], name).open("a") as file:
            file.write(
                json.dumps({"step": 11, "objective/score": 0.5, "prompt": "p", "response": "new"})
                + '\n{"step": 12, "obj'
            )
    assert len(metrics(folders["one"])["objective/score"].steps) == 11
    assert last_samples(folders["one"])[0][-1]["response"] == "new"
    assert "5 samples" in samples_table(folders["one"])


def test_a_run_without_files_shows_nothing(tmp_path):
    assert metrics(str(tmp_path)) == {} and last_samples(None) == ([], 0) and card(None) == card(str(tmp_path)) == ""
    assert card(experiment(tmp_path / "run", [])) == "# A model card\n"


# -------------------------------------------------------------------------------------------------------------- chart
def line(number: int = 5, label: str = "a <run>", **changes) -> Drawn:
    steps = np.arange(1, number + 1)
    values = np.random.default_rng(0).normal(size=number)
    drawn = Drawn(label, ["a"], steps.astype(float), steps, values, np.zeros(number), np.ones(number, int), [])
    return drawn._replace(**changes)


def test_the_chart_of_a_long_run_is_short_and_keeps_its_extremes():
    long = line(50_000)
    text = chart("m", "step", [long], 1)
    (points,) = data_of(text)
    assert len(points["x"]) == len(points["steps"]) <= MAX_POINTS
    for extreme in (long.values.argmin(), long.values.argmax(), 0, 49_999):
        assert int(long.steps[extreme]) in points["steps"]
    (drawn,) = re.findall(r'<polyline class="line [^"]*" points="(\d[^"]{99,})"', text)
    assert len(drawn.split()) == len(points["x"])


def test_the_chart_has_a_text_a_legend_and_no_markup_of_names():
    text = chart("m", "step", [line(errors=np.full(5, 0.1), seeds=np.full(5, 3), warned=[(2.0, 3.0)])], 3)
    assert "a <run>" not in text and 'role="img" aria-label="m by step: a &lt;run&gt; from' in text
    assert "mean of 3 seeds ± one standard error" in text and "shaded: the audit warned" in text
    assert "moving average of 3 points" in text and "with warnings of the audit" in text
    assert text.count('class="band ') == text.count('class="warned ') == text.count('class="logged ') == 1
    alone = chart("m", "step", [line()], 1)
    assert not re.search(r'class="(band|warned|logged) |seeds|shaded', alone)


def test_shaded_ranges_lie_over_their_steps():
    text = chart("m", "step", [line(11, warned=[(6.0, 8.0)])], 1)
    assert 'x="498" width="204"' in text  # of 1000: from step 6 to 8 of 1 to 11, and 2 on each side


@pytest.mark.parametrize("lines", [[line(1)], [line(3, values=np.zeros(3))], [line(label=str(n)) for n in range(20)]])
def test_charts_of_one_point_of_a_constant_and_of_many_lines(lines):
    text = chart("m", "step", lines, 1)
    assert "nan" not in text and "inf" not in text and text.count("<li>") == len(lines)
    assert 'class="curves"' not in chart("m", "step", [], 1)


def test_a_single_point_is_a_dot_in_the_middle():
    drawn = chart("m", "step", [line(1)], 1)
    assert re.search(r'<polyline class="line dot [^"]*" points="500,500 500,500">', drawn)
    assert " dot" not in chart("m", "step", [line(2)], 1)


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    text = chart("m", "step", [line(label=str(n), values=np.arange(5.0)) for n in range(6)], 1)
    heights = sorted(float(height) for height in re.findall(r'class="end [^>]*top:([\d.-]+)%', text))
    assert len(heights) == 6 and min(np.diff(heights)) >= 12.5 and 0 <= heights[0] and heights[-1] <= 100


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3.2, 14.0, 5) == [0, 5, 10] and ticks(1e5, 1.2e5, 4) == [1e5, 105000, 110000, 115000, 120000]


def test_each_colour_of_a_line_has_contrast_to_the_page_in_light_and_dark():
    """WCAG 2.2, 1.4.11: 3:1 for graphics."""
    assets = ROOT / "lightrlhf" / "demo" / "assets"
    found = re.findall(r"--colour-(\d): #(\w{6})", (assets / "runs.css").read_text())
    grounds = re.findall(r"--ground: #(\w{6})", (assets / "page.css").read_text())
    assert [int(number) for number, _ in found] == [*range(COLOURS)] * 2 and len(grounds) == 2
    for place, (_, colour) in enumerate(found):
        bright, dim = sorted((luminance(colour), luminance(grounds[place // COLOURS])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 3, colour


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
