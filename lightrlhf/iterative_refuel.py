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

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from lightrlhf import refuel
from lightrlhf.cli.errors import StopTraining, UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data import batch, splits
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation import dialogue_pairs, samplers, users
from lightrlhf.generation import dialogues as talks
from lightrlhf.generation.dialogue_pairs import INVALID_REWARD, SIDES, side_of
from lightrlhf.generation.dialogues import Dialogue, User, as_row, load_dialogues, roll_out, score_turns, share_columns
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.rewards import functions, loading, scorers
from lightrlhf.storage import jsonl, lazy, run_dir, seals, writing
from lightrlhf.storage.jsonl import Row
from lightrlhf.training import iterated, iterated_dir, model_card, provenance
from lightrlhf.training.iterated import Iterated, Iteration, Stage
from lightrlhf.training.run import Metrics, OnStep

CHUNK = 256  # dialogues between two writes


@dataclass(frozen=True, kw_only=True)
class IterativeRefuelArgs(refuel.RefuelArgs, dialogue_pairs.PairArgs, iterated_dir.IteratedArgs):
    """Multi-turn RLHF in iterations: roll dialogues out, score them, learn from pairs."""

    experiment_name: str = "rlhf-iterative-refuel"
    """Folder below `log_dir` for the runs of one algorithm."""
    output_dir: str | None = None
    """Experiment dir, instead of one below `log_dir`: new, empty, or of a run to continue."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    stage: Literal["all", "generate", "rank", "tokenize", "train"] = flag("all", excludes={"dry_run": True}, once=True)
    """Run one stage of the first unfinished iteration, or all stages of all iterations."""
    iterations: int = 1
    """Number of iterations, each from the policy of the previous one."""
    num_data: int = at_least(0, 0)
    """Dialogues per iteration, from an infinite seeded shuffle of the training split; 0: the size of the split."""


# ---------------------------------------------------------------------------------------------------------- program
def train(
    args: IterativeRefuelArgs,
    *,
    dialogues: Mapping[str, Sequence[Dialogue]] | None = None,
    user: User | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by REFUEL in iterations; returns the experiment dir. Objects given here replace what the flags would load.

    dialogues: by split, `train` and `validation`; user: see `User`; reward: f(prompts, completions, **columns) -> a
    number or None for each; on_step: called with (iteration, metrics) after each iteration, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    check_args(args, IterativeRefuelArgs, {"reward": reward})
    given = provenance.describe_given(dialogues=dialogues, user=user, reward=reward)
    if dialogues is None:
        splits.check_data_dir(args)
    else:
        dialogues = share_columns(dialogues)

    @functools.cache
    def rows_of(split: str) -> Sequence[Dialogue]:  # read only if a stage needs them
        if dialogues is not None:
            return dialogues.get(split, [])
        with splits.validation_needed_unless("--eval_dialogues"):
            return load_dialogues(args.data_dir, split, args.verify)

    # a missing or damaged file fails before any generation
    openings = rows_of("train") if args.stage in ("all", "generate") else None
    run = Iterated(
        args,
        "iterative_refuel",
        args.data_dir if dialogues is None else None,
        size=args.num_data or len(openings or ()),
        unit="dialogues",
        size_flag="num_data",
        work=f"{args.num_data:,} dialogues" if args.num_data else "all training dialogues",
        given=given,
        rows=openings,
    )
    with run.open():
        stages: tuple[Stage[IterativeRefuelArgs], ...] = (
            Stage("generate", "dialogues.jsonl", lambda it: generate_dialogues(it, rows_of("train"), user)),
            Stage("rank", "rewards.jsonl", lambda it: rank(it, reward), samples=first_samples),
            Stage("tokenize", "pairs/report.json", tokenize),
            Stage("train", "policy", train_iteration),
        )
        run.do(stages, lambda it: evaluate(it, rows_of, user, reward), report, on_step, only=args.stage)
        return run.finish(with_table=True)


def require_stage(path: Path, stage: str) -> None:
    """Raises: UsageError when the stage that writes `path` has not been run."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; run --stage {stage} first, or --stage all")


