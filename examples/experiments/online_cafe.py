"""The café by three methods from the same SFT policy: PPO, offline DPO and online DPO, over seeds.

Every stage but online DPO has the quickstart's settings, and every method sees the café's 6,400 prompts or 6,000 pairs
once. PPO scores one response per prompt, online DPO eight; its beta was tuned on seed 100, which is none of the five.
The gold judge, which no training stage uses, decides: the mean gold win rate over the SFT policy, against a goal set
beforehand for each method, and the paired differences between methods, three comparisons, not adjusted. A method takes
less than ten minutes: ten seeds, 1 to 10. Prints a table and the claims that held; earlier trials are in
howto/results.md. Finished stages are kept: the same command resumes after a kill, and `--seeds 11 12`
adds two to those that are there.

    python -m examples.experiments.online_cafe
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.experiments.records import TEN, Row, common_seeds, made_by, now, results, spent
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from lightrlhf import dpo, evaluate, online_dpo, ppo, rm, sft
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.quickstart import FEW_ROWS, PPO, RM, SFT
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics

DPO = {
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 5,
    "beta": 0.1,
    "rpo_alpha": 0.5,
    "eval_iters": 8,
    "log_interval": 5,
}
ONLINE = {
    "iterations": 8,
    "num_generations": 8,
    "max_new_tokens": 96,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 2e-4,
    "lr_warmup_steps": 5,
    "beta": 0.3,
    "rpo_alpha": 0.5,
    "rollout_mini_batch_size": 128,
    "eval_prompts": 200,
}
SMOKE_ONLINE = {"iterations": 1, "prompts_per_iteration": 8, "eval_prompts": 8, "max_new_tokens": 8}
GOALS = {"DPO": 0.7, "online DPO": 0.8}  # gold win rate over the SFT policy
ARMS = ("SFT", "PPO", "DPO", "online DPO")
UNKNOWN: Row = {"seconds": None, "cpu_seconds": None}  # of a stage that an earlier call finished


@dataclass(frozen=True, kw_only=True)
class OnlineCafeArgs(Args):
    """Compare PPO, DPO and online DPO on the café."""

    output_dir: str = "online_cafe"
    """Folder for data, logs and results; finished stages in it are not run again."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the program; returns which claims hold."""
    args = parse(OnlineCafeArgs, argv)
    folder, seeds = Path(args.output_dir), args.seeds or TEN
    settings = {"sft": SFT, "rm": RM, "ppo": PPO, "dpo": DPO, "online": ONLINE, "smoke": args.smoke}
    with results("online_cafe", folder, settings) as writer:
        for seed in seeds:
            if seed not in common_seeds(writer.rows, ARMS):
                writer.append(*run_seed(folder / f"seed-{seed}", seed, args.smoke))
        rows = writer.rows
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def run_seed(folder: Path, seed: int, smoke: bool) -> list[Row]:
    """Train and evaluate each method; returns their rows, with measures, curve of the score and reward queries."""
    data, logs = f"{folder}/data/cafe", f"{folder}/logs"
    few_steps = {"max_steps": 1} if smoke else {}
    if not Path(data, "args.json").is_file():
        few_rows = FEW_ROWS if smoke else {}
        call(prepare_data, destination_dir=data, tokenizer_name=BASE_DIR, seed=seed, **few_rows)
    seconds: dict[str, Row] = {}  # of the attempt that finished

    def run(program: ModuleType, name: str, **flags: Any) -> str:
        """The newest finished run of a program in the folder, else a resumed or new one."""
        runs = [path.parent for path in Path(logs, name).rglob("args.json") if checkpoints(path.parent)]
        finished = [path for path in runs if program is not online_dpo or is_finished(path)]
        if finished:
            return str(max(finished))
        began = now()
        where = {"resume_from": max(runs)} if runs else {"data_dir": data, "log_dir": logs, "seed": seed} | flags
        trained: str = call(program, **where)
        seconds[trained] = spent(began)
        return trained

    start = run(sft, "rlhf-supervised-finetuning", model_name=BASE_DIR, **SFT, **few_steps)
    reward = run(rm, "rlhf-reward-modelling", sft_experiment_dir=start, **RM, **few_steps)
    models = {"sft_experiment_dir": start, "rm_experiment_dir": reward}
    online = ONLINE | (SMOKE_ONLINE if smoke else {})
    trained = {
        "PPO": run(ppo, "rlhf-ppo", **models, **PPO, **few_steps),
        "DPO": run(dpo, "rlhf-dpo", sft_experiment_dir=start, **DPO, **few_steps),
        "online DPO": run(online_dpo, "rlhf-online-dpo", **models, **online),
    }
    flags = {"rm_experiment_dir": reward, "max_new_tokens": 96, "num_samples": 8 if smoke else None}
    tested = call(evaluate, model_name=[start, *trained.values()], **flags)
    queries, rows = reward_queries(trained), []
    for arm, experiment, measures in zip(ARMS, (start, *trained.values()), tested):
        del measures["model"]  # a path of this machine
        row = {"seed": seed, "arm": arm} | measures | {"reward_queries": queries.get(arm)}
        rows.append(row | {"curve": curve_of(experiment)} | seconds.get(experiment, UNKNOWN) | made_by())
    return rows


