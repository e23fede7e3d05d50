"""Does it help to sample fresh responses? Online against offline preference learning on a task with an exact score.

The hidden map: 20 tokens, a secret permutation of them, prompts of 4 tokens and responses of 12. Token t of a response
is right when it is the image of prompt token t mod 4; the reward is the share of right tokens. A quarter of the tokens
in the demonstrations is right; the SFT policy learns part of that.

All arms are the program `lightrlhf.online_dpo` with other flags: 8 iterations of 128 fresh prompts, 8 responses each,
one pair per prompt, DPO at beta 0.1, so prompts, pairs and reward queries are equal. They differ in the responder (the
current policy; the SFT policy; a policy fine-tuned on foreign text: equally many right tokens, the wrong ones from five
tokens only) and in how a pair is chosen. Arms end at different distances from the SFT policy, so they are compared at
equal KL: each arm's curve of reward over KL is read at the lowest final KL of the arms compared. An arm takes less than
ten minutes: ten seeds, 1 to 10; `--seeds 11 12` adds two to those that are there.

The settings were fixed before the first five seeds were run (on seed 100, until the SFT policy started near the 0.109
of an earlier prototype and any learning was visible). Warm-up within iterations was added after that first run, in
which KL jumped with each fresh Adam; results/earlier.json has both runs. Prints a table and the claims
that held, and draws a figure. Results are stored as they come: the same command resumes after a kill.

    python -m examples.experiments.hidden_map
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.experiments.readings import Curve, at_equal_kl
from examples.experiments.records import TEN, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import word_tokenizer, write_model
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.programs import made
from lightrlhf import online_dpo, sft
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import IGNORE_INDEX, save_split
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.storage.results import label, panels, print_table, save_figure

TOKENS = "abcdefghijklmnopqrst"
PROMPT, RESPONSE = 4, 12
RIGHT = 0.2  # share of demonstrated tokens that are right on purpose; one in twenty of the others is right by chance
DIALECT = "abcde"
NUM_DEMONSTRATIONS, NUM_HELD_OUT = 12_000, 256
PROMPTS, ITERATIONS = 128, 8

SFT = {
    "accelerator": "cpu",
    "epochs": 3,
    "learning_rate": 3e-3,
    "lr_warmup_steps": 20,
    "use_targets": True,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "eval_interval": 0,
    "log_interval": 50,
}
ONLINE = {
    "accelerator": "cpu",
    "mini_batch_size": 16,
    "micro_batch_size": 16,
    "num_generations": 8,
    "max_new_tokens": RESPONSE,
    "beta": 0.1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "rollout_mini_batch_size": 256,
    "reward_function": "examples.experiments.hidden_map:share_right",
    "eval_prompts": NUM_HELD_OUT,
}
EQUAL = {"iterations": ITERATIONS, "prompts_per_iteration": PROMPTS}
REUSED = {"iterations": 2, "prompts_per_iteration": PROMPTS, "epochs": 10}
SFT_POLICY, FOREIGN = {"responder": "initial"}, {"responder": "FOREIGN"}
ARMS: dict[str, dict[str, Any]] = {
    "online": EQUAL,
    "offline, SFT policy": EQUAL | SFT_POLICY,
    "offline, foreign text": EQUAL | FOREIGN,
    "online, max_random": EQUAL | {"choose_type": "max_random"},
    "online, max_max": EQUAL | {"choose_type": "max_max"},
    "reused: online": REUSED,
    "reused: offline, SFT policy": REUSED | SFT_POLICY,
    "reused: offline, foreign text": REUSED | FOREIGN,
}
GROUPS = {
    "who responds": ["online", "offline, SFT policy", "offline, foreign text"],
    "which pair": ["online", "online, max_random", "online, max_max"],
    "few batches, each used ten times": [name for name in ARMS if name.startswith("reused")],
}


@dataclass(frozen=True, kw_only=True)
class HiddenMapArgs(Args):
    """Compare online and offline preference learning on the hidden map."""

    output_dir: str = "hidden_map"
    """Folder for data, logs, results and the figure."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS)  # their names have commas
    """Names of the arms to run; all by default."""
    lr_warmup_steps: int = at_least(0, 4)
    """Steps of linear warm-up in each iteration, of every arm; the first run had none, its one repetition had 4."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the arms that have no result yet; returns which claims hold."""
    args = parse(HiddenMapArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir)
    seeds, arms = args.seeds or TEN, args.arms or list(ARMS)
    online = ONLINE | {"lr_warmup_steps": args.lr_warmup_steps}
    with results("hidden_map", folder, {"arms": ARMS, "online": online, "sft": SFT}) as writer:
        done = {(row["seed"], row["arm"]) for row in writer.rows}
        for seed in seeds:
            for arm in arms:
                if (seed, arm) not in done:
                    writer.append(run_arm(folder / f"seed-{seed}", seed, arm, online))
        rows = writer.rows
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    of_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    curves = {arm: [of_run[arm, seed] for seed in common_seeds(rows, arms)] for arm in arms}
    claims = show_results(curves)
    draw(curves, folder / "hidden_map.png")
    print(f"curves: {folder / 'hidden_map.png'}")
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- task
def share_right(prompts: Sequence[str], completions: Sequence[str], *, target: Sequence[str], **_: Any) -> list[float]:
    """The reward: share of a response's 12 tokens that are right."""
    return [
        sum(token == right for token, right in zip(text.split(), image.split())) / RESPONSE
        for text, image in zip(completions, target)
    ]


