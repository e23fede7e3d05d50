"""Does it help to answer anew? Online against offline preference learning on a task that can be scored exactly.

The hidden map: 20 tokens, a secret permutation of them, prompts of 4 tokens and responses of 12. Token t of a response
is right when it is the image of prompt token t mod 4; the reward is the share of right tokens. Of the demonstrations a
quarter is right, and the SFT policy learns a part of that.

All arms are the program `lightrlhf.online_dpo` with other flags: 8 iterations of 128 fresh prompts, 8 responses each,
one pair a prompt, DPO at beta 0.1, so prompts, pairs and reward queries are equal. They differ in who responds (the
last policy; the SFT policy; one that was trained on foreign text: as many right tokens, the wrong ones from five tokens
only) and in how a pair is chosen. Arms go unlike distances from the SFT policy, so they are compared at equal KL: each
arm's curve of reward by KL, from the SFT policy on, is read off at the lowest KL that the arms compared end at.

The settings were fixed before the five seeds were run (on seed 100, until the SFT policy began near the 0.109 of an
earlier prototype and something was learned at all). Warm-up within iterations came after that first run had shown KL to
jump with each fresh Adam; howto/algorithms/online_dpo.md has both runs. Prints a table, draws a picture, and ends with
what held.
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

from lightrlhf import online_dpo, sft
from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import IGNORE_INDEX, save_split
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.storage.jsonl import JsonlWriter

TOKENS = "abcdefghijklmnopqrst"
PROMPT, RESPONSE = 4, 12
RIGHT = 0.2  # share of demonstrated tokens that are right on purpose; of the others one in twenty is by chance
DIALECT = "abcde"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
NUM_DEMONSTRATIONS, NUM_HELD_OUT = 12_000, 256
PROMPTS, ITERATIONS = 128, 8
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 to 9 degrees of freedom

SFT = [
    *("--accelerator", "cpu", "--epochs", "3", "--learning_rate", "3e-3", "--lr_warmup_steps", "20"),
    *("--use_targets", "True", "--mini_batch_size", "64", "--micro_batch_size", "64", "--eval_interval", "0"),
    *("--log_interval", "50"),
]
ONLINE = [
    *("--accelerator", "cpu", "--mini_batch_size", "16", "--micro_batch_size", "16", "--num_responses", "8"),
    *("--max_new_tokens", str(RESPONSE), "--beta", "0.1", "--learning_rate", "1e-3"),
    *("--lr_scheduler_type", "constant_with_warmup", "--rollout_mini_batch_size", "256"),
    *("--reward_function", "examples.hidden_map:share_right", "--eval_prompts", str(NUM_HELD_OUT)),
]
EQUAL = ["--iterations", str(ITERATIONS), "--prompts_per_iteration", str(PROMPTS)]
REUSED = ["--iterations", "2", "--prompts_per_iteration", str(PROMPTS), "--epochs", "10"]
ARMS = {
    "online": EQUAL,
    "offline, SFT policy": [*EQUAL, "--responder", "initial"],
    "offline, foreign text": [*EQUAL, "--responder", "FOREIGN"],
    "online, max_random": [*EQUAL, "--choose_type", "max_random"],
    "online, max_max": [*EQUAL, "--choose_type", "max_max"],
    "reused: online": REUSED,
    "reused: offline, SFT policy": [*REUSED, "--responder", "initial"],
    "reused: offline, foreign text": [*REUSED, "--responder", "FOREIGN"],
}
GROUPS = {
    "who responds": ["online", "offline, SFT policy", "offline, foreign text"],
    "which pair": ["online", "online, max_random", "online, max_max"],
    "few batches, each used ten times": [name for name in ARMS if name.startswith("reused")],
}


@dataclass(frozen=True, kw_only=True)
class HiddenMapArgs:
    """Compare online and offline preference learning on the hidden map."""

    output_dir: str = "hidden_map"
    """Folder for data, logs, results and the picture."""
    seeds: list[int] | None = None
    """Seeds to run; 1 to 5 when not given."""
    arms: list[str] | None = None
    """Names of the arms to run; all when not given."""
    lr_warmup_steps: int = 4
    """Steps of linear warm-up in each iteration, of every arm; the first run had none, the one repetition had 4."""

    def __post_init__(self) -> None:
        check_at_least(self, "lr_warmup_steps", 0)
        for seed in self.seeds or []:
            if seed < 0:
                raise ValueError(f"--seeds {seed} must be at least 0")
        unknown = [name for name in self.arms or [] if name not in ARMS]
        if unknown:
            raise ValueError(f"--arms {unknown[0]} is none of: {'; '.join(ARMS)}")


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the arms that have no result yet; returns which claims hold."""
    args = parse(HiddenMapArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir)
    seeds, arms = args.seeds or [1, 2, 3, 4, 5], args.arms or list(ARMS)
    online = [*ONLINE, "--lr_warmup_steps", str(args.lr_warmup_steps)]
    with JsonlWriter(folder / "results.jsonl", {"arms": ARMS, "online": online, "sft": SFT}) as writer:
        done = {(row["seed"], row["arm"]) for row in writer.rows}
        for seed in seeds:
            for arm in arms:
                if (seed, arm) not in done:
                    writer.append(run_arm(folder / f"seed-{seed}", seed, arm, online))
        rows = [row for row in writer.rows if row["seed"] in seeds and row["arm"] in arms]
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    curves = {arm: [row["curve"] for row in rows if row["arm"] == arm] for arm in arms}
    claims = tell(curves)
    print(f"curves: {draw(curves, folder / 'hidden_map.png')}")
    finish(claims, folder)
    return claims