def curve_of(experiment: str) -> list[Row]:
    """Measures after each iteration of an online run; the score of each rollout of another, if it has any."""
    of_iterations = Path(experiment) / "results.json"
    if of_iterations.is_file():
        return list(json.loads(of_iterations.read_text(encoding="utf-8")))
    metrics = read_metrics(experiment)
    return [{"step": row["step"], "score": row["objective/score"]} for row in metrics if "objective/score" in row]


def is_finished(run: Path) -> bool:
    """Whether an online run has all its iterations."""
    stored = json.loads((run / "args.json").read_text(encoding="utf-8"))
    return (run / f"iteration-{stored['iterations']:02d}" / "evaluation.json").is_file()


def reward_queries(trained: dict[str, str]) -> dict[str, int]:
    """How many sampled responses each method had scored in training (DPO learns from the guests' pairs)."""
    args = json.loads((Path(trained["PPO"]) / "args.json").read_text(encoding="utf-8"))
    steps = int(checkpoints(Path(trained["PPO"]))[-1].name.partition("-")[2])
    last = json.loads((Path(trained["online DPO"]) / "results.json").read_text(encoding="utf-8"))[-1]
    return {"PPO": steps * args["rollout_size"], "DPO": 0, "online DPO": last["reward_queries"]}


def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print the table; returns which claims hold."""
    table, seeds = [], common_seeds(rows, ARMS)
    of_run = {(row["arm"], row["seed"]): row for row in rows}
    by_arm = {arm: [of_run[arm, seed] for seed in seeds] for arm in ARMS}
    for arm, own in by_arm.items():
        measures = [shown([row[name] for row in own]) if name in own[0] else "" for name in ("gold", "win_rate", "kl")]
        length, queries = sum(row["mean_length"] for row in own) / len(own), own[0]["reward_queries"]
        table.append((arm, *measures, f"{length:.1f}", "" if queries is None else f"{queries:,}"))
    headings = ("", "gold", "gold win rate over SFT", "KL to SFT, nats", "length", "reward queries")
    print_table(f"the café, held-out orders: mean over {len(seeds)} seeds [95% interval]", headings, table, width=130)
    win_rates = {arm: [row["win_rate"] for row in by_arm[arm]] for arm in ARMS[1:]}
    for arm, rates in win_rates.items():
        print(f"  {arm}, win rate of each seed:", *(f"{rate:.3f}" for rate in rates))
    for one, other in combinations(reversed(win_rates), 2):
        print(f"  win rate, {one} minus {other}: {shown_gap(paired(win_rates[one], win_rates[other]))}")
    return {f"{arm} wins >= {least:.0%}": interval(win_rates[arm])[0] >= least for arm, least in GOALS.items()}


if __name__ == "__main__":
    main()
