"""The demo as its tests use it: a backend of tiny models, and a page of it in a browser."""

import socket
import time
from pathlib import Path

import torch

from helpers import tiny_model
from helpers.processes import PATIENCE
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs
from lightrlhf.demo.dialogue import end_stream, prompt_of, user_turn
from lightrlhf.demo.session import DemoBackend

SFT, PPO = "rlhf-supervised-finetuning step 2", "rlhf-ppo step 1"
SLIDERS = (16, True, 1.0, 0, 1.0)


def open_backend(*words: str) -> DemoBackend:
    flags = ["--max_new_tokens", "16", "--accelerator", "cpu", "--experiment_dir"]
    return DemoBackend.open(parse(DemoArgs, [*flags, *words]))


def say(
    backend: DemoBackend, text: str, turns: list = (), label: str = PPO, seed: int = 5, sliders: tuple = SLIDERS
) -> list:
    turns = [*turns, user_turn(text, prompt_of(list(turns), "dialogue", text, "", "", ""))]
    *_, turns = backend.reply(turns, label, "", seed, *sliders)
    turns = end_stream(turns)
    return turns


def save_endless(folder: Path, tokenizer) -> None:
    """A model with thousands of positions that hardly ever samples the end token.

    So deep that 1,000 tokens take half a minute: a busy browser has to press Stop before they are all there.
    """
    changes = {
        "num_hidden_layers": 240,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = tiny_model("llama", pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **changes)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# ---------------------------------------------------------------------- a browser
def choose(page, label: str, value: str) -> None:
    """Choose an entry of a dropdown."""
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=value, exact=True).click()


def press(page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def message_of(page):
    """The message box of the visible tab."""
    return page.get_by_placeholder("Type a message").locator("visible=true")


def answers(page) -> list[str]:
    """What the answers of the visible tab say, without their scores."""
    return page.locator(".bot.message .text").all_inner_texts()


def scores(page) -> list[str]:
    """The scores below each answer of the visible tab."""
    return page.locator(".scores").locator("visible=true").all_inner_texts()


def stops_before(page, element) -> int:
    """How often the Tab key is pressed, from the page's start, until an element has the focus."""
    page.locator(".skip").focus()  # the first stop
    for pressed in range(2, 30):
        page.keyboard.press("Tab")
        if element.evaluate("box => box === document.activeElement"):
            return pressed
    return 30


def findings(page) -> list[str]:
    """What axe finds on the page as it is shown."""
    from axe_playwright_python.sync_playwright import Axe

    page.wait_for_timeout(400)  # fades would be read as pale text
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in violations]


def cut_off(page) -> list[str]:
    """The visible buttons and inputs that stand beyond the window's left or right edge."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, table, article")]
        .filter(one => one.offsetParent && !one.closest(".skip, .tools"))
        .filter(one => one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1)
        .map(one => one.outerHTML.slice(0, 120))"""
    )
    return found


def wait_for(condition) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.05)
