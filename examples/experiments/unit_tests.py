"""Does PPO on unit tests write more programs that pass than SFT, and do macro actions help? (MA-RLHF on APPS, small)

The problems, model and flags are those of `examples/apps.sh`: 0.9M parameters from nothing, SFT on the solutions of
about 500 generated problems, then 30 iterations of 32 programs that are run on the tests of theirs, by PPO over tokens
and over macro actions of 5 tokens. Each seed has its own problems, tokenizer and models.

Claims, by the 95% interval of the paired difference of pass@1 over seeds, on held-out problems with four programs each:
each kind of PPO above SFT, macro actions above tokens; three comparisons, not adjusted. Nothing was tuned for this. An
arm takes less than ten minutes, but its programs run in a sandbox, so its seconds are not those of its process alone:
five seeds, 1 to 5. The rows of a seed are stored when all its arms are done: the same command goes on with the other
seeds after a kill, and `--seeds 6 7` adds two to those that are there.

    python -m examples.experiments.unit_tests
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from datasets_prep import train_tokenizer
from datasets_prep.apps import prepare_data
from examples.experiments.records import FIVE, Row, common_seeds, made_by, now, results, spent
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.problems import PASSED, RUNS, problems, scores_of
from examples.programs import logged, workers
from lightrlhf import generate, ppo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics

ARMS: dict[str, dict[str, Any]] = {"SFT": {}, "token": {}, "n=5": {"ngram": 5}}  # flags of PPO
QUIET = {"accelerator": "cpu", "logger": "csv"}
SFT = QUIET | {
    "model_name": "tiny",
    "use_targets": True,
    "epochs": 100,
    "max_steps": 250,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 2e-3,
    "lr_warmup_steps": 20,
    "eval_interval": 50,
}
PPO = QUIET | {
    "reward_function": "datasets_prep.apps.reward:adaptive_score",
    "epochs": 10,
    "max_steps": 30,
    "rollout_size": 32,
    "rollout_mini_batch_size": 32,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "max_new_tokens": 40,
    "actor_learning_rate": 2e-4,
    "critic_learning_rate": 1e-3,
    "init_kl_coeff": 0.02,
    "eval_interval": 0,
    "log_interval": 1,
}
ANSWERS = {"num_prompts": 100, "num_generations": 4, "max_new_tokens": 40}
DATA = {"max_length": 192, "max_prompt_length": 128, "split": "5,0,5", "dataset_revision": "null"}


@dataclass(frozen=True, kw_only=True)
class UnitTestsArgs(Args):
    """Compare PPO over tokens and macro actions with SFT on small programming problems."""

    output_dir: str = "unit_tests"
    """Folder for data, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""
    num_workers: int = at_least(1, 2)
    """Seeds at a time, one thread each."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(UnitTestsArgs, argv)
    folder, seeds = Path(args.output_dir).resolve(), args.seeds or FIVE
    settings = {"sft": SFT, "ppo": PPO, "arms": ARMS, "answers": ANSWERS, "data": DATA, "smoke": args.smoke}
    with results("unit_tests", folder, settings) as writer:
        left = [seed for seed in seeds if seed not in common_seeds(writer.rows, ARMS)]
        for rows in run_all(left, folder, args):
            writer.append(*rows)
        rows = writer.rows
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def run_all(seeds: Sequence[int], folder: Path, args: UnitTestsArgs) -> Iterator[list[Row]]:
    """The rows of each seed, in the order in which they end."""
    with workers(args.num_workers) as pool:
        jobs = [pool.submit(run_seed, folder / f"seed-{seed}", seed, args.smoke) for seed in seeds]
        for job in as_completed(jobs):
            yield job.result()


def run_seed(folder: Path, seed: int, smoke: bool) -> list[Row]:
    """Train each arm on the seed's own problems; returns their rows."""
    log, source, data = folder / "output.txt", folder / "problems.jsonl", folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(source, problems(seed, 4 if smoke else 60))
    logged(log, train_tokenizer, dataset_name=source, destination_dir=folder / "bpe", vocab_size=512)
    raw = {"dataset_name": source, "tokenizer_name": folder / "bpe"}
    logged(log, prepare_data, destination_dir=data, seed=seed, **raw, **DATA)
    where = {"data_dir": data, "log_dir": folder / "logs", "seed": seed}
    few, rows, start = {"max_steps": 2} if smoke else {}, [], ""
    for arm, own in ARMS.items():
        began = now()
        if arm == "SFT":
            trained = start = logged(log, sft, **where, **(SFT | few))
        else:
            trained = logged(log, ppo, **where, **(PPO | own | few), sft_experiment_dir=start, experiment_name=arm)
        seconds, answers = spent(began), Path(trained) / "answers.jsonl"
        flags = {"model_name": trained, "data_dir": data, "output_file": answers, "accelerator": "cpu", "seed": seed}
        logged(log, generate, **flags, **ANSWERS)
        row: Row = {"arm": arm, "seed": seed} | shares(str(answers))
        row["curve"] = [step["objective/score"] for step in read_metrics(trained) if "objective/score" in step]
        rows.append(row | seconds | made_by())
        print(f"seed {seed}, {arm}: pass@1 {row['pass_1']:.3f} of {row['programs']} programs", flush=True)
    return rows


def shares(responses_file: str) -> Row:
    """pass@1, the share of programs that run to their end, and the mean reward, of the programs that were scored."""
    scored, tests, failed = scores_of(responses_file)
    passed, runs = (mean(float(score >= least) for score in scored) for least in (PASSED, RUNS))
    counts = {"programs": len(scored), "not_scored": failed, "problems": len({*tests})}
    return {"pass_1": passed, "runs": runs, "reward": mean(scored), **counts}


def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print the table; returns which claims hold."""
    seeds, claims = common_seeds(rows, ARMS), {}
    of_run = {(row["arm"], row["seed"]): row for row in rows}
    values = {arm: [of_run[arm, seed]["pass_1"] for seed in seeds] for arm in ARMS}
    table = [(arm, shown(own), " ".join(f"{value:.3f}" for value in own)) for arm, own in values.items()]
    title = f"held-out problems: mean over {len(seeds)} seeds [95% interval]"
    print_table(title, ("", "pass@1", "each seed"), table, width=110)
    for one, other in combinations(ARMS, 2):
        gap = paired(values[other], values[one])
        print(f"  pass@1, {other} minus {one}: {shown_gap(gap)}")
        claims[f"{other} better than {one}"] = gap[1] > 0
    return claims


if __name__ == "__main__":
    main()
