"""The tab Rollouts in headless Chromium: runs of every RL program, and the way to a planted hack."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest
from helpers import ROOT, environment
from helpers.demo_page import findings, free_port, open_backend, wait_for
from helpers.processes import PATIENCE
from helpers.rollout_files import TOKENIZER, experiment, hacked_run, logged_row, write_rows

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")

from lightrlhf.cli.parser import parse
from lightrlhf.demo.rollouts_tab import Rollouts
from lightrlhf.training.rollout_log import FILE

HOSTILE = "${alert(1)} {{value}} <script>alert(1)</script>"
SEEN = {  # what each program's page says besides its prompt
    "ppo": ["KL", "weights of step 1"],
    "grpo": ["advantage", "2 samples"],
    "online_dpo": ["logs no log-ratios", "2 samples"],
    "online_refuel": ["turn 1, trained", "user", "turn 2, sampled after it"],
    "iterative_refuel": ["turn 1, trained", "user", "turn 2, sampled after it"],
    "reflect_rl": ["action 1", "observation", "action 2"],
}


def rows_of(program: str) -> list[dict]:
    """Two steps of two samples with the fields that the program writes."""
    rng, rows = random.Random(program), []
    for step in (1, 2):
        for number in range(2):
            ids = [rng.randrange(2, 12) for _ in range(6)]
            numbers = {name: [rng.gauss(0, 2) for _ in ids] for name in ("log_ratio", "advantages", "values")}
            kept = {"ppo": (*numbers,), "grpo": ("log_ratio", "advantages"), "online_dpo": ()}
            kept |= {"online_refuel": ("log_ratio",), "iterative_refuel": (), "reflect_rl": ("advantages",)}
            given = {name: values if name in kept[program] else None for name, values in numbers.items()}
            if "refuel" in program or program == "reflect_rl":
                given["mask"] = [1, 1, 0, 0, 1, 1]
            group = number if program == "ppo" else 0
            prompt = f"{program} {HOSTILE}"
            rows.append(logged_row(step, prompt, "text", group, response_ids=ids, score=number, **given))
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders by program, and the hacked run."""
    folder = tmp_path_factory.mktemp("rollouts")
    made = {program: experiment(folder / program, program, TOKENIZER, rows_of(program)) for program in SEEN}
    answers = [logged_row(step, "held out", f"answer {step}", 0) | {"split": "validation"} for step in (1, 2, 3)]
    write_rows(made["ppo"] / "samples.jsonl", answers)
    return made | {"hacked": hacked_run(folder)}


@pytest.fixture(scope="module")
def address(runs):
    """The address of the demo that serves them, in this process."""
    from lightrlhf.demo.args import DemoArgs
    from lightrlhf.demo.page import build, serve
    from lightrlhf.demo.session import DemoBackend

    folders = [str(folder) for folder in runs.values()]
    args = parse(DemoArgs, ["--experiment_dir", *folders, "--accelerator", "cpu", "--port", str(free_port())])
    app = build(DemoBackend.open(args))
    serve(app, args)
    yield f"http://127.0.0.1:{args.port}"
    app.close()


@pytest.fixture
def page(browser, address):
    opened = browser.new_page(viewport={"width": 1280, "height": 1000})
    failures: list[str] = []
    opened.on("pageerror", lambda problem: failures.append(str(problem)))
    opened.set_default_timeout(PATIENCE * 1000)
    yield opened
    opened.close()
    assert not failures


def shown(page) -> str:
    return page.locator(".rollouts").inner_text()


def visit(page, address: str, query: str) -> None:
    page.goto(f"{address}/?tab=rollouts&{query}")
    page.locator(".rollouts").wait_for()


def test_every_program_has_its_turns_and_numbers_and_its_texts_are_only_text(page, address):
    for program, texts in SEEN.items():
        visit(page, address, f"run={program}")
        for text in (HOSTILE, *texts):
            assert text in shown(page), (program, text)


def test_runs_without_samples_show_one_sentence_until_they_have_some(browser, tmp_path):
    from lightrlhf.demo.page import build, serve

    run = experiment(tmp_path / "sft", "sft", TOKENIZER, [])
    (run / FILE).unlink()
    backend = open_backend(str(run), "--port", str(free_port()))
    app = build(backend)
    serve(app, backend.args)
    opened = browser.new_page()
    opened.set_default_timeout(PATIENCE * 1000)
    try:
        opened.goto(f"http://127.0.0.1:{backend.args.port}")
        opened.get_by_role("tab", name="Rollouts").click()
        opened.get_by_text("--log_rollouts").wait_for()
        assert not opened.get_by_label("Sort by").locator("visible=true").count()
        write_rows(run / FILE, rows_of("ppo"))
        opened.get_by_role("tab", name="Runs").click()
        opened.get_by_role("tab", name="Rollouts").click()
        opened.get_by_label("Sort by").wait_for()
    finally:
        opened.close()
        app.close()


