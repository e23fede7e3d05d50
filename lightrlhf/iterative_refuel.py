"""REFUEL in iterations, with any user: setting one of Gao et al. 2024 (2410.04612); the loss is in `lightrlhf.refuel`.

Each iteration rolls dialogues out with the policy of the previous one, scores them, makes pairs and trains on them:

    iteration-01/dialogues.jsonl   generate: roll out, sample horizon and turn, roll out again from that turn
                 rewards.jsonl     rank: the score of every prefix of both
                 pairs/            tokenize: filtered refuel_{train,validation,test}.pt, report.json
                 policy/           train; evaluation.json: scores by turn on held-out dialogues

Finished stages are skipped. The baselines of the paper are two flags: `--prefix` (whose dialogue precedes turn h) and
`--turn` (which turn is trained). Left out: pairs of earlier iterations, and optimiser states carried over between
iterations.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from lightrlhf import refuel
from lightrlhf.cli.args import ModelArgs, RolloutLogArgs, ServerArgs, check_args, check_at_least, check_data_dir
from lightrlhf.cli.errors import StopTraining, UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import mix_seed
from lightrlhf.data.splits import Row, check_vocabulary, save_split
from lightrlhf.generation.dialogue_pairs import (
    INVALID_REWARD,
    SIDES,
    PairArgs,
    branch,
    make_pair,
    nth_opening,
    side_of,
    split_of,
    turn_rollout,
)
from lightrlhf.generation.dialogues import (
    Dialogue,
    User,
    as_row,
    load_dialogues,
    roll_out,
    score_turns,
    sharing_columns,
)
from lightrlhf.generation.samplers import Alone, ServedSampler
from lightrlhf.generation.users import load_user
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.rewards.functions import RewardFunctions
from lightrlhf.rewards.loading import make_rewards
from lightrlhf.rewards.scorers import GroupScorer
from lightrlhf.storage.checkpoint import final_checkpoint, write_text
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl, to_json, write_jsonl
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.run_dir import data_dir_of, iterations, read_logged
from lightrlhf.storage.writing import writing
from lightrlhf.training.iterate import (
    as_given,
    check_one_machine,
    find_started_run,
    finish,
    keep_policy,
    kept_if_started,
    link_checkpoint,
    mean,
    open_directory,
    place_of,
    print_trial,
    run_on_devices,
    shared_flags,
    steps_of_iteration,
    stopped_by_signals,
    trial_directory,
)
from lightrlhf.training.model_card import model_card, quoted
from lightrlhf.training.provenance import given_objects
from lightrlhf.training.rollout_log import write_iteration
from lightrlhf.training.run import Metrics, OnStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 256  # dialogues between two writes
STAGES = ("generate", "rank", "tokenize", "train")
FILES = ("dialogues.jsonl", "rewards.jsonl", "pairs/report.json", "policy")  # of each stage


@dataclass(frozen=True, kw_only=True)
class IterativeRefuelArgs(refuel.RefuelArgs, PairArgs, ServerArgs, RolloutLogArgs):
    """Multi-turn RLHF in iterations: roll dialogues out, score them, learn from pairs."""

    ONCE: ClassVar[tuple[str, ...]] = ("stage",)  # a resumed run does all stages unless it is asked for one
    SPLIT_FROM: ClassVar[str] = "refuel"  # whose older runs may be resumed
    REMOVED: ClassVar[dict[str, tuple[Any, str]]] = {
        **refuel.RegressionArgs.REMOVED,
        "setting": ("simulated", refuel.ONLINE),
        "rollout_size": (32, refuel.ONLINE),
        "noptepochs": (4, f"{refuel.ONLINE} --ppo_epochs"),
        "kl_coef": (0.05, f"{refuel.ONLINE} --init_kl_coeff"),
        "penalty_reward_value": (-2.0, refuel.ONLINE),
        "whiten_rewards": (False, refuel.ONLINE),
    }

    experiment_name: str = "rlhf-iterative-refuel"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    stage: Literal["all", "generate", "rank", "tokenize", "train"] = "all"
    """One stage of the first unfinished iteration, or all stages of all iterations, also when a run is resumed."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    iterations: int = 1
    """Number of iterations, each from the policy of the previous one."""
    output_dir: str | None = None
    """Experiment dir itself, new, empty or of the run to go on with, instead of one below `log_dir`."""
    num_data: int = 0
    """Dialogues of an iteration, from an infinite seeded shuffle of the training split; 0 takes as many as it has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_user()
        self.check_servers()
        self.check_dialogues()
        self.check_pairs()
        self.check_rollout_log()
        check_one_machine(self)
        check_at_least(self, "iterations", 1)
        check_at_least(self, "num_data", 0)
        if self.dry_run and self.stage != "all":
            raise ValueError(
                f"--dry_run True with --stage {self.stage}: a dry run does all stages; leave one of them out"
            )


class PolicyCollapsed(UsageError):
    """Raised when the policy has collapsed: both replies are identical in every pair."""


# ---------------------------------------------------------------------------------------------------------- program
def train(
    args: IterativeRefuelArgs,
    *,
    dialogues: Mapping[str, Sequence[Dialogue]] | None = None,
    user: User | None = None,
    reward: RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by REFUEL in iterations; returns the experiment dir. Objects given here replace what the flags would load.

    dialogues: by split, `train` and `validation`; user: see `User`; reward: f(prompts, completions, **columns) -> a
    number or None for each; on_step: called with (iteration, metrics) after each iteration, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    check_args(args, IterativeRefuelArgs)
    started = time.perf_counter()
    is_given = dialogues is not None
    given = given_objects(dialogues=dialogues, user=user, reward=reward)
    args.check_start()
    args.check_reward(reward)
    if dialogues is None:
        check_data_dir(args)
    else:
        dialogues = sharing_columns(dialogues)

    @functools.cache
    def rows_of(split: str) -> Sequence[Dialogue]:  # read only if a stage needs them
        return load_dialogues(args.data_dir, split, args.verify) if dialogues is None else dialogues.get(split, [])

    # a missing or damaged file fails before any generation
    openings = rows_of("train") if args.stage in ("all", "generate") else None
    data = "given/dialogues" if is_given else args.data_dir
    work = f"{args.num_data:,} dialogues" if args.num_data else "all training dialogues"
    if args.dry_run:
        with trial_directory(args, "iterative_refuel", data, work) as (directory, policy):
            tokenizer = load_tokenizer(None if is_given else args.data_dir, policy, verify=args.verify)
            try_iteration(args, directory / "iteration-01", policy, tokenizer, rows_of("train"), user, reward)
        return place_of(args, data)
    directory, policy = open_directory(args, "iterative_refuel", data, work, given, args.SPLIT_FROM, openings)
    with stopped_by_signals(directory), lock_folder(directory):
        tokenizer = load_tokenizer(None if is_given else args.data_dir, policy, verify=args.verify)
        with kept_if_started(args, directory):
            evaluate_iteration(args, directory / "iteration-00", policy, tokenizer, rows_of, user, reward)
        for number in range(1, args.iterations + 1):
            folder = directory / f"iteration-{number:02d}"
            is_new = not (folder / "policy").is_dir()
            try:
                for stage in (STAGES if args.stage == "all" else (args.stage,)) if is_new else ():
                    if stage == "generate":
                        generate_dialogues(args, folder, number, policy, tokenizer, rows_of("train"), user)
                    elif stage == "rank":
                        rank(args, folder, reward)
                        log_iteration(args, folder, number, tokenizer)
                    elif stage == "tokenize":
                        tokenize(args, folder, number, tokenizer)
                    else:
                        train_iteration(args, folder, number, policy)
            except PolicyCollapsed as problem:
                print(f"{problem}; iteration {number - 1} is the last", flush=True)
                rows = read_logged(directory / "metrics.jsonl") or []
                return finish(args, directory, "", started, rows)
            if not (folder / "policy").is_dir():
                break  # a single stage before training
            policy = str(final_checkpoint(folder / "policy"))
            link_checkpoint(directory, number, policy)
            evaluate_iteration(args, folder, policy, tokenizer, rows_of, user, reward)
            metrics = report(args, directory)
            if is_new and args.stage != "all":
                break
            try:
                if on_step is not None and is_new:
                    on_step(number, metrics)
            except StopTraining:
                break
        return finish(
            args, directory, unfinished(args, directory), started, read_logged(directory / "metrics.jsonl") or []
        )


def try_iteration(
    args: IterativeRefuelArgs,
    folder: Path,
    policy: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Dialogue],
    user: User | None,
    reward: RewardFunctions | None,
) -> None:
    """Do the stages of the first iteration for as many dialogues as a step of training has, up to its first steps."""
    started, size = time.perf_counter(), args.num_data or len(rows)
    tried = min(args.mini_batch_size * args.devices, size)
    steps = steps_of_iteration(args, size)  # if each dialogue gives a pair to train on
    few = dataclasses.replace(args, num_data=tried, validation_percentage=0.0, epochs=None, max_steps=steps)
    generate_dialogues(few, folder, 1, policy, tokenizer, rows, user)
    rank(few, folder, reward)
    seconds, sample = time.perf_counter() - started, samples_of(folder, tokenizer, 1)[0]
    print_trial(args, seconds, tried, size, "dialogues", sample, tokenizer)
    tokenize(few, folder, 1, tokenizer)
    train_iteration(few, folder, 1, policy)


def unfinished(args: IterativeRefuelArgs, directory: Path) -> str:
    """Stages and iterations that were not run, such as `rank, tokenize and train of iteration 1, iteration 2`."""
    numbers = [n for n in range(1, args.iterations + 1) if not (directory / f"iteration-{n:02d}" / "policy").is_dir()]
    if not numbers:
        return ""
    folder = directory / f"iteration-{numbers[0]:02d}"
    stages = [stage for stage, file in zip(STAGES, FILES, strict=True) if not (folder / file).exists()]
    first = f"iteration {numbers[0]}"
    if len(stages) < len(STAGES):
        first = " and ".join(filter(None, (", ".join(stages[:-1]), stages[-1]))) + f" of {first}"
    return ", ".join([first, *(f"iteration {number}" for number in numbers[1:])])


def require_stage(path: Path, stage: str) -> None:
    """Raises: UsageError when the stage that writes `path` has not been run."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; run --stage {stage} first, or --stage all")


