"""Train on the bundled café task, from raw data to a policy you can chat with, in about three minutes on two CPU cores.

    prepare data -> SFT -> reward model -> PPO -> evaluation

Each stage is the program a user would call; its command is printed before it runs. The last lines are responses before
and after PPO, a table of results with their meaning, a figure, and the next commands. Exits with status 1 when
PPO does not beat SFT by the gold judge, which no training stage uses.

Left out: flags of the stages, which their own programs have, and other tasks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.judge import gold
from datasets_prep.cafe.pretrain_base import BASE_DIR
from lightrlhf import evaluate, ppo, rm, sft
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, check_args, flag, random_seed
from lightrlhf.cli.latest import LATEST
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.data.tokens import decode
from lightrlhf.models.loading import find_device
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.results import label, panels, save_figure
from lightrlhf.storage.run_dir import read_metrics
from lightrlhf.storage.writing import make_folder, writing
from lightrlhf.training.memory import peak_memory

# flags of the stages, also of the experiments that start from these models
SFT: dict[str, Any] = {
    "epochs": 1,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 5e-4,
    "lr_warmup_steps": 5,
    "use_targets": True,
    "eval_interval": 30,
    "log_interval": 2,
}
RM: dict[str, Any] = {
    "epochs": 1,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 20,
    "eval_interval": 60,
    "eval_iters": 12,
    "log_interval": 5,
    "loss_type": "last_token",
}
PPO: dict[str, Any] = {
    "epochs": 1,
    "rollout_size": 128,
    "rollout_mini_batch_size": 128,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "ppo_epochs": 1,
    "max_new_tokens": 96,
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "lr_warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "init_kl_coeff": 0.05,
    "missing_eos_penalty": 1,
    "eval_interval": 10,
    "log_interval": 1,
}
FEW_ROWS: dict[str, Any] = {
    "num_finetune": 64,
    "num_preference": 64,
    "num_prompts": 64,
    "num_held_out": 32,
    "num_held_out_pairs": 32,
}
PARTS = ("correct", "polite", "short")  # of the gold score


@dataclass(frozen=True, kw_only=True)
class QuickstartArgs(Args):
    """Train and evaluate on the café, from raw data to a policy."""

    output_dir: str = "quickstart"
    """Folder for data, logs and the figure."""
    seed: int = random_seed(1)
    """Seed of every stage."""
    accelerator: str | None = flag(None, check=find_device)
    """Device of every stage: cpu, cuda or mps. Default: each program's choice."""
    smoke: bool = False
    """Run every stage only briefly, as a smoke test; the results are meaningless."""


def run(args: QuickstartArgs) -> None:
    """Run all stages and print what was found. Raises: RunFailure when PPO did not beat SFT."""
    check_args(args, QuickstartArgs)
    check_destination(Path(args.output_dir), "--output_dir")
    with writing(f"--output_dir {args.output_dir}", error=UsageError):
        make_folder(Path(args.output_dir))
    started = time.perf_counter()
    data_dir, base = f"{args.output_dir}/data/cafe", str(BASE_DIR)
    where: dict[str, Any] = {"accelerator": args.accelerator}
    common = where | {"data_dir": data_dir, "log_dir": f"{args.output_dir}/logs", "seed": args.seed}
    few_rows = FEW_ROWS if args.smoke else {}
    few_steps = {"max_steps": 2} if args.smoke else {}

    call(prepare_data, destination_dir=data_dir, tokenizer_name=base, seed=args.seed, **few_rows)
    sft_dir = call(sft, **common, model_name=base, **SFT, **few_steps)
    rm_dir = call(rm, **common, sft_experiment_dir=sft_dir, **RM, **few_steps)
    ppo_dir = call(ppo, **common, sft_experiment_dir=sft_dir, rm_experiment_dir=rm_dir, **PPO, **few_steps)

    pairs = call(evaluate, **where, model_name=rm_dir)[0]
    models = where | {"model_name": [sft_dir, ppo_dir], "use_pretrained": True, "rm_experiment_dir": rm_dir}
    rows = call(evaluate, **models, max_new_tokens=96)
    picture = Path(args.output_dir) / "quickstart.png"
    draw(picture, sft_dir, rm_dir, ppo_dir, rows)
    show_samples(sft_dir, ppo_dir)
    explain(rows, pairs, demonstrations(data_dir))
    minutes = (time.perf_counter() - started) / 60
    memory = f", peak memory {peak:.1f} GiB" if (peak := peak_memory(torch.device("cpu"))) else ""
    print(f"\n{minutes:.1f} minutes{memory}. Curves: {picture}")
    print(NEXT.format(activate=activation(), ppo_dir=latest(ppo_dir), sft_dir=latest(sft_dir), rm_dir=latest(rm_dir)))
    if not args.smoke and not beats(rows[2], rows[1]):
        failed = "its gold score is not higher, or the interval of its win rate does not lie above one half"
        raise RunFailure(f"PPO did not beat SFT by the gold judge: {failed}")


NEXT = """
Next:
{activate}  python -m lightrlhf.demo --model_name {sft_dir} {ppo_dir} --max_new_tokens 96
  python -m lightrlhf.plot --experiment_dir {ppo_dir}
  python -m lightrlhf.evaluate --model_name {sft_dir} {ppo_dir} --rm_experiment_dir {rm_dir} --temperature 0.7
  python -m datasets_prep.cafe.prepare_data --help      the data of this task, in other sizes and with other noise
  howto/datasets.md                                     your own data
"""


