"""Seconds until the demo's tab Rollouts shows what was asked, in headless Chromium, on a run of many samples.

    python -m benchmarks.rollouts_page
    python -m benchmarks.rollouts_page --num_samples 1000000

Writes a run of groups of 8 with responses of `--length` tokens, serves it, waits until the server has read the file,
and measures, from the action to the samples on the screen: opening the tab's address in a browser whose cache is empty
and in one that has shown the page before (beside it the tab Chat, which has nothing to read), text searches over all
steps (a word of nearly every sample, five words of a few samples, a text of none) and another step. Prints the median
with the smallest and largest, the time in which a process reads the file, and the server's memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import Args, at_least
from lightrlhf.cli.parser import parse
from lightrlhf.storage.results import print_table

GROUP, STEP = 8, 64  # samples of a prompt and of a step
WORDS = (
    "a the tea coffee scone muffin oat milk sugar large small two one please thanks with without and sir madam".split()
)
WAIT = 60_000  # milliseconds until the browser gives up


@dataclass(frozen=True, kw_only=True)
class PageArgs(Args):
    """Measure the demo's tab Rollouts."""

    num_samples: int = at_least(1, 100_000)
    """Samples of the run."""
    length: int = at_least(1, 48)
    """Tokens of a response; a prompt has two thirds of that."""
    repetitions: int = at_least(1, 7)
    """Measurements of each action."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(PageArgs, argv)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise UsageError("no browser is installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        size = write_run(folder, args.num_samples, args.length)
        seconds, port = read_seconds(folder), free_port()
        flags = ["--experiment_dir", str(folder), "--accelerator", "cpu", "--port", str(port)]
        command = [sys.executable, "-m", "lightrlhf.demo", *flags]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None and any("running" in line for line in server.stdout)
            rows = measure(f"http://127.0.0.1:{port}/", program, args.repetitions)
            memory = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        finally:
            server.terminate()
            server.wait()
    title = f"{args.num_samples:,} samples, {size / 1e6:,.0f} MB; seconds, median of {args.repetitions}"
    print_table(title, ("action", "median", "smallest", "largest"), rows, width=100)
    print(f"a process reads the file in {seconds:.1f} s; the server has {memory / 1e6:,.0f} MB resident")


def write_run(folder: Path, num_samples: int, length: int) -> int:
    """Write a run of a Llama's size of numbers; returns the bytes of its samples."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lightrlhf.training.rollout_log import FILE, rollout_row

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", *WORDS])}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<eos>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "data" / "tokenizer")
    args = {"program": "grpo", "experiment_name": "many", "data_dir": str(folder / "data")}
    (folder / "args.json").write_text(json.dumps(args))
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return rng.choices(range(1, len(WORDS) + 1), k=count)

    with (folder / FILE).open("w") as file:
        for i in range(num_samples):
            step, group = i // STEP + 1, i % STEP // GROUP
            if i % GROUP == 0:
                prompt = ids(length * 2 // 3)
            numbers = {name: [rng.gauss(0, 1) for _ in range(length)] for name in ("log_ratio", "advantages", "values")}
            scores: dict[str, Any] = {"score": rng.random(), "audit": rng.random(), "rewards": {"one": rng.random()}}
            row = rollout_row(tokenizer, prompt, ids(length), group=group, truncated=False, **numbers, **scores)
            file.write(json.dumps({"step": step, "version": step - 1, **row}) + "\n")
    return (folder / FILE).stat().st_size


def read_seconds(folder: Path) -> float:
    """Seconds in which a process reads the whole file."""
    from lightrlhf.demo.rollout_file import RolloutFile
    from lightrlhf.training.rollout_log import FILE

    start = time.perf_counter()
    RolloutFile(folder / FILE).refresh()
    return time.perf_counter() - start


def measure(address: str, program: str, repetitions: int) -> list[tuple[str, str, str, str]]:
    """Rows of the table."""
    from playwright.sync_api import Page, sync_playwright

    rows = []

    def timed(name: str, action: Callable[[int], None]) -> None:
        seconds = []
        for number in range(repetitions):
            start = time.perf_counter()
            action(number)
            seconds.append(time.perf_counter() - start)
        figures = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append((name, *(f"{figure:.2f}" for figure in figures)))

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])

        def opened(context: Any, query: str = "?tab=rollouts", shows: str = ".rollouts .group") -> Page:
            page: Page = context.new_page()
            page.set_default_timeout(WAIT)
            page.goto(address + query, wait_until="commit")
            page.locator(shows).first.wait_for()
            return page

        kept = browser.new_context()
        page = opened(kept)
        while page.get_by_text("is read so far").count():
            page.get_by_role("button", name="Reload").click()
            page.wait_for_timeout(500)
        timed("open, empty cache", lambda _: opened(browser.new_context()).close())
        timed("open", lambda _: opened(kept).close())
        timed("open the tab Chat, for comparison", lambda _: opened(kept, "", "textarea").close())

        page = opened(kept)
        page.get_by_label("All steps").check()
        page.get_by_text("steps", exact=False).first.wait_for()

        def search(text: str) -> None:
            page.get_by_label("Search prompts and responses").fill(text)
            page.locator(".where", has_text=f"“{text}”").wait_for()

        few = " ".join(WORDS[:5])
        timed("search, a word of most", lambda number: search(WORDS[number % len(WORDS)]))
        timed("search, a text of few", lambda number: search(few if number % 2 else few[:-1]))
        timed("search, a text of none", lambda number: search(f"zebra {number}"))
        page.get_by_label("Search prompts and responses").fill("")
        page.locator(".where", has_not_text="zebra").first.wait_for()
        page.get_by_label("All steps").uncheck()
        page.locator(".where", has_text=re.compile(r"Step \d+,")).wait_for()

        def step(number: int) -> None:
            page.get_by_role("spinbutton", name="Step").first.fill(str(number + 1))
            page.get_by_role("spinbutton", name="Step").first.press("Enter")
            page.locator(".where", has_text=f"Step {number + 1},").wait_for()

        timed("another step", step)
        browser.close()
    return rows


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