def rows_of_stage(path: Path, stage: str, size: int | None = None) -> list[Row]:
    """All rows of the file that a stage writes; size: how many it has, by default as its settings say.

    Raises: UsageError when the stage has not been run, or was interrupted.
    """
    require_stage(path, stage)
    rows = read_jsonl(path, may_be_cut=True)
    if size is None:
        size = int(json.loads(path.with_suffix(".args.json").read_text(encoding="utf-8"))["num_rows"])
    if len(rows) < size:
        raise UsageError(f"{path} has {len(rows)} of {size} rows; run --stage {stage} again, or --stage all")
    return rows


def load_frozen(args: IterativeRefuelArgs, source: str, tokenizer: Any, rows: Sequence[Dialogue]) -> Policy:
    """A policy in eval mode that knows the tokens of these dialogues."""
    frozen = ModelArgs(trust_remote_code=args.trust_remote_code)
    policy = load_policy(source, frozen, tokenizer).eval().to(find_device(args.accelerator))
    check_vocabulary([{"input_ids": row.input_ids} for row in rows], vocabulary_size(policy), args.data_dir)
    return policy


# ----------------------------------------------------------------------------------------------------------- stages
def generate_dialogues(
    args: IterativeRefuelArgs,
    folder: Path,
    number: int,
    policy: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Dialogue],
    user: User | None,
) -> None:
    """Write `dialogues.jsonl`: two dialogues a line that share a prefix, with the trained turn and the horizon."""
    size = args.num_data or len(rows)
    openings = [nth_opening(rows, place, args.seed) for place in range((number - 1) * size, number * size)]
    with JsonlWriter(folder / "dialogues.jsonl", {"iteration": number, "num_rows": size}) as writer:
        if len(writer.rows) < size:
            model = load_frozen(args, policy, tokenizer, rows)
            user = user or load_user(args, find_device(args.accelerator), args.rollout_mini_batch_size)
            alone = Alone(args)
            try:
                sample = ServedSampler(alone, model, tokenizer) if args.rollout_server else None
                work = functools.partial(branch, args, model, tokenizer, user, sample)
                writer.extend(openings, CHUNK, work, f"generate {number}", " dialogues")
            finally:
                alone.close()