def rows_of_stage(path: Path, stage: str, size: int | None = None) -> Sequence[Row]:
    """All rows of the file that a stage writes, read when they are needed; size: how many, by default by its settings.

    Raises: UsageError when the stage has not been run, or was interrupted.
    """
    require_stage(path, stage)
    rows = jsonl.open_jsonl(path, may_be_cut=True)
    if size is None:
        size = int(json.loads(path.with_suffix(".args.json").read_text(encoding="utf-8"))["num_rows"])
    if len(rows) < size:
        raise UsageError(f"{path} has {len(rows)} of {size} rows; run --stage {stage} again, or --stage all")
    return rows


def load_frozen(args: IterativeRefuelArgs, source: str, tokenizer: Tokenizer, rows: Sequence[Dialogue]) -> Policy:
    """A policy in eval mode that knows the tokens of these dialogues."""
    frozen = FrozenArgs(trust_remote_code=args.trust_remote_code)
    policy = load_policy(source, frozen, tokenizer).eval().to(find_device(args.accelerator))
    talks.check_embedded(rows, policy, args.data_dir)
    return policy


# ----------------------------------------------------------------------------------------------------------- stages
def generate_dialogues(it: Iteration[IterativeRefuelArgs], rows: Sequence[Dialogue], user: User | None) -> None:
    """Write `dialogues.jsonl`: two dialogues a line that share a prefix, with the trained turn and the horizon."""
    args, size = it.args, it.args.num_data or len(rows)
    indices = range((it.number - 1) * size, it.number * size)
    openings = lazy.Lazy(indices, lambda index: dialogue_pairs.nth_opening(rows, index, args.seed))
    with jsonl.JsonlWriter(it.folder / "dialogues.jsonl", {"iteration": it.number, "num_rows": size}) as writer:
        if len(writer.rows) < size:
            policy = load_frozen(args, it.policy, it.tokenizer, rows)
            user = user or users.load_user(args, find_device(args.accelerator), args.rollout_mini_batch_size)
            with ExitStack() as stack:
                sample = None
                if args.rollout_server:
                    sample = stack.enter_context(closing(samplers.ServedSampler(args, policy, it.tokenizer)))
                work = functools.partial(dialogue_pairs.branch, args, policy, it.tokenizer, user, sample)
                writer.extend(openings, CHUNK, work, f"generate {it.number}", " dialogues")


def rank(it: Iteration[IterativeRefuelArgs], reward: functions.RewardFunctions | None) -> None:
    """Write `rewards.jsonl`: the score of every prefix of both dialogues, `INVALID_REWARD` where it is missing."""
    rows = rows_of_stage(it.folder / "dialogues.jsonl", "generate")
    content = seals.sha256(it.folder / "dialogues.jsonl")
    with jsonl.JsonlWriter(it.folder / "rewards.jsonl", {"dialogues_sha256": content}) as writer:
        if len(writer.rows) < len(rows):
            writer.extend(rows, CHUNK, functools.partial(score_pairs, load_scorer(it.args, reward)))


def load_scorer(args: IterativeRefuelArgs, reward: functions.RewardFunctions | None) -> scorers.GroupScorer:
    """The scorer of dialogues."""
    settings = (args, find_device(args.accelerator), args.rollout_mini_batch_size, reward)
    return loading.load_rewards(*settings, wrap_prompts=args.rm_chat_template, grouped=True).of_groups


def score_pairs(scorer: scorers.GroupScorer, rows: Sequence[Row]) -> list[Row]:
    """The scores of every prefix of both dialogues of each row, as JSON rows."""
    scores = score_turns(scorer, [side_of(row, side) for row in rows for side in SIDES])
    values = [[INVALID_REWARD if score is None else score for score in turns] for turns in scores]
    return [
        {"index": row["index"], "first": first, "second": second}
        for row, first, second in zip(rows, values[::2], values[1::2])
    ]