def test_a_planted_hack_is_found_by_two_clicks(page, address):
    page.goto(address)
    page.get_by_role("tab", name="Rollouts").click()
    page.get_by_role("link", name="compare with step 1").click()  # the last run of the command line is open
    first = page.locator(".tables table").nth(1).locator("tbody tr").first
    assert re.match(r"um\s+\d%\s+(8|9|10)\d*%", first.inner_text())
    means = page.locator(".tables table").first.inner_text()
    assert "audit" in means and "score" in means
    page.get_by_role("link", name="um", exact=True).click()
    page.get_by_text("audit disagrees").first.wait_for()
    page.get_by_text("share with the text").first.wait_for()
    assert "um ." in shown(page)
    assert page.get_by_label("Search prompts and responses").input_value() == '"um"'
    assert page.get_by_label("All steps").is_checked()


def test_a_link_opens_the_same_view(page, address, browser):
    visit(page, address, "run=hacked")
    page.get_by_label("Search prompts and responses").fill("um")
    page.get_by_text("have “um”").wait_for()
    page.get_by_label("Colour of tokens").click()
    page.get_by_role("option", name="advantage").click()
    page.get_by_text("advantage of a token").wait_for()
    wait_for(lambda: "colour=advantage" in page.url)
    other = browser.new_page()
    other.goto(page.url)
    other.locator(".rollouts .group").first.wait_for()
    assert shown(other) == shown(page)
    assert other.get_by_label("Search prompts and responses").input_value() == "um"
    other.close()


def test_a_prompt_is_followed_through_training_by_the_slider(page, address):
    visit(page, address, "run=hacked&sort=audit")
    prompt = page.locator(".prompt").first.inner_text()
    page.get_by_role("link", name="this prompt through training").first.click()
    page.get_by_text("one prompt at 12 steps").wait_for()
    slider = page.get_by_role("slider", name="Step")
    slider.focus()
    slider.press("ArrowLeft")
    page.locator(".where", has_text="Step 11,").wait_for()
    assert page.locator(".prompt").all_inner_texts() == [prompt]
    wait_for(lambda: "step=11" in page.url and "prompt=" in page.url)
    page.get_by_role("link", name="previous step").click()
    page.locator(".where", has_text="Step 10,").wait_for()
    wait_for(lambda: slider.input_value() == "10")
    page.get_by_label("Compare with step").fill("2")
    page.locator(".sides h3", has_text="step 2").wait_for()


def test_a_slow_view_does_not_overwrite_a_later_one(page, address, monkeypatch):
    visit(page, address, "run=hacked&step=all")
    show = Rollouts.show

    def slow_for_all_steps(self, view):
        time.sleep(1.5 * view.all_steps)
        return show(self, view)

    monkeypatch.setattr(Rollouts, "show", slow_for_all_steps)
    page.get_by_label("Search prompts and responses").fill("um")  # a view of all steps
    page.get_by_label("All steps").uncheck()
    page.locator(".where", has_text=re.compile(r"Step \d+,")).wait_for()
    page.wait_for_timeout(3000)  # in which the slow view would come
    assert page.locator(".where", has_text=re.compile(r"Step \d+,")).count() == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("browser")
def test_the_benchmark_of_the_page_runs():
    command = [sys.executable, "-m", "benchmarks.rollouts_page", "--num_samples", "200", "--repetitions", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert "another step" in done.stdout, done.stderr[-2000:]


def test_a_run_that_is_not_served_is_named(page, address):
    page.goto(f"{address}/?tab=rollouts&run=nothing&step=4")
    page.get_by_text("nothing has logged no samples, or is not served here").wait_for()


def test_answers_to_held_out_prompts_are_a_view_of_their_own(page, address):
    visit(page, address, "")
    assert page.locator(".rollouts").get_attribute("data-query").startswith("tab=rollouts&run=hacked")
    visit(page, address, urlencode({"run": "ppo, held-out prompts", "step": 1}))
    page.get_by_role("link", name="this prompt through training").click()
    page.get_by_text("one prompt at 3 steps").wait_for()
    assert page.locator(".prompt").all_inner_texts() == ["held out"]


def test_new_samples_are_shown_by_reload_and_a_bad_line_is_named(page, address, runs):
    visit(page, address, "run=ppo")
    with (runs["ppo"] / "rollouts.jsonl").open("a") as file:
        file.write("what?\n")
    page.get_by_role("button", name="Reload").click()
    page.get_by_text("rollouts.jsonl line 5 is not JSON; left out").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_coloured_tokens_are_readable_and_inputs_have_names(scheme, page, address):
    visit(page, address, f"run=hacked&step=6&__theme={scheme}")
    assert not [found for found in findings(page) if found.startswith(("color-contrast", "label", "aria", "link"))]
    least = page.evaluate(
        """() => {
          const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
            .map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0)
          const numbers = text => text.match(/[\\d.]+/g).map(Number)
          const ratios = [...document.querySelectorAll(".rollouts .token")].map(token => {
            const ground = numbers(getComputedStyle(token.closest(".group") ?? document.body).backgroundColor)
            const [r, g, b, alpha = 1] = numbers(getComputedStyle(token).backgroundColor)
            const mixed = [r, g, b].map((c, i) => alpha * c + (1 - alpha) * ground[i])
            const [low, high] = [mixed, numbers(getComputedStyle(token).color)].map(light).sort((x, y) => x - y)
            return (high + .05) / (low + .05)
          })
          return [Math.min(...ratios), ratios.length]
        }"""
    )
    assert least[0] >= 4.5 and least[1] > 20