def rank(args: IterativeRefuelArgs, folder: Path, reward: RewardFunctions | None) -> None:
    """Write `rewards.jsonl`: the score of every prefix of both dialogues, `INVALID_REWARD` where there is none."""
    rows = rows_of_stage(folder / "dialogues.jsonl", "generate")
    content = hashlib.sha256((folder / "dialogues.jsonl").read_bytes()).hexdigest()
    with JsonlWriter(folder / "rewards.jsonl", {"dialogues_sha256": content}) as writer:
        if len(writer.rows) < len(rows):
            scorer = make_rewards(
                args, find_device(args.accelerator), args.rollout_mini_batch_size, reward, grouped=True
            ).of_groups
            writer.extend(rows, CHUNK, functools.partial(score_pairs, scorer))


def score_pairs(scorer: GroupScorer, rows: Sequence[Row]) -> list[Row]:
    """The scores of every prefix of both dialogues of each row, as JSON rows."""
    scores = score_turns(scorer, [side_of(row, side) for row in rows for side in SIDES])
    values = [[INVALID_REWARD if score is None else score for score in turns] for turns in scores]
    return [
        {"index": row["index"], "first": first, "second": second}
        for row, first, second in zip(rows, values[::2], values[1::2])
    ]


def log_iteration(args: IterativeRefuelArgs, folder: Path, number: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write both sides of the first dialogues to `rollouts.jsonl` of the experiment dir."""
    if args.log_rollouts:
        write_iteration(folder.parent, number, number - 1, samples_of(folder, tokenizer, args.log_rollouts))


def samples_of(folder: Path, tokenizer: PreTrainedTokenizerBase, number: int) -> list[Row]:
    """Both sides of the first dialogues of an iteration and their scores, as rows of `rollouts.jsonl`."""
    rows, rewards = (read_jsonl(folder / name, may_be_cut=True) for name in ("dialogues.jsonl", "rewards.jsonl"))
    logged = []
    for group, (row, scores) in enumerate(zip(rows[:number], rewards)):
        for side in SIDES:
            last = min(row["horizon"], len(scores[side]) - 1)
            score = scores[side][last] if scores[side] else INVALID_REWARD
            score = None if score == INVALID_REWARD else score
            logged.append(turn_rollout(tokenizer, side_of(row, side), row["turn"], group, score))
    return logged[:number]


def tokenize(args: IterativeRefuelArgs, folder: Path, number: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write `pairs/refuel_{train,validation,test}.pt` and `report.json` with how many dialogues were dropped and why.

    Raises: UsageError when no pair is left to train on; PolicyCollapsed when training has led to that.
    """
    if (folder / "pairs" / "report.json").is_file():
        return
    rows = rows_of_stage(folder / "dialogues.jsonl", "generate")
    rewards = rows_of_stage(folder / "rewards.jsonl", "rank", len(rows))
    counts: Counter[str] = Counter()
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for row, scores in zip(rows, rewards, strict=True):
        pair = make_pair(args, row, scores)
        counts["pairs" if isinstance(pair, dict) else pair] += 1
        if isinstance(pair, dict):
            splits[split_of(args, row)].append(pair)
    summary = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    if not splits["train"]:
        has_collapsed = number > 1 and set(counts) == {"the same reply twice"}
        error = PolicyCollapsed if has_collapsed else UsageError
        raise error(f"{folder / 'dialogues.jsonl'} gives no pair to train on: {summary}")
    for split, members in splits.items():
        if members:
            save_split(folder / "pairs", "refuel", split, members)
    with writing(folder / "pairs" / "tokenizer"):
        store_tokenizer(tokenizer, folder / "pairs")
    firsts = [scores["first"] for scores in rewards]
    results: Row = {"counts": dict(counts), "rows": {split: len(members) for split, members in splits.items()}}
    results["reward_queries"] = sum(len(scores[side]) for scores in rewards for side in SIDES)
    results["score_by_turn"] = [mean(s[h] for s in firsts if len(s) > h) for h in range(max(map(len, firsts)))]
    write_text(folder / "pairs" / "report.json", json.dumps(results, indent=1))
    print(f"{folder / 'pairs'}: {summary}")


def train_iteration(args: IterativeRefuelArgs, folder: Path, number: int, policy: str) -> None:
    """Train from `policy` on the pairs; the run is in `training/` until it is finished, then `policy/`."""
    require_stage(folder / "pairs" / "report.json", "tokenize")
    changes = {
        "data_dir": str(folder / "pairs"),
        "log_dir": str(folder),
        "experiment_name": "training",
        "output_dir": None,
        "sft_experiment_dir": policy,
        "model_name": None,
        "push_to_hub": None,
        "resume_from": find_started_run(folder),
        "seed": mix_seed(args.seed, number) % 2**31,
    }
    training = refuel.RefuelArgs(**shared_flags(args, refuel.RefuelArgs) | changes)
    run_on_devices(refuel.train, training, args.devices)
    if not args.dry_run:
        keep_policy(folder)


# ------------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_iteration(
    args: IterativeRefuelArgs,
    folder: Path,
    policy: str,
    tokenizer: PreTrainedTokenizerBase,
    rows_of: Callable[[str], Sequence[Dialogue]],
    user: User | None,
    reward: RewardFunctions | None,
) -> None:
    """Write `evaluation.json`, the mean score after each turn of held-out dialogues, unless it exists.

    All policies get the same openings, noise and user; the scorer is that of training.
    """
    if not args.eval_dialogues or (folder / "evaluation.json").is_file():
        return
    rows = [row.before(0) for row in rows_of("validation")[: args.eval_dialogues]]
    if not rows:
        return
    device, slots = find_device(args.accelerator), args.rollout_mini_batch_size
    model = load_frozen(args, policy, tokenizer, rows)
    user = user or load_user(args, device, slots)
    dialogues = roll_out(model, tokenizer, rows, args.num_turns, user, args, args.seed, slots)
    scores = score_turns(make_rewards(args, device, slots, reward, grouped=True).of_groups, dialogues)
    lengths = [end - start for row in dialogues for start, end in row.turn_spans]
    by_turn = [[turns[h] for turns in scores if len(turns) > h] for h in range(args.num_turns)]
    results = {
        "score_by_turn": [mean(score for score in turn if score is not None) for turn in by_turn],
        "mean_length": mean(lengths),
        "truncated_ratio": mean(flag for row in dialogues for flag in row.truncated),
    }
    write_jsonl(folder / "evaluation.jsonl", [{"scores": s, **as_row(row)} for row, s in zip(dialogues, scores)])
    write_text(folder / "evaluation.json", to_json(results, indent=1))


