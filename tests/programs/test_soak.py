"""A soak: 10,000 steps of a tiny PPO with 100 kills at random events, bitwise as the run that was left alone.

The run left alone tells its memory, file descriptors, threads and children every hundred steps. Takes about as long as
`SOAK_STEPS` (an environment variable, 10,000 by default) take twice.
"""

import json
import os
import random
import time
from pathlib import Path

import psutil
import torch
from helpers import CPU, kill_seed, last_checkpoint, metrics, save_model, weights
from helpers.killed import forked, with_events
from helpers.programs import main_of

from lightrlhf import ppo
from lightrlhf.cli.parser import parse

STEPS = int(os.environ.get("SOAK_STEPS", 10_000))
KILLS = max(STEPS // 100, 1)
WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def flags_of(data: Path, model: Path, log_dir: Path, steps: int) -> list[str]:
    """PPO with every part in use, each as small as it gets."""
    flags = ["--data_dir", data, "--model_name", model, "--log_dir", log_dir, *CPU, "--logger", "csv"]
    flags += ["--reward_function", "helpers.rewards:length", "--adaptive_kl_coeff", "True", "--rollout_size", 2]
    flags += ["--mini_batch_size", 2, "--micro_batch_size", 2, "--max_new_tokens", 2, "--max_steps", steps]
    flags += ["--log_interval", 100, "--eval_interval", 0, "--save_interval", 50, "--keep_last", 2]
    return [str(flag) for flag in [*flags, "--actor_learning_rate", "1e-4", "--critic_learning_rate", "1e-4"]]


def left_alone(flags: list[str], told: Path) -> None:
    """Train and write what the process holds, every hundred steps."""
    process, rows = psutil.Process(), []

    def look(step: int, _: dict) -> None:
        held = process.memory_info()
        rows.append([step, held.rss, process.num_fds(), process.num_threads(), len(process.children())])

    ppo.train(parse(ppo.PPOArgs, flags), on_step=look)
    told.write_text(json.dumps(rows))


def test_ten_thousand_steps_with_a_hundred_kills(case, cafe_data, tokenizer, tmp_path):
    rng, model = random.Random(kill_seed()), save_model("llama", tmp_path / "model", tokenizer, **WIDTH)
    output = tmp_path / "output"

    def train(name: str, steps: int) -> list[str]:
        return flags_of(cafe_data, model, tmp_path / name, steps)

    ppo.main(train("warm", 1))
    events = tmp_path / "events"
    assert forked(with_events(lambda: ppo.main(train("one", 200)), tmp_path, 0, events), output) == 0
    per_step = len(json.loads(events.read_text())) / 200

    started = time.monotonic()
    assert forked(lambda: left_alone(train("whole", STEPS), tmp_path / "told"), output) == 0, output.read_text()[-2000:]
    alone = time.monotonic() - started
    rows = json.loads((tmp_path / "told").read_text())
    settled = next((row for row in rows if row[0] >= 1000), rows[-1])
    growth = rows[-1][1] / settled[1] - 1
    case("memory growth", growth < 0.01, f"{growth:+.3%} of {settled[1] >> 20} MiB after step {settled[0]}")
    for column, name in ((2, "file descriptors"), (3, "threads"), (4, "child processes")):
        case(name, rows[-1][column] <= settled[column], f"{settled[column]} then, {rows[-1][column]} at the end")

    started, kills, before = time.monotonic(), 0, held_here()
    while kills < KILLS:
        at = rng.randrange(1, max(int(2 * per_step * STEPS / KILLS), 2))
        (run, *_) = [*(tmp_path / "killed").rglob("args.json"), None]
        resumable = run and any(run.parent.glob("checkpoint-*"))
        again = ["--resume_from", str(run.parent)] if resumable else train(f"killed/{kills}", STEPS)
        status = forked(with_events(lambda again=again: main_of("ppo")(again), tmp_path, at), output)
        if status == 0:
            break
        assert status == -9, f"kill {kills} at event {at}: status {status}\n{output.read_text()[-2000:]}"
        kills += 1
        step = last_checkpoint(run.parent).name if resumable else "the start"
        case(f"kill {kills}", True, f"at event {at} after {step}")
    (run,) = [path.parent for path in (tmp_path / "killed").rglob("args.json") if any(path.parent.glob("checkpoint-*"))]
    status = forked(lambda: main_of("ppo")(["--resume_from", str(run)]), output)
    killed = time.monotonic() - started
    whole = next((tmp_path / "whole").rglob("args.json")).parent
    told = f"{STEPS} steps in {alone:.0f} s alone, {killed:.0f} s with {kills} kills"
    case("ends", status == 0 and last_checkpoint(run).name == last_checkpoint(whole).name, told)
    case("weights", weights(last_checkpoint(run)) == weights(last_checkpoint(whole)))
    case("metrics", metrics(run) == metrics(whole), f"{len(metrics(run))} rows")
    one, other = (torch.load(last_checkpoint(folder) / "resume.pt", weights_only=True) for folder in (run, whole))
    case("optimisers", str(one["optimizers"]) == str(other["optimizers"]) and one["extra"] == other["extra"])
    case("random states", torch.equal(one["rng"], other["rng"]) and one["python_rng"] == other["python_rng"])
    left = [path.name for path in run.iterdir() if path.name.endswith(".partial")]
    case("nothing left in the folder", not left, str(left))
    for name, one, other in zip(("file descriptors", "child processes"), before, held_here(), strict=True):
        case(f"no {name} left", other <= one, f"{one} before the kills, {other} after")


def held_here() -> tuple[int, int]:
    """File descriptors and child processes of this process."""
    return psutil.Process().num_fds(), len(psutil.Process().children())