def first_samples(it: Iteration[IterativeRefuelArgs], number: int) -> list[Row]:
    """Both sides of the first dialogues of an iteration and their scores, as rows of `rollouts.jsonl`."""
    files = [it.folder / name for name in ("dialogues.jsonl", "rewards.jsonl")]
    rows, rewards = (jsonl.open_jsonl(file, may_be_cut=True) for file in files)
    logged = []
    for group, (row, scores) in enumerate(zip(rows[:number], rewards)):
        for side in SIDES:
            last = min(row["horizon"], len(scores[side]) - 1)
            score = scores[side][last] if scores[side] else INVALID_REWARD
            score = None if score == INVALID_REWARD else score
            sample = dialogue_pairs.turn_rollout(it.tokenizer, side_of(row, side), row["turn"], group, score)
            logged.append({"version": it.number - 1, **sample})
    return logged[:number]


def tokenize(it: Iteration[IterativeRefuelArgs]) -> None:
    """Write `pairs/refuel_{train,validation,test}.pt` and `report.json` with how many dialogues were dropped and why.

    Raises: UsageError when no pair is left to train on; StopTraining when the policy has collapsed: training has made
    both replies identical in every pair.
    """
    args, folder = it.args, it.folder
    if (folder / "pairs" / "report.json").is_file():
        return
    rows = rows_of_stage(folder / "dialogues.jsonl", "generate")
    rewards = rows_of_stage(folder / "rewards.jsonl", "rank", len(rows))
    counts: Counter[str] = Counter()
    by_split: dict[str, list[int]] = {"train": [], "validation": [], "test": []}  # places
    for place, (row, scores) in enumerate(zip(rows, rewards, strict=True)):
        pair = dialogue_pairs.make_pair(args, row, scores)
        counts["pairs" if isinstance(pair, dict) else pair] += 1
        if isinstance(pair, dict):
            by_split["train" if args.dry_run else dialogue_pairs.split_of(args, row)].append(place)  # a dry run has few
    summary = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    if not by_split["train"]:
        has_collapsed = it.number > 1 and set(counts) == {"the same reply twice"}
        raise (StopTraining if has_collapsed else UsageError)(
            f"{folder / 'dialogues.jsonl'} gives no pair to train on: {summary}"
        )
    for split, members in by_split.items():
        if members:
            pairs = lazy.Lazy(members, lambda place: dialogue_pairs.make_pair(args, rows[place], rewards[place]))
            splits.save_split(folder / "pairs", "refuel", split, cast(lazy.Lazy[Row], pairs))
    with writing.writing(folder / "pairs" / "tokenizer"):
        store_tokenizer(it.tokenizer, folder / "pairs")
    results: Row = {"counts": dict(counts), "rows": {split: len(members) for split, members in by_split.items()}}
    results["reward_queries"] = sum(len(scores[side]) for scores in rewards for side in SIDES)
    results["score_by_turn"] = means_by_turn(scores["first"] for scores in rewards)
    writing.write_text(folder / "pairs" / "report.json", jsonl.to_json(results, indent=1))
    print(f"{folder / 'pairs'}: {summary}")


def train_iteration(it: Iteration[IterativeRefuelArgs]) -> None:
    """Train from the last policy on the pairs; see `train_policy`."""
    require_stage(it.folder / "pairs" / "report.json", "tokenize")
    changes = {"seed": batch.mix_seed(it.args.seed, it.number) % 2**31, "model_name": None}
    iterated.train_policy(it, refuel.train, refuel.RefuelArgs, sft_experiment_dir=it.policy, **changes)


def means_by_turn(dialogues: Iterable[Sequence[float | None]]) -> list[float]:
    """Mean valid score after each turn that any of the dialogues has; NaN without one."""
    rows = list(dialogues)
    turns = [[row[h] for row in rows if len(row) > h] for h in range(max(map(len, rows), default=0))]
    return [iterated.mean(score for score in turn if score not in (None, INVALID_REWARD)) for turn in turns]