def finish(claims: dict[str, bool], folder: Path) -> None:
    """Print which claims held in one line, and keep it as `claims.txt`."""
    line = "; ".join(f"{claim}: {'held' if held else 'did NOT hold'}" for claim, held in claims.items())
    print(f"claims: {line}")
    write_text(folder / "claims.txt", line + "\n")


# ------------------------------------------------------------------------------------------------------------- task
def share_right(prompts: Sequence[str], completions: Sequence[str], *, target: Sequence[str], **_: Any) -> list[float]:
    """The reward: the share of a response's 12 places that hold the right token."""
    return [
        sum(one == other for one, other in zip(text.split(), right.split())) / RESPONSE
        for text, right in zip(completions, target)
    ]


def tokenizer() -> Any:
    """One id a letter, a pad and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *TOKENS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def write_data(folder: Path, seed: int, wrong: str) -> str:
    """Demonstrations and prompts of the map of `seed`; wrong tokens of demonstrations are drawn from `wrong`."""
    known = tokenizer()
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
            ids = encode_prompt(known, " ".join(prompt))
            if stage == "prompts":
                rows.append({"prompt_len": len(ids), "input_ids": ids, "columns": {"target": " ".join(target)}})
                continue
            said = [
                right if rng.random() < right_share else rng.choice([w for w in wrong if w != right])
                for right in target
            ]
            response = encode_response(known, " ".join(said))
            targets = torch.tensor([IGNORE_INDEX] * len(ids) + response)
            rows.append({"prompt_len": len(ids), "input_ids": [*ids, *response], "targets": targets})
        save_split(folder, stage, split, rows)
    known.save_pretrained(folder / "tokenizer")
    return str(folder)


def new_model(folder: Path, seed: int, known: Any) -> str:
    """A Llama of 0.1M parameters with random weights, for the ids of a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    special = {"pad_token_id": known.pad_token_id, "eos_token_id": known.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(known), max_position_embeddings=128, initializer_range=0.1, **SIZES, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    known.save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------------------- arms
def run_arm(folder: Path, seed: int, arm: str, online: list[str]) -> dict[str, Any]:
    """One arm's curve: reward, KL and counts after each iteration."""
    data = str(folder / "data" / "map")
    own = trained(folder, "sft", data, seed, TOKENS)
    flags = ["--data_dir", data, "--log_dir", str(folder / "logs"), "--sft_experiment_dir", own, *online]
    flags += ["--seed", str(seed), *ARMS[arm]]
    if "FOREIGN" in flags:
        flags[flags.index("FOREIGN")] = trained(folder, "foreign", str(folder / "data" / "foreign"), seed, DIALECT)
    started = time.perf_counter()
    run = online_dpo.main(flags)
    print(f"({time.perf_counter() - started:.0f} s) seed {seed}, {arm}", flush=True)
    return {"seed": seed, "arm": arm, "curve": json.loads((Path(run) / "results.json").read_text())}


def trained(folder: Path, name: str, data: str, seed: int, wrong: str) -> str:
    """The experiment dir of SFT on the map's demonstrations; trained once."""
    found = sorted((folder / "logs" / name).rglob("checkpoint-*"))
    if found:
        return str(found[-1].parent)
    write_data(Path(data), seed, wrong)
    model = new_model(folder / "model", seed, tokenizer())
    flags = ["--data_dir", data, "--log_dir", str(folder / "logs"), "--experiment_name", name, "--model_name", model]
    return sft.main([*flags, "--seed", str(seed), *SFT])


# ---------------------------------------------------------------------------------------------------------- results
def at_kl(curve: list[dict[str, float]], kl: float) -> float:
    """The reward where a curve first reaches a KL, between two iterations on a straight line."""
    for before, after in zip(curve, curve[1:]):
        if after["kl"] >= kl:
            span = after["kl"] - before["kl"]
            share = (kl - before["kl"]) / span if span > 0 else 1.0
            return before["reward"] + share * (after["reward"] - before["reward"])
    return curve[-1]["reward"]


def matched(curves: dict[str, list[list[dict[str, float]]]]) -> dict[str, list[float]]:
    """Each arm's reward, one a seed, at the lowest KL that any of these arms ends at with that seed."""
    seeds = range(min(map(len, curves.values())))
    ends = [min(curves[arm][i][-1]["kl"] for arm in curves) for i in seeds]
    return {arm: [at_kl(curves[arm][i], ends[i]) for i in seeds] for arm in curves}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("-inf"), float("inf")
    half = T95[min(n, 10) - 2] * (sum((v - mean) ** 2 for v in values) / (n - 1) / n) ** 0.5
    return mean, mean - half, mean + half


def tell(curves: dict[str, list[list[dict[str, float]]]]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    gaps: dict[tuple[str, str], tuple[float, float, float]] = {}
    for title, arms in GROUPS.items():
        if any(arm not in curves for arm in arms):
            continue
        equal = matched({arm: curves[arm] for arm in arms})
        table = Table(title=f"{title}: mean over {len(equal[arms[0]])} seeds [95% interval]")
        for name in ("", "reward at equal KL", "final reward", "final KL", "pairs", "queries"):
            table.add_column(name, justify="right" if name else "left")
        for arm in arms:
            ends = [curve[-1] for curve in curves[arm]]
            counts = [f"{sum(end[name] for end in ends) / len(ends):.0f}" for name in ("pairs", "reward_queries")]
            means = [show(interval([end[name] for end in ends])) for name in ("reward", "kl")]
            table.add_row(arm, show(interval(equal[arm])), *means, *counts)
        start = interval([curve[0]["reward"] for curve in curves[arms[0]]])
        console.print(table)
        console.print(f"  SFT policy: reward {show(start)}")
        for better, worse in zip(arms, arms[1:]):
            gap = interval([a - b for a, b in zip(equal[better], equal[worse])])
            gaps[better, worse] = gap
            console.print(f"  {better} less {worse}: {gap[0]:+.3f} [{gap[1]:+.3f}, {gap[2]:+.3f}]")
    claims = {}
    for better, worse, at_least in (
        ("online", "offline, SFT policy", False),
        ("offline, SFT policy", "offline, foreign text", False),
        ("online", "online, max_random", True),
        ("online, max_random", "online, max_max", False),
        ("reused: online", "reused: offline, SFT policy", False),
    ):
        if (better, worse) in gaps:
            mean, low, _ = gaps[better, worse]
            name = "online, max_min" if "max" in worse and better == "online" else better
            claims[f"{name} {'>=' if at_least else '>'} {worse}"] = mean >= 0 if at_least else low > 0
    return claims


def show(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"


def draw(curves: dict[str, list[list[dict[str, float]]]], output: Path) -> Path:
    """Reward by KL, a thin line a seed and the mean of the seeds thick, one panel a group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = {title: arms for title, arms in GROUPS.items() if all(arm in curves for arm in arms)}
    figure, axes = plt.subplots(1, max(len(groups), 1), figsize=(5 * max(len(groups), 1), 3.8), squeeze=False)
    for axis, (title, arms) in zip(axes.flat, groups.items()):
        for number, arm in enumerate(arms):
            for curve in curves[arm]:
                axis.plot([p["kl"] for p in curve], [p["reward"] for p in curve], color=f"C{number}", alpha=0.25, lw=1)
            points = list(zip(*curves[arm]))
            kls, rewards = ([sum(p[k] for p in step) / len(step) for step in points] for k in ("kl", "reward"))
            axis.plot(kls, rewards, "o-", color=f"C{number}", ms=3, label=arm)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("KL to the SFT policy, nats a response", fontsize=8)
        axis.set_ylabel("share of right tokens, held-out prompts", fontsize=8)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return output


if __name__ == "__main__":
    main()
