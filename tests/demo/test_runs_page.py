"""The tab Runs in headless Chromium: curves, the point under the mouse and its samples, warnings, files that grow."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from helpers.demo_page import choose, cut_off, findings, free_port, open_backend, press
from helpers.demo_runs import experiment, said, scores
from helpers.processes import PATIENCE

from lightrlhf.demo.page import build, serve

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")

LINE = "ppo, lr 0.001"


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """Two seeds of one setting, the second of which was warned of, and a run with another setting."""
    runs = [
        experiment(tmp_path / "1", scores(10, 0.0), said([4, 8], "one"), seed=1, lr=1e-3),
        experiment(tmp_path / "2", scores(10, 2.0, warned=[4, 5]), said([4, 8], "two"), seed=2, lr=1e-3),
        experiment(tmp_path / "3", scores(20, 9.0), said([4, 16], "three"), seed=1, lr=1e-4),
    ]
    Path(runs[0], "rollouts.jsonl").write_text("")
    return runs


@pytest.fixture
def page(browser, folders):
    """The tab, opened; the page may request nothing from other hosts, and no script may fail."""
    backend = open_backend(*folders)
    args = dataclasses.replace(backend.args, port=free_port())
    app = build(backend)
    serve(app, args)
    opened = browser.new_page(viewport={"width": 1280, "height": 1000})
    requested, failures = [], []
    opened.on("request", lambda request: requested.append(request.url))
    opened.on("pageerror", lambda problem: failures.append(str(problem)))
    opened.set_default_timeout(PATIENCE * 1000)
    try:
        opened.goto(f"http://127.0.0.1:{args.port}")
        opened.get_by_role("tab", name="Runs").click()
        opened.locator("figure.curves").wait_for()
        yield opened
    finally:
        opened.close()
        app.close()
    assert not [url for url in requested if not url.startswith((f"http://127.0.0.1:{args.port}", "data:", "blob:"))]
    assert not failures


def point_at(page, across: float, down: float) -> None:
    """Move the mouse to a place of the chart, in shares of its size."""
    box = page.locator(".curves .plot > svg").bounding_box()
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])


def test_the_samples_of_the_point_under_the_mouse_are_beside_the_chart(page):
    page.locator(".plot").scroll_into_view_if_needed()
    point_at(page, 3 / 19, 0.9)
    page.get_by_text(f"{LINE}, step 4: 5 ± 1").wait_for()
    beside = page.get_by_role("region", name="Samples of the point")
    beside.get_by_text("two 1 at 4").wait_for()
    assert "Ask <b>one</b> ${x} {{y}}" in beside.inner_text()  # as it was written, no markup and no template
    assert "one 0 at 4" in beside.inner_text() and "ppo, seed 1: step 4" in beside.inner_text()
    links = [link.get_attribute("href") for link in beside.get_by_role("link").all()]
    held_out = [f"/?tab=rollouts&run={run}%2C+held-out+prompts&step=4" for run in ("ppo", "ppo+2")]
    assert links == ["/?tab=rollouts&run=ppo&step=4", *held_out]
    point_at(page, 0.99, 0.05)
    beside.get_by_text("three 1 at 16").wait_for()
    assert "two" not in beside.inner_text()


def test_a_click_keeps_the_point_until_the_next(page):
    page.locator(".plot").scroll_into_view_if_needed()
    point_at(page, 3 / 19, 0.9)
    page.mouse.down()
    page.mouse.up()
    page.get_by_text("step 4: 5 ± 1 (kept").wait_for()
    point_at(page, 0.99, 0.05)
    page.get_by_role("region", name="Samples of the point").get_by_text("two 1 at 4").wait_for()
    assert "step 4" in page.locator(".readout").inner_text()
    page.mouse.down()
    page.mouse.up()
    page.get_by_text(re.compile("step 20: 29$")).wait_for()


def test_the_keys_move_along_a_line_and_to_the_others(page):
    page.locator(".plot").focus()
    for key, told in (
        ("ArrowRight", f"{LINE}, step 2: 3 ± 1"),
        ("End", f"{LINE}, step 10: 11 ± 1"),
        ("ArrowDown", "ppo, lr 0.0001, step 10: 19"),
        ("Shift+ArrowRight", "ppo, lr 0.0001, step 20: 29"),
        ("Enter", "step 20: 29 (kept"),
    ):
        page.keyboard.press(key)
        page.locator(".readout").get_by_text(told).wait_for()
    page.get_by_text("three 1 at 16").first.wait_for()


def test_bands_warnings_and_tables(page):
    page.get_by_text("The audit warned that the policy may exploit").wait_for()
    assert page.locator(".warnings li").all_inner_texts() == [
        "ppo 2, seed 2: steps 4 to 5, in the end with score 7 and audit 1"
    ]
    assert page.locator(".curves .warned").count() == page.locator(".curves polygon.band").count() == 1
    names = page.locator(".curves .names li").all_inner_texts()
    assert names[0] == f"{LINE} mean of 2 seeds ± one standard error" and names[2] == "shaded: the audit warned"
    chart = page.get_by_role("img", name=re.compile("^objective.score by step: ppo"))
    assert "ppo, lr 0.0001 from 10 at step 1 to 29 at step 20" in chart.get_attribute("aria-label")
    final = page.get_by_role("table").filter(has_text="Values of objective/score")
    assert final.get_by_role("row").nth(1).inner_text().split("\t") == [LINE, "2", "2", "11", "1", "11", "10"]
    page.get_by_role("button", name="Arguments in which the runs differ").click()
    rows = page.get_by_role("table").filter(has_text="argument").get_by_role("row")
    rows.first.wait_for()
    arguments = rows.all_inner_texts()
    assert "seed\t1\t2\t1" in arguments and "lr\t0.001\t0.001\t0.0001" in arguments
    page.get_by_role("button", name="Values by step").click()
    page.get_by_role("cell", name="3 ± 1", exact=True).first.wait_for()


def test_choices_change_the_chart(page):
    choose(page, "Metric", "my/metric")
    page.get_by_role("img", name=re.compile("^my.metric by step")).wait_for()
    choose(page, "By", "tokens")
    page.get_by_role("img", name=re.compile("^my.metric by tokens")).wait_for()
    page.locator(".x.tick", has_text="2000").wait_for()  # of 20 steps with 100 each
    page.get_by_label("One line for runs").uncheck()
    page.locator(".curves .names li").nth(2).wait_for()
    page.get_by_role("checkbox", name="ppo 2", exact=True).uncheck()
    page.locator(".warnings").wait_for(state="detached")
    page.locator(".curves .names li").nth(2).wait_for(state="detached")


def test_reload_reads_what_a_run_has_logged_since_and_keeps_the_point(page, folders):
    page.locator(".plot").focus()
    page.keyboard.press("End")
    page.get_by_text(f"{LINE}, step 10: 11 ± 1").wait_for()
    with Path(folders[2], "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "objective/score": 99.0}) + '\n{"step": 41, "obj')
    press(page, "Reload")
    page.get_by_role("img", name=re.compile("to 99 at step 40")).wait_for()
    left = page.locator(".cursor").evaluate("part => parseFloat(part.style.left)")
    assert left == pytest.approx(100 * 9 / 39, abs=0.1)


def test_the_samples_table_and_the_model_card(page):
    choose(page, "Run of the samples and the model card", "ppo 2")
    samples = page.get_by_role("table").filter(has_text="4 samples")
    samples.get_by_text("two 0 at 8").wait_for()
    page.get_by_role("button", name="Model card").click()
    page.get_by_role("heading", name="A model card").wait_for()


@pytest.mark.parametrize("size", [(1280, 1000), (390, 844)], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_cut_off(page, scheme, size):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme=scheme)
    page.reload()
    page.get_by_role("tab", name="Runs").click()
    page.locator("figure.curves").wait_for()
    assert page.locator("body.dark").count() == (scheme == "dark")
    page.locator(".plot").focus()
    page.keyboard.press("End")
    page.get_by_text("two 1 at 8").first.wait_for()
    assert findings(page) == [] and cut_off(page) == []
    assert page.locator(".curves .plot").bounding_box()["width"] > 250
