"""The main job in five minutes on two cores: the café, from raw data to a policy you can chat with.

    prepare data -> SFT -> reward model -> PPO -> evaluation

Each stage is the program a user would call; its command is printed before it runs. At the end: a table, answers before
and after, a picture, and what to type next. Exits with 1 when PPO does not beat SFT by the gold judge, which no stage
of the training has seen.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from datasets_prep.cafe.world import good_plan, orders
from lightrlhf import evaluate, plot, ppo, rm, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse

PROGRAMS = {"prepare": prepare_data, "sft": sft, "rm": rm, "ppo": ppo, "evaluate": evaluate}
PARTS = ("correct", "polite", "short")


@dataclass(frozen=True, kw_only=True)
class QuickstartArgs:
    """Train and evaluate on the café, from raw data to a policy."""

    output_dir: str = "quickstart"
    """Folder for data, logs and the picture."""
    seed: int = 1
    """Seed of every stage."""
    smoke: bool = False
    """Run every stage for a moment only, to see that all works; nothing is claimed of the result."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(QuickstartArgs, argv)
    started = time.perf_counter()
    data_dir, seed = f"{args.output_dir}/data/cafe", ["--seed", str(args.seed)]
    common = ["--data_dir", data_dir, "--log_dir", f"{args.output_dir}/logs", *seed]
    base = str(BASE_DIR)

    sizes = (
        ["--num_finetune=64", "--num_preference=64", "--num_prompts=64", "--num_held_out=32", "--num_held_out_pairs=32"]
        if args.smoke
        else []
    )
    call("prepare", "--destination_dir", data_dir, "--tokenizer_name", base, *seed, *sizes)
    sft_dir = call("sft", *common, "--model_name", base, *SFT, *(["--max_steps=2"] if args.smoke else []))
    rm_dir = call("rm", *common, "--sft_experiment_dir", sft_dir, *RM, *(["--max_steps=2"] if args.smoke else []))
    models = ["--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir]
    ppo_dir = call("ppo", *common, *models, *PPO, *(["--max_steps=1"] if args.smoke else []))

    pairs = call("evaluate", "--experiment_dir", rm_dir)[0]
    experiments = ["--experiment_dir", sft_dir, ppo_dir, "--use_pretrained", "True"]
    rows = call("evaluate", *experiments, "--rm_experiment_dir", rm_dir, "--max_new_tokens", "96")
    picture = draw(Path(args.output_dir) / "quickstart.png", sft_dir, rm_dir, ppo_dir, rows)
    show_samples(sft_dir, ppo_dir)
    beaten = check(rows, pairs, good_length(data_dir))
    minutes = (time.perf_counter() - started) / 60
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{minutes:.1f} minutes, {memory:.1f} GiB of memory at most. Curves: {picture}")
    print(NEXT.format(activate=activation(), ppo_dir=ppo_dir, sft_dir=sft_dir, rm_dir=rm_dir))
    if not beaten and not args.smoke:
        print("PPO did not beat SFT by the gold judge", file=sys.stderr)
        sys.exit(1)


SFT = [
    *("--epochs=1", "--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=5e-4", "--lr_warmup_steps=5"),
    *("--use_targets=True", "--eval_interval=30", "--log_interval=2"),
]
RM = [
    *("--epochs=1", "--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=1e-3", "--lr_warmup_steps=20"),
    *("--eval_interval=60", "--eval_iters=12", "--log_interval=5", "--loss_type=last_token"),
]
PPO = [
    *("--epochs=1", "--rollout_size=128", "--rollout_mini_batch_size=128", "--mini_batch_size=64"),
    *("--micro_batch_size=64", "--ppo_epochs=1", "--max_new_tokens=96", "--actor_learning_rate=3e-4"),
    *("--critic_learning_rate=1e-3", "--lr_warmup_steps=5", "--lr_scheduler_type=cosine", "--init_kl_coeff=0.05"),
    *("--missing_eos_penalty=1", "--eval_interval=10", "--log_interval=1"),
]
NEXT = """
Next:
{activate}  make demo                                             talk to these models on a page, compare them blind
  python -m lightrlhf.plot --experiment_dir {ppo_dir}
  python -m lightrlhf.evaluate --experiment_dir {sft_dir} {ppo_dir} --rm_experiment_dir {rm_dir} --temperature 0.7
  python -m datasets_prep.cafe.prepare_data --help      the data of this task, in other sizes and with other noise
  howto/add_a_dataset.md                                your own data
"""


def activation() -> str:
    """The line that activates this virtual environment; empty where it is active or there is none."""
    found = shutil.which("python")
    active = found is not None and os.path.samefile(Path(found).parent, Path(sys.prefix, "bin"))
    if active or sys.prefix == sys.base_prefix:
        return ""
    script = os.path.relpath(Path(sys.prefix, "bin", "activate"))
    return f"  {'source ' + script:53} once in each terminal: what begins with python needs it\n"


def call(name: str, *argv: str) -> Any:
    """Run a program as from the command line, and print that command."""
    module = PROGRAMS[name].__name__
    print(f"\n$ python -m {module} {' '.join(argv)}", flush=True)
    started = time.perf_counter()
    result = PROGRAMS[name].main(list(argv))
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    return result


def show_samples(sft_dir: str, ppo_dir: str, count: int = 3) -> None:
    """Answers to the same requests before and after PPO, picked with a fixed seed."""
    before, after = (
        [json.loads(line) for line in Path(folder, "eval", "test.jsonl").open(encoding="utf-8")]
        for folder in (sft_dir, ppo_dir)
    )
    for i in random.Random(0).sample(range(len(before)), count):
        print(f"\n{before[i]['prompt'].splitlines()[0]}")
        for name, record in (("SFT", before[i]), ("PPO", after[i])):
            print(f"  {name} (gold {record['gold']['score']:.2f}):{record['response']}")


def good_length(data_dir: str) -> float:
    """Mean length in tokens, end token included, of good answers to the test orders' kind of request."""
    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(data_dir)
    rng = random.Random(0)
    source = orders(rng, "test")
    return sum(len(tokenizer(" " + good_plan(rng, next(source)).text())["input_ids"]) + 1 for _ in range(300)) / 300


def check(rows: list[dict[str, Any]], pairs: dict[str, Any], good: float) -> bool:
    """Print what was asked of the run beside what was measured; returns whether PPO beat SFT."""
    _, before, after = rows
    rose = all(after[part] > before[part] or after[part] >= 0.95 for part in PARTS)
    gain = after["gold"] - before["gold"]
    worst = min(pairs["by_group"], key=pairs["by_group"].get)
    lines = [
        ("reward model accuracy >= 0.90", pairs["accuracy"] >= 0.9, f"{pairs['accuracy']:.3f}"),
        ("each flaw seen >= 0.85", pairs["by_group"][worst] >= 0.85, f"{worst} {pairs['by_group'][worst]:.3f}"),
        ("gold of SFT in .55 to .70, correct >= .4", 0.55 <= before["gold"] <= 0.7 and before["correct"] >= 0.4,
         f"{before['gold']:.3f}, {before['correct']:.3f}"),
        ("gold, PPO over SFT >= +0.20", gain >= 0.2, f"{gain:+.3f}"),
        ("each part up or >= .95", rose, ", ".join(f"{p} {before[p]:.2f} -> {after[p]:.2f}" for p in PARTS)),
        ("gold win rate >= 0.70", after["win_rate"] >= 0.7, "{:.3f} [{:.3f}, {:.3f}]".format(
            after["win_rate"], *after["win_rate_interval"])),
        ("truncated < 5%", after["truncated_ratio"] < 0.05, f"{after['truncated_ratio']:.3f}"),
        ("length within 30% of good answers", abs(after["mean_length"] / good - 1) <= 0.3,
         f"{after['mean_length']:.1f} against {good:.1f}"),
    ]  # fmt: skip
    print()
    for asked, reached, measured in lines:
        print(f"  {'reached' if reached else 'MISSED '}  {asked:42} {measured}")
    return after["gold"] > before["gold"] and after["win_rate_interval"][0] > 0.5


def draw(output: Path, sft_dir: str, rm_dir: str, ppo_dir: str, rows: list[dict[str, Any]]) -> Path:
    """The run in one picture: curves of the three stages, and the gold score of each model by part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [
        (sft_dir, "SFT: loss", ("train/loss", "val/loss")),
        (rm_dir, "reward model: accuracy", ("rewards/accuracies", "val/rewards/accuracies")),
        (ppo_dir, "PPO: score of the reward model", ("objective/score", "val/score")),
        (ppo_dir, "PPO: KL to the SFT policy, nats a response", ("objective/kl", "val/kl")),
        (ppo_dir, "PPO: mean length, tokens", ("completions/mean_length", "val/mean_length")),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4))
    for axis, (folder, title, names) in zip(axes.flat, panels):
        logged = plot.read_metrics(folder)
        for name, style in zip(names, ("-", "o-")):
            points = [(row["step"], row[name]) for row in logged if name in row]
            axis.plot(*zip(*points), style, ms=3, lw=1.4, label="held out" if name.startswith("val") else "training")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    axis = axes.flat[5]
    for offset, row, label in zip((-0.27, 0, 0.27), rows, ("base", "SFT", "PPO")):
        axis.bar([i + offset for i in range(4)], [row[part] for part in ("gold", *PARTS)], width=0.26, label=label)
    axis.set_xticks(range(4), ("gold", *PARTS))
    axis.set_ylim(0, 1.2)
    axis.set_title("gold judge, held-out orders", fontsize=10)
    axis.legend(fontsize=8, ncol=3, loc="upper center")
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return output


if __name__ == "__main__":
    main()
