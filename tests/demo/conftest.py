"""A trained policy for the demo, its backend, and the demo served to a headless browser."""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import CPU, ROOT, environment, last_checkpoint, reseal
from helpers.demo_page import free_port, open_backend, save_endless
from helpers.forks import started_program
from helpers.processes import PATIENCE, kept

from lightrlhf.demo.session import DemoBackend


@pytest.fixture(scope="session")
def ppo_dir(cafe_data, sft_dir, rm_dir, logs):
    from lightrlhf.ppo import main

    flags = ["--max_steps", "1", "--rollout_size", "4", "--rollout_mini_batch_size", "4", "--mini_batch_size", "4"]
    flags += ["--micro_batch_size", "4", "--max_new_tokens", "16", "--temperature", "0.9", "--ngram", "3"]
    flags += ["--eval_interval", "1", "--eval_iters", "1", "--actor_learning_rate", "1e-2", "--lr_warmup_steps", "0"]
    models = ["--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir]
    return main(["--data_dir", str(cafe_data), "--log_dir", str(logs), *models, *CPU, *flags])


@pytest.fixture
def backend(sft_dir, ppo_dir, tmp_path) -> DemoBackend:
    return open_backend(sft_dir, ppo_dir, "--votes_file", str(tmp_path / "votes.jsonl"))


# ------------------------------------------------------------------------------------------------- a server, a browser
@pytest.fixture(scope="session")
def world(tmp_path_factory, sft_dir, ppo_dir, tokenizer):
    """Folders of a server: two experiments, one with a damaged checkpoint, and a model that hardly ever stops."""
    folder = tmp_path_factory.mktemp("served")
    damaged = Path(shutil.copytree(sft_dir, folder / "damaged"))
    (last_checkpoint(damaged) / "model.safetensors").write_bytes(b"nothing")
    args = json.loads((damaged / "args.json").read_text()) | {"experiment_name": "damaged"}
    (damaged / "args.json").write_text(json.dumps(args))
    reseal(damaged)
    save_endless(folder / "endless", tokenizer)
    flags = ["--experiment_dir", damaged, folder / "endless", sft_dir, ppo_dir, "--votes_file", folder / "votes.jsonl"]
    flags += ["--max_new_tokens", 40, "--overlap", 1, "--accelerator", "cpu"]
    return {"votes": folder / "votes.jsonl", "flags": [str(flag) for flag in flags], "servers": []}


@pytest.fixture(scope="session")
def server(world):
    """Function that starts the program unless it runs, and returns its address; the program is killed at the end."""

    def running() -> str:
        if not world["servers"] or world["servers"][-1].poll() is not None:
            world["port"] = free_port()
            flags = ["--port", world["port"], *world["flags"]]
            options = {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "text": True}
            process = opened.enter_context(started_program("lightrlhf.demo", *flags, **options))
            kept.add(process.pid)
            world["servers"].append(process)
            assert f"http://127.0.0.1:{world['port']}" in process.stdout.readline()
        return f"http://127.0.0.1:{world['port']}"

    with contextlib.ExitStack() as opened:
        yield running


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[browser]'")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser is installed; on Debian: apt-get install chromium")
    quiet = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags = [*quiet.split(), "--disable-component-update", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        program = driver.chromium.launch(executable_path=program, args=flags)
        yield program
        program.close()


@pytest.fixture
def page(browser, server):
    """The demo in a new browser tab; it may request nothing from other hosts, and no script may fail."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    requested, failures = [], []
    opened.on("request", lambda request: requested.append(request.url))
    opened.on("pageerror", lambda problem: failures.append(str(problem)))
    opened.set_default_timeout(PATIENCE * 1000)
    opened.goto(server())
    opened.get_by_role("tab", name="Chat").wait_for()
    yield opened
    opened.close()
    assert not [url for url in requested if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
    assert not failures