def latest(run: str) -> str:
    """The link to a run, which is shorter than its name; the run itself where the file system has no links."""
    link = Path(run).with_name(LATEST)
    return str(link) if link.exists() and link.samefile(run) else run


def activation() -> str:
    """The line that activates this virtual environment; empty if it is active or missing."""
    python = shutil.which("python")
    folder = Path(sys.prefix, "Scripts" if os.name == "nt" else "bin")
    active = python is not None and os.path.samefile(Path(python).parent, folder)
    if active or sys.prefix == sys.base_prefix:
        return ""
    command = ("" if os.name == "nt" else "source ") + os.path.relpath(folder / "activate")
    return f"  {command:53} once in each terminal, before commands that begin with python\n"


def show_samples(sft_dir: str, ppo_dir: str, count: int = 3) -> None:
    """Print answers to the same requests before and after PPO, drawn with a fixed seed."""
    before, after = (
        [json.loads(line) for line in Path(folder, "eval", "test.jsonl").open(encoding="utf-8")]
        for folder in (sft_dir, ppo_dir)
    )
    for i in random.Random(0).sample(range(len(before)), count):
        print(f"\n{before[i]['prompt'].splitlines()[0]}")
        for name, record in (("SFT", before[i]), ("PPO", after[i])):
            print(f"  {name} (gold {record['gold']['score']:.2f}):{record['response']}")


def demonstrations(data_dir: str, count: int = 400) -> dict[str, float]:
    """Mean gold score and its parts of the responses of the first training rows, which SFT learns from."""
    tokenizer = load_tokenizer(data_dir)
    rows = load_split(data_dir, "finetune", "train")[:count]
    prompts = [decode(tokenizer, row["input_ids"][: row["prompt_len"]]) for row in rows]
    judged = gold(prompts, [decode(tokenizer, row["input_ids"][row["prompt_len"] :]) for row in rows])
    return {name: sum(one[name] for one in judged) / len(judged) for name in judged[0]}


def explain(rows: list[dict[str, Any]], pairs: dict[str, Any], demonstrated: dict[str, float]) -> None:
    """Print the results, and what they mean."""
    names = {"gold": "gold score", "correct": "  order repeated", "polite": "  polite", "short": "  short"}
    columns = [demonstrated | {"gold": demonstrated["score"]}, *rows]
    print(f"\n{'':20}{'training rows':>16}{'held-out orders':>24}")
    print(f"{'':20}{'demonstrations':>16}{'base':>8}{'SFT':>8}{'PPO':>8}")
    for name, shown in names.items():
        values = "".join(f"{column[name]:{width}.3f}" for column, width in zip(columns, (16, 8, 8, 8)))
        print(f"{shown:20}{values}")
    low, high = (f"{end:.1%}" for end in rows[2]["win_rate_interval"])
    found = {"accuracy": pairs["accuracy"], "win_rate": rows[2]["win_rate"], "low": low, "high": high}
    print(MEANING.format(**found, short=demonstrated["short"]))
    if beats(rows[2], rows[1]):
        print("PPO beat SFT by the gold judge: its gold score is higher, and that interval lies above one half.")


MEANING = """
The gold score is a program's judgement of a response, from 0 to 1; no model was trained on it.
SFT imitates the demonstrations, which are flawed on purpose: for example, {short:.0%} of them are short. Where the base
model is better than the demonstrations, imitating them makes it worse.
The reward model learned from pairs of responses which one is better, and agrees with {accuracy:.1%} of held-out pairs.
PPO was trained to raise the reward model's score. Its win rate against SFT's responses to the same orders is
{win_rate:.1%}, ties counted half (95% interval {low} to {high})."""


def beats(after: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the gold score rose and the interval of the win rate lies above one half."""
    return after["gold"] > before["gold"] and after["win_rate_interval"][0] > 0.5


def draw(output: Path, sft_dir: str, rm_dir: str, ppo_dir: str, rows: list[dict[str, Any]]) -> None:
    """Draw the curves of the three stages, and the gold score of each model by part."""
    curves = {
        "SFT: loss": (sft_dir, "train/loss", "val/loss"),
        "reward model: accuracy": (rm_dir, "rewards/accuracies", "val/rewards/accuracies"),
        "PPO: score of the reward model": (ppo_dir, "objective/score", "val/score"),
        "PPO: KL to the SFT policy, nats a response": (ppo_dir, "objective/kl", "val/kl"),
        "PPO: mean length, tokens": (ppo_dir, "completions/mean_length", "val/mean_length"),
    }
    figure, axes = panels([*curves, "gold judge, held-out orders"], lines=2, width=4.3, height=3.2)
    for axis, (folder, *names) in zip(axes, curves.values()):
        logged = read_metrics(folder)
        for name, style in zip(names, ("-", "o-")):
            points = [(row["step"], row[name]) for row in logged if name in row]
            axis.plot(*zip(*points), style, ms=3, lw=1.4, label="held out" if name.startswith("val") else "training")
        label(axis, "step")
    for offset, row, name in zip((-0.27, 0, 0.27), rows, ("base", "SFT", "PPO")):
        axes[5].bar([i + offset for i in range(4)], [row[part] for part in ("gold", *PARTS)], width=0.26, label=name)
    axes[5].grid(False)
    axes[5].set_xticks(range(4), ("gold", *PARTS))
    axes[5].set_ylim(0, 1.2)
    axes[5].legend(fontsize=8, ncol=3, loc="upper center")
    save_figure(figure, output)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    run(parse(QuickstartArgs, argv))


if __name__ == "__main__":
    main()