def report(args: IterativeRefuelArgs, directory: Path) -> Metrics:
    """Write `results.json`, `metrics.jsonl` (its step is the iteration) and the model card, and print the last scores.

    Returns the metrics of the last iteration.
    """
    rows, queries = [], 0
    for number, folder in iterations(directory).items():
        row: Row = {"iteration": number}
        if (folder / "pairs" / "report.json").is_file():
            pairs = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
            queries += pairs["reward_queries"]
            row |= {"pairs": pairs["counts"]["pairs"], "rollout_score_by_turn": pairs["score_by_turn"]}
        if (folder / "evaluation.json").is_file():
            row |= json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        rows.append({**row, "reward_queries": queries})
    write_text(directory / "results.json", to_json(rows, indent=1))
    logged = [
        {
            "step": row["iteration"],
            **{f"val/score_turn_{h}": score for h, score in enumerate(row.get("score_by_turn", []), start=1)},
            **{f"completions/{name}": row[name] for name in ("mean_length", "truncated_ratio") if name in row},
        }
        for row in rows
    ]
    write_jsonl(directory / "metrics.jsonl", logged)
    write_text(directory / "README.md", card(args, directory, rows))
    if "score_by_turn" in rows[-1]:
        scores = " ".join(f"{value:.3f}" for value in rows[-1]["score_by_turn"])
        print(f"iteration {rows[-1]['iteration']}: score by turn {scores}", flush=True)
    return {name: value for name, value in logged[-1].items() if name != "step"}


def card(args: IterativeRefuelArgs, directory: Path, rows: Sequence[Row]) -> str:
    """The model card, with the scores by turn of each iteration."""
    stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    turns = max((len(row.get("score_by_turn", [])) for row in rows), default=0)
    table = ["| iteration | " + " | ".join(f"score at turn {h + 1}" for h in range(turns)) + " | reward queries |"]
    table += ["|---" * (turns + 2) + "|"]
    for row in rows:
        scores = [f"{value:.3f}" for value in row.get("score_by_turn", [])]
        table += [f"| {row['iteration']} | {' | '.join(scores)} | {row['reward_queries']} |"]
    data = data_dir_of(str(directory)) or "given dialogues"
    start = quoted(as_given(args, stored["initial"]))
    summary = f"{start} trained by `lightrlhf.iterative_refuel` on {quoted(data)}."
    flags = {name: value for name, value in stored.items() if name not in ("program", "initial", "given", "began")}
    return model_card(stored["experiment_name"], "iterative_refuel", summary, flags, table, stored.get("given"))


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(IterativeRefuelArgs, argv)))


if __name__ == "__main__":
    main()
