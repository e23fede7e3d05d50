"""Pictures of the demo in a headless browser, each tab at two sizes, to look at and for the documentation.

    python tests/helpers/demo_pictures.py --quickstart_dir quickstart --output_dir pictures
    python tests/helpers/demo_pictures.py --agent_dir experiment/dir --output_dir pictures

Serves the models of the quickstart, talks to them, and writes a PNG file of 256 colours for each picture; or serves a
run on episodes, for a picture of one.
"""

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).parents[2]
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--quickstart_dir", type=Path, help="folder that `make quickstart` has filled")
    of.add_argument("--agent_dir", type=Path, help="experiment dir of grpo on episodes, with --log_rollouts")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    names = ("rlhf-supervised-finetuning", "rlhf-ppo") if args.quickstart_dir else ()
    runs = [sorted((args.quickstart_dir.resolve() / "logs" / name).glob("*/*/*"))[-1] for name in names]
    with served(runs or [args.agent_dir.resolve()]) as address, driven() as browser:
        (take_all if runs else take_episode)(browser, address, args.output_dir)


@contextlib.contextmanager
def served(runs: Sequence[Path]) -> Iterator[str]:
    """Serve the models of runs; the address of the demo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--experiment_dir", *runs, "--votes_file", "votes.jsonl", "--max_new_tokens", 96]
        flags += ["--port", port, "--accelerator", "cpu", "--overlap", 1]
        command = [sys.executable, "-m", "lightrlhf.demo", *map(str, flags)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if "demo running" not in line:
                    raise SystemExit("the demo did not start")
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


@contextlib.contextmanager
def driven() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS.split())
        yield browser
        browser.close()


def take_all(browser, address: str, folder: Path) -> None:
    """Write every picture of the quickstart's models."""
    for name, size, scheme in (("wide", WIDE, "light"), ("dark", WIDE, "dark"), ("phone", PHONE, "light")):
        page = browser.new_page(viewport=size, color_scheme=scheme, has_touch=name == "phone")
        page.set_default_timeout(SECONDS * 1000)
        page.goto(address)
        page.get_by_role("tab", name="Chat").wait_for()
        page.wait_for_timeout(1000)
        take(page, folder / f"chat_empty_{name}.png")
        chat(page)
        take(page, folder / f"chat_{name}.png")
        for tab in page.get_by_role("tab").all_inner_texts()[1:]:
            page.get_by_role("tab", name=tab, exact=True).click()
            page.wait_for_timeout(1500)
            {"Side by side": side_by_side, "Compare blind": compare, "Runs": runs}.get(tab, rollouts)(page)
            take(page, folder / f"{tab.lower().replace(' ', '_')}_{name}.png")
        view = {"tab": "rollouts", "run": "rlhf-ppo, held-out prompts", "against": 10}
        page.goto(f"{address}/?{urlencode(view)}")
        page.locator(".sides").first.wait_for()
        take(page, folder / f"two_steps_{name}.png")
        page.close()


def take_episode(browser, address: str, folder: Path) -> None:
    """Write the picture of an agent's episodes, the best rewarded first."""
    page = browser.new_page(viewport=WIDE, color_scheme="light")
    page.set_default_timeout(SECONDS * 1000)
    page.goto(f"{address}/?{urlencode({'tab': 'rollouts'})}")
    rollouts(page)
    take(page, folder / "agent.png")


def chat(page) -> None:
    """Two questions, the first answer by its tokens."""
    box = page.get_by_placeholder("Type a message").locator("visible=true")
    for number, text in enumerate(("Could I get a large oat latte and two muffins, please?", "And a scone to go.")):
        box.fill(text)
        box.press("Enter")
        page.locator("#dialogue .scores").nth(number).wait_for()
    page.get_by_role("button", name="Tokens").first.click()
    page.locator(".token").first.wait_for()


def side_by_side(page) -> None:
    box = page.get_by_placeholder("Type a message").locator("visible=true")
    box.fill("Hello! A small tea with milk and three cookies, please.")
    box.press("Enter")
    page.locator("#answers .scores").nth(2).wait_for()


def compare(page) -> None:
    """Three votes, and the fourth pair."""
    page.get_by_label("Your name").fill("ada")
    page.get_by_role("button", name="Next pair").click()
    for name in ("A is better", "B is better", "Tie"):
        page.get_by_role("button", name=name, disabled=False).click()
        page.get_by_text(f"Voted: {name}").wait_for()
        page.wait_for_timeout(1500)
    page.get_by_role("button", name="A is better", disabled=False).wait_for()


def runs(page) -> None:
    """The samples beside a point of the curve."""
    chart = page.locator("svg[role=img]").locator("visible=true").first
    chart.wait_for()
    box = chart.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.locator(".beside .card").first.wait_for()


def rollouts(page) -> None:
    page.locator(".rollouts .group").first.wait_for()


def take(page, path: Path) -> None:
    """A picture of what the window shows."""
    from PIL import Image

    page.mouse.move(0, 0)
    page.wait_for_timeout(400)
    page.screenshot(path=path, animations="disabled")
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