# ------------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(
    it: Iteration[IterativeRefuelArgs],
    rows_of: Callable[[str], Sequence[Dialogue]],
    user: User | None,
    reward: functions.RewardFunctions | None,
) -> Row | None:
    """Mean scores after each turn of held-out dialogues; writes the dialogues to `evaluation.jsonl`.

    All policies get the same openings, noise and user; the scorer is the one of training.
    """
    args = it.args
    rows = [row.before(0) for row in rows_of("validation")[: args.eval_dialogues]] if args.eval_dialogues else []
    if not rows:
        return None
    device, slots = find_device(args.accelerator), args.rollout_mini_batch_size
    policy = load_frozen(args, it.policy, it.tokenizer, rows)
    user = user or users.load_user(args, device, slots)
    played = roll_out(policy, it.tokenizer, rows, args.num_turns, user, args, args.seed, slots)
    scores = score_turns(load_scorer(args, reward), played)
    lengths = [end - start for row in played for start, end in row.turn_spans]
    results: Row = {
        "score_by_turn": means_by_turn([*scores, [None] * args.num_turns]),
        "mean_length": iterated.mean(lengths),
        "truncated_ratio": iterated.mean(flag for row in played for flag in row.truncated),
    }
    if lost := sum(not turns for turns in scores):
        results["without_room"] = lost
        print(f"{lost:,} of {len(rows):,} held-out openings leave no room for a reply and are left out", flush=True)
    records = [{"scores": turns, **as_row(row)} for row, turns in zip(played, scores)]
    jsonl.write_jsonl(it.folder / "evaluation.jsonl", records)
    return results


def results_of(directory: Path) -> list[Row]:
    """One row per iteration: its pairs and scores, and the reward queries up to it."""
    rows, queries = [], 0
    for number, folder in run_dir.iterations(directory).items():
        row: Row = {"iteration": number}
        if pairs := iterated.read_json(folder / "pairs" / "report.json"):
            queries += pairs["reward_queries"]
            row |= {"pairs": pairs["counts"]["pairs"], "rollout_score_by_turn": pairs["score_by_turn"]}
        rows.append({**row, **iterated.read_json(folder / "evaluation.json"), "reward_queries": queries})
    return rows


def report(run: Iterated[IterativeRefuelArgs]) -> Metrics:
    """Write `results.json`, `metrics.jsonl` and the model card, and print the last scores.

    Returns the metrics of the last iteration.
    """
    rows = results_of(run.directory)
    metrics = [
        jsonl.finite_metrics(
            {
                "step": row["iteration"],
                **{f"val/score_turn_{h}": score for h, score in enumerate(row.get("score_by_turn", []), start=1)},
                **{f"completions/{name}": row[name] for name in ("mean_length", "truncated_ratio") if name in row},
            }
        )
        for row in rows
    ]
    last = run.write_results(rows, metrics)
    writing.write_text(run.directory / "README.md", card(run.args, run.directory, rows))
    if "score_by_turn" in rows[-1]:
        print(f"iteration {rows[-1]['iteration']}: score by turn {' '.join(score_texts(rows[-1]))}", flush=True)
    return last


def score_texts(row: Row) -> list[str]:
    """The scores by turn of an iteration, - where no dialogue has one."""
    return ["-" if score is None else f"{score:.3f}" for score in row.get("score_by_turn", [])]


def card(args: IterativeRefuelArgs, directory: Path, rows: Sequence[Row]) -> str:
    """The model card, with the scores by turn of each iteration."""
    stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    turns = max((len(row.get("score_by_turn", [])) for row in rows), default=0)
    table = ["| iteration | " + " | ".join(f"score at turn {h + 1}" for h in range(turns)) + " | reward queries |"]
    table += ["|---" * (turns + 2) + "|"]
    for row in rows:
        table += [f"| {row['iteration']} | {' | '.join(score_texts(row))} | {row['reward_queries']} |"]
    data = run_dir.data_dir_of(str(directory)) or "given dialogues"
    start = model_card.quote(iterated_dir.as_given(args, stored["initial"]))
    summary = f"{start} trained by `lightrlhf.iterative_refuel` on {model_card.quote(data)}."
    flags = {name: value for name, value in stored.items() if name not in ("program", "initial", "given", "began")}
    title, given = stored["experiment_name"], stored.get("given")
    return model_card.model_card(title, "iterative_refuel", summary, flags, table, given)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(IterativeRefuelArgs, argv)))


if __name__ == "__main__":
    main()