def write_data(folder: Path, seed: int, wrong: str) -> str:
    """Write demonstrations and prompts for the map of `seed`; wrong tokens of demonstrations are drawn from `wrong`."""
    tokenizer = word_tokenizer(TOKENS)
    rng = random.Random(f"map {seed}")
    image = dict(zip(TOKENS, rng.sample(TOKENS, len(TOKENS))))
    chance = 1 / len(TOKENS)
    right_share = RIGHT + (1 - RIGHT) * chance  # equal for every `wrong`
    for stage, split, count in (
        ("finetune", "train", NUM_DEMONSTRATIONS),
        ("finetune", "validation", NUM_HELD_OUT),
        ("prompts", "train", PROMPTS * ITERATIONS),
        ("prompts", "validation", NUM_HELD_OUT),
    ):
        rng = random.Random(f"{seed} {stage} {split} {wrong}" if stage == "finetune" else f"{seed} {stage} {split}")
        rows = []
        for _ in range(count):
            prompt = rng.choices(TOKENS, k=PROMPT)
            target = [image[prompt[t % PROMPT]] for t in range(RESPONSE)]
            ids = encode_prompt(tokenizer, " ".join(prompt))
            if stage == "prompts":
                rows.append({"prompt_len": len(ids), "input_ids": ids, "columns": {"target": " ".join(target)}})
                continue
            tokens = [
                right if rng.random() < right_share else rng.choice([w for w in wrong if w != right])
                for right in target
            ]
            response = encode_response(tokenizer, " ".join(tokens))
            targets = torch.tensor([IGNORE_INDEX] * len(ids) + response)
            rows.append({"prompt_len": len(ids), "input_ids": [*ids, *response], "targets": targets})
        save_split(folder, stage, split, rows)
    store_tokenizer(tokenizer, folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------------------- arms
def run_arm(folder: Path, seed: int, arm: str, online: dict[str, Any]) -> dict[str, Any]:
    """Train one arm; returns its curve: reward, KL and counts after each iteration."""
    data = str(folder / "data" / "map")
    start = fine_tuned(folder, "sft", data, seed, TOKENS)
    flags = online | ARMS[arm]
    if flags.get("responder") == "FOREIGN":
        flags["responder"] = fine_tuned(folder, "foreign", str(folder / "data" / "foreign"), seed, DIALECT)
    print(f"\nseed {seed}, {arm}", flush=True)
    began = now()
    run = call(online_dpo, data_dir=data, log_dir=folder / "logs", sft_experiment_dir=start, seed=seed, **flags)
    row = {"seed": seed, "arm": arm, "curve": json.loads((Path(run) / "results.json").read_text())}
    return row | spent(began) | made_by()


def fine_tuned(folder: Path, name: str, data: str, seed: int, wrong: str) -> str:
    """The experiment dir of SFT on the map's demonstrations; trained once."""

    def train() -> str:
        write_data(Path(data), seed, wrong)
        model = write_model(folder / "model", seed, word_tokenizer(TOKENS))
        where = {"data_dir": data, "log_dir": folder / "logs", "experiment_name": name, "model_name": model}
        return call(sft, **where, seed=seed, **SFT)

    return made(folder / f"{name}.txt", train)


# ---------------------------------------------------------------------------------------------------------- results
def show_results(curves: dict[str, list[Curve]]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    gaps: dict[tuple[str, str], tuple[float, float, float]] = {}
    for title, arms in GROUPS.items():
        if any(arm not in curves for arm in arms):
            continue
        equal = at_equal_kl({arm: curves[arm] for arm in arms})
        rows = []
        for arm in arms:
            ends = [curve[-1] for curve in curves[arm]]
            counts = [f"{sum(end[name] for end in ends) / len(ends):.0f}" for name in ("pairs", "reward_queries")]
            means = [shown([end[name] for end in ends]) for name in ("reward", "kl")]
            rows.append((arm, shown(equal[arm]), *means, *counts))
        headings = ("", "reward at equal KL", "final reward", "final KL", "pairs", "queries")
        print_table(f"{title}: mean over {len(equal[arms[0]])} seeds [95% interval]", headings, rows, width=110)
        print(f"  SFT policy: reward {shown([curve[0]['reward'] for curve in curves[arms[0]]])}")
        for better, worse in zip(arms, arms[1:]):
            gaps[better, worse] = paired(equal[better], equal[worse])
            print(f"  {better} minus {worse}: {shown_gap(gaps[better, worse])}")
    claims = {}
    for better, worse, may_be_equal in (
        ("online", "offline, SFT policy", False),
        ("offline, SFT policy", "offline, foreign text", False),
        ("online", "online, max_random", True),
        ("online, max_random", "online, max_max", False),
        ("reused: online", "reused: offline, SFT policy", False),
    ):
        if (better, worse) in gaps:
            mean, low, _ = gaps[better, worse]
            name = "online, max_min" if "max" in worse and better == "online" else better
            claims[f"{name} {'>=' if may_be_equal else '>'} {worse}"] = mean >= 0 if may_be_equal else low > 0
    return claims


def draw(curves: dict[str, list[Curve]], output: Path) -> None:
    """Draw reward over KL, one panel per group: thin lines for seeds, a thick one for their mean."""
    groups = {title: arms for title, arms in GROUPS.items() if all(arm in curves for arm in arms)}
    figure, axes = panels(list(groups))
    for axis, arms in zip(axes, groups.values()):
        for number, arm in enumerate(arms):
            for curve in curves[arm]:
                axis.plot([p["kl"] for p in curve], [p["reward"] for p in curve], color=f"C{number}", alpha=0.25, lw=1)
            points = list(zip(*curves[arm]))
            kls, rewards = ([sum(p[k] for p in step) / len(step) for step in points] for k in ("kl", "reward"))
            axis.plot(kls, rewards, "o-", color=f"C{number}", ms=3, label=arm)
        label(axis, "KL to the SFT policy, nats a response", "share of right tokens, held-out prompts")
    save_figure(figure, output)


if __name__ == "__main__":
    main()
