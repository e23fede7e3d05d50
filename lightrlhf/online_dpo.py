"""Online preference learning: respond, score, choose pairs, train, repeat (Dong et al. 2024, 2405.07863).

Each iteration takes prompts that no earlier one has used, samples K responses to each from the previous iteration's
policy, scores them, chooses a pair per prompt and trains that policy on the pairs, by DPO or any other loss of
`lightrlhf.dpo`. The reference is the initial policy (`--reference moving`: the previous iteration's, which is mirror
descent and less stable). `--training_step raft` instead trains on the best response to each prompt by cross-entropy
(Dong et al. 2023, 2304.06767), without prompts whose scores are all equal, which have no best one. With `--responder
initial` the program is its own control: offline learning from responses of the initial policy, at equal prompts, pairs
and reward queries.

Each stage is a separate program (`generate`, `annotate`, `dpo` or `sft`) and leaves its files:

    iteration-02/prompts.jsonl  responses.jsonl  rewards.jsonl  pairs/  policy/  evaluation.json  evaluation.jsonl

Finished stages are skipped, so `--resume_from DIR` gives the same result as an uninterrupted run. Left out: data of
earlier iterations (pairs are used once), and optimiser states carried over between iterations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf import annotate, dpo, generate, sft
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import FrozenArgs, RewardArgs, SamplingArgs, ServerArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data import batch, responses, splits, tokens
from lightrlhf.data.flat import Rows, share_columns
from lightrlhf.data.rows import Given, load_rows
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation import answers
from lightrlhf.gguf import files
from lightrlhf.maths import ops, preference
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve, starting_model
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards import encoding, functions, loading, scorers
from lightrlhf.storage import jsonl, results, run_dir, writing
from lightrlhf.storage.jsonl import Row
from lightrlhf.training import iterated, iterated_dir, launch, provenance, rollout_log
from lightrlhf.training.iterated import Iterated, Iteration, Stage
from lightrlhf.training.run import Metrics, OnStep


def check_responder(name: str, flag: str) -> None:
    """Raises: UsageError when the policy that responds is neither `last` nor `initial` nor a model."""
    if name not in ("last", "initial"):
        files.check_model_exists(name, f"{flag} (last, initial or a model)")


@dataclass(frozen=True, kw_only=True)
class OnlineDPOArgs(dpo.DPOLossArgs, RewardArgs, SamplingArgs, iterated_dir.IteratedArgs):
    """Online preference learning: respond, score, choose pairs, train, in iterations."""

    experiment_name: str = "rlhf-online-dpo"
    """Folder below `log_dir` for the runs of one algorithm."""
    output_dir: str | None = None
    """Experiment dir, instead of one below `log_dir`: new, empty, or of a run to continue."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    prompts_per_iteration: int | None = at_least(1, None)
    """New prompts of each iteration. Default: divide the training prompts evenly."""
    num_generations: int = at_least(2, 8)
    """Responses per prompt (K)."""
    rm_chat_template: bool = flag(False, show="rarely")
    """Wrap plain-text prompts as user messages of the reward model's chat template."""
    normalize_rewards: bool = flag(True, show="rarely")
    """Standardise scores by the mean and deviation stored with the reward model; soft labels need False."""
    choose_type: Literal["max_random", "max_min", "max_max", "random", "max_min_p"] = "max_min"
    """Pair of a prompt: the best with a random other, the worst or the second; any two; `max_min` after a penalty."""
    length_penalty: float = at_least(0, 0.0, needs={"choose_type": "max_min_p"}, show="rarely")
    """Reward subtracted per token of length, for `max_min_p`."""
    training_step: Literal["dpo", "raft"] = flag("dpo", show="rarely")
    """Train on pairs, or (raft) by cross-entropy on the best response to each prompt with unequal scores."""
    reference: Literal["initial", "moving"] = flag("initial", excludes={"ref_model": ...})
    """Reference policy: the initial policy (or `ref_model`), or the previous iteration's."""
    responder: str = flag("last", check=check_responder, show="rarely")
    """Policy that samples responses: `last` (online), `initial` (offline), or the directory of another."""
    rollout_mini_batch_size: int = at_least(1, 64, show="rarely")
    """Slots of the generation engine, and the most rows per pass of the reward model."""
    eval_prompts: int = at_least(1, 200, show="rarely")
    """Number of validation prompts to evaluate on after each iteration, from the first on."""
    epochs: int | None = None
    """Passes over the pairs of an iteration; 1 when `max_steps` is not given either."""
    lr_warmup_ratio: float | None = 0.1
    """Fraction of an iteration's steps for a warm-up from 0; a fresh Adam at the full rate can destroy a policy."""


def train(
    args: OnlineDPOArgs,
    *,
    prompts: Given | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by online preference learning; returns the experiment dir.

    Objects given here replace what the flags would load. prompts: see `data.rows`; reward: f(prompts, completions,
    **columns) -> a number or None for each; on_step: called with (iteration, metrics) after each iteration, may raise
    `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    check_args(args, OnlineDPOArgs, {"reward": reward})
    if prompts is None:
        splits.check_data_dir(args)
    data_dir = args.data_dir if prompts is None else None
    tokenizer = None if prompts is None else load_tokenizer(None, starting_model(args)[0])
    rows = load_rows("prompts", "train", args.data_dir, prompts, tokenizer, args.verify)
    shards = prompt_shards(args, rows)
    held_out = load_rows("prompts", "validation", args.data_dir, prompts, tokenizer, args.verify)[: args.eval_prompts]
    share_columns([rows, held_out])
    run = Iterated(
        args,
        "online_dpo",
        data_dir,
        size=len(shards[0]),
        unit="prompts",
        size_flag="prompts_per_iteration",
        work=f"{len(shards[0]):,} prompts, {args.num_generations} responses to each",
        given=provenance.describe_given(prompts=prompts, reward=reward),
        rows=rows,
        tokenizer=tokenizer,
    )
    with run.open():
        stages: tuple[Stage[OnlineDPOArgs], ...] = (
            Stage("respond", "responses.jsonl", lambda it: respond(it, prompt_shards(it.args, rows)[it.number - 1])),
            Stage("choose", "rewards.jsonl", lambda it: score_and_choose(it, reward), samples=first_samples),
            Stage("learn", "policy", learn),
        )
        run.do(stages, lambda it: evaluate(it, held_out, reward), report, on_step)
        return run.finish()


# ----------------------------------------------------------------------------------------------------------- stages
def prompt_shards(args: OnlineDPOArgs, rows: Rows) -> list[Rows]:
    """The prompts of each iteration: shards of one seeded order, each prompt at most once.

    Raises: UsageError when there are too few.
    """
    size = args.prompts_per_iteration or len(rows) // args.iterations
    if not size or size * args.iterations > len(rows):
        raise UsageError(
            f"--iterations {args.iterations} of --prompts_per_iteration {max(size, 1)} need "
            f"{max(size, 1) * args.iterations} prompts, but {args.data_dir} has {len(rows)}; "
            f"try --prompts_per_iteration {max(len(rows) // args.iterations, 1)}"
        )
    order = batch.epoch_order(len(rows), args.seed, 0)
    return [rows.select(order[t * size : (t + 1) * size]) for t in range(args.iterations)]


def respond(it: Iteration[OnlineDPOArgs], prompts: Sequence[Row]) -> None:
    """Write `prompts.jsonl` and `responses.jsonl`."""
    args, folder = it.args, it.folder
    responder = {"last": it.policy, "initial": it.initial}.get(args.responder) or resolve(args.responder, "--responder")
    tokenizer = load_tokenizer(it.data_dir, responder, verify=args.verify)
    rows = []
    for row in prompts:
        ids = torch.as_tensor(row["input_ids"]).tolist()
        rows.append({**row["columns"], "prompt": tokens.decode(tokenizer, ids), "prompt_ids": ids})
    jsonl.write_jsonl(folder / "prompts.jsonl", rows)
    devices = 1 if args.rollout_server else args.devices  # one process asks all servers
    stage = generate.GenerateArgs(
        **iterated.shared_flags(args, SamplingArgs),
        **iterated.shared_flags(args, ServerArgs),
        model_name=responder,
        trust_remote_code=args.trust_remote_code,
        prompts_file=str(folder / "prompts.jsonl"),
        num_prompts=len(rows),
        num_generations=args.num_generations,
        output_file=str(folder / "responses.jsonl"),
        rollout_mini_batch_size=args.rollout_mini_batch_size,
        seed=(args.seed * 1000 + it.number) % 2**32,
        accelerator=args.accelerator,
        devices=devices,
    )
    launch.run_on_devices(generate.run, stage, devices)


def score_and_choose(it: Iteration[OnlineDPOArgs], reward: functions.RewardFunctions | None) -> None:
    """Write `rewards.jsonl`, and the pairs into `pairs/`."""
    args, folder = it.args, it.folder
    stage = annotate.AnnotateArgs(
        **iterated.shared_flags(args, RewardArgs),
        responses_file=str(folder / "responses.jsonl"),
        output_file=str(folder / "rewards.jsonl"),
        rm_chat_template=args.rm_chat_template,
        normalize_rewards=args.normalize_rewards,
        trust_remote_code=args.trust_remote_code,
        rollout_mini_batch_size=args.rollout_mini_batch_size,
        choose_type=args.choose_type,
        length_penalty=args.length_penalty,
        output_dir=str(folder / "pairs"),
        data_dir=it.data_dir,
        verify=args.verify,
        tokenizer_name=None if it.data_dir else it.initial,
        seed=args.seed,
        accelerator=args.accelerator,
    )
    annotate.run(stage, reward=reward)


def first_samples(it: Iteration[OnlineDPOArgs], number: int) -> list[Row]:
    """The first responses of an iteration and their scores, as rows of `rollouts.jsonl`."""
    version = {"last": it.number - 1, "initial": 0}.get(it.args.responder)
    logged = []
    for group, row in enumerate(jsonl.read_jsonl(it.folder / "rewards.jsonl", may_be_cut=True)[:number]):
        columns = {name: value for name, value in row.items() if name not in responses.ROW}
        for ids, score, truncated in zip(row["response_ids"], row["rewards"], row["truncated"]):
            given = {"score": score, "truncated": truncated, "columns": columns}
            sample = rollout_log.rollout_row(it.tokenizer, row["prompt_ids"], ids, group=group, **given)
            logged.append({"version": version, **sample})
    return logged[:number]


def learn(it: Iteration[OnlineDPOArgs]) -> None:
    """Train from the last policy on the pairs, or by cross-entropy on the best responses; see `train_policy`."""
    args = it.args
    changes: dict[str, Any] = {"seed": (args.seed * 1000 + it.number) % 2**32, "eval_interval": 0}
    if args.training_step == "raft":
        write_best(it.folder, it.tokenizer)
        iterated.train_policy(it, sft.train, sft.SFTArgs, model_name=it.policy, use_targets=True, **changes)
    else:
        fixed = args.ref_model or it.initial
        is_fixed = args.reference == "initial" and args.loss_type not in preference.REFERENCE_FREE
        changes |= {"sft_experiment_dir": it.policy, "model_name": None, "ref_model": fixed if is_fixed else None}
        iterated.train_policy(it, dpo.train, dpo.DPOArgs, **changes)


def write_best(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the best response to each prompt to `pairs/finetune_train.pt`, and the counts to the pairs' report.

    A prompt whose scores are all equal has no best response, be they all wrong, and is left out.
    Raises: UsageError when no prompt is left.
    """
    encoder = encoding.Encoding(tokenizer)
    rows = []
    counts: Counter[str] = Counter()
    for row in jsonl.read_jsonl(folder / "rewards.jsonl"):
        scored = zip(row["rewards"], encoding.samples_of_row(row))
        valid = [(reward, sample) for reward, sample in scored if reward is not None and sample is not None]
        if len({reward for reward, _ in valid}) < 2:
            counts["equal scores" if valid else "no valid score"] += 1
            continue
        counts["demonstrations"] += 1
        prompt, response = encoder.prompt_and_response(max(valid, key=lambda one: one[0])[1])
        targets = torch.tensor([splits.IGNORE_INDEX] * len(prompt) + response)
        rows.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
    counted = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    if not rows:
        raise UsageError(f"{folder / 'rewards.jsonl'} has no best response to learn from: {counted}")
    splits.save_split(folder / "pairs", "finetune", "train", rows)
    report = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
    writing.write_text(folder / "pairs" / "report.json", json.dumps(report | {"raft": dict(counts)}, indent=1))
    print(f"{folder / 'pairs'}: {counted}")


# ------------------------------------------------------------------------------------------------------- evaluation
def evaluate(it: Iteration[OnlineDPOArgs], rows: list[Row], reward: functions.RewardFunctions | None) -> Metrics | None:
    """Means over held-out prompts; writes a record per prompt to `evaluation.jsonl`.

    Responses are scored together with the initial policy's to the same prompts, by the scorer of training and by the
    judge of the data where it has one; all policies get the same sampling noise.
    """
    if not rows:
        return None
    args, tokenizer = it.args, it.tokenizer
    models, device = FrozenArgs(trust_remote_code=args.trust_remote_code), find_device(args.accelerator)
    current, start = (load_policy(name, models, tokenizer).eval().to(device) for name in (it.policy, it.initial))
    rollout = answers.respond(args, current, start, rows, tokenizer, args.seed, args.rollout_mini_batch_size)
    kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1).tolist()  # (B,) nats per response
    records = [
        {
            **one.columns,
            "prompt": one.prompt,
            "response": one.response,
            "truncated": one.truncated,
            "kl": nats,
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response_ids,
        }
        for one, nats in zip(encoding.samples_of(rollout), kl)
    ]
    first = it.folder.with_name("iteration-00") / "evaluation.jsonl"
    before = jsonl.read_jsonl(first) if it.number and first.is_file() else records
    add_scores(args, records, before, reward, run_dir.data_dir_of(str(it.folder.parent)))
    jsonl.write_jsonl(it.folder / "evaluation.jsonl", records, settings={})
    return summary(records, before)


def add_scores(
    args: OnlineDPOArgs,
    records: list[Row],
    before: list[Row],
    reward: functions.RewardFunctions | None,
    data_dir: str | None,
) -> None:
    """Add `reward` to the records, and `gold` where the data has a judge."""
    settings = (args, find_device(args.accelerator), args.rollout_mini_batch_size, reward)
    wraps, standardise = args.rm_chat_template, args.normalize_rewards
    scorer = loading.load_rewards(*settings, wrap_prompts=wraps, grouped=True, standardise=standardise).of_groups
    groups = [[as_sample(record), as_sample(other)] for record, other in zip(records, before)]
    for record, rewards in zip(records, scorer(groups)):
        record["reward"] = rewards[0]
    judge = data_dir and run_dir.read_arg(data_dir, "judge")
    if judge:
        texts = ([record[key] for record in records] for key in ("prompt", "response"))
        for record, gold in zip(records, load_function(judge, "the judge of the data")(*texts)):
            record["gold"] = scorers.finite(float(gold["score"]))


def as_sample(record: Row) -> encoding.Sample:
    """A record as a scorer's sample."""
    own = ("prompt", "response", "truncated", "kl", "prompt_ids", "response_ids", "reward", "gold")
    columns = {name: value for name, value in record.items() if name not in own}
    names = ("prompt", "response", "truncated", "prompt_ids", "response_ids")
    return encoding.Sample(**{name: record[name] for name in names}, columns=columns)


def summary(records: list[Row], before: list[Row]) -> Metrics:
    """Means over prompts; win rates are against the initial policy's responses, ties half."""
    means: Metrics = {"kl": iterated.mean(record["kl"] for record in records)}
    for name, rate in (("reward", "win_rate"), ("gold", "gold_win_rate")):
        pairs = [
            (one[name], other[name])
            for one, other in zip(records, before)
            if one.get(name) is not None and other.get(name) is not None
        ]
        if pairs:
            means[name] = iterated.mean(one for one, _ in pairs)
            means[rate] = ops.win_rate(pairs)[0]
    means["mean_length"] = iterated.mean(len(record["response_ids"]) for record in records)
    means["truncated_ratio"] = iterated.mean(record["truncated"] for record in records)
    return means


# ------------------------------------------------------------------------------------------------------------ files
def results_of(directory: Path) -> list[Metrics]:
    """One row per evaluated iteration, with the pairs and reward queries up to it."""
    rows: list[Metrics] = []
    pairs = queries = 0
    for number, folder in run_dir.iterations(directory).items():
        if measured := iterated.read_json(folder / "evaluation.json"):
            if told := iterated.read_json(folder / "pairs" / "report.json"):
                pairs += told["counts"]["pairs"]
                queries += sum(len(line["rewards"]) for line in jsonl.read_jsonl(folder / "rewards.jsonl"))
            rows.append({"iteration": number, **measured, "pairs": pairs, "reward_queries": queries})
    return rows


def report(run: Iterated[OnlineDPOArgs]) -> Metrics:
    """Write `results.json` and `metrics.jsonl`; after the last iteration also draw the curves and print a table.

    Returns the metrics of the last iteration.
    """
    rows = results_of(run.directory)
    names = {"reward": "val/score", "gold": "val/gold", "kl": "objective/kl", "mean_length": "completions/mean_length"}
    names |= {"truncated_ratio": "completions/truncated_ratio", "win_rate": "val/win_rate"}
    metrics: list[Metrics] = [
        {"step": row["iteration"], **jsonl.finite_metrics({names[k]: v for k, v in row.items() if k in names})}
        for row in rows
    ]
    last = run.write_results(rows, metrics)
    if len(rows) > run.args.iterations:
        draw(rows, run.directory / "curves.png")
        show(run.args, rows)
    return last


def show(args: OnlineDPOArgs, rows: list[Metrics]) -> None:
    """Print the results by iteration as a table."""
    cells = [[results.cell(row, name) for name in rows[-1]] for row in rows]
    titles = [name.replace("_", " ") for name in rows[-1]]
    results.print_table(f"{args.experiment_name}, on held-out prompts", titles, cells)


def draw(rows: list[Metrics], output: Path) -> None:
    """Draw reward, KL and length by iteration, and reward by KL."""
    scores: list[str] = [name for name in ("reward", "gold") if name in rows[-1]]
    panels: list[list[str]] = [scores, ["kl"], ["mean_length"], scores]
    figure, axes = results.new_figure(4.2 * len(panels), 3.2, columns=len(panels))
    for axis, names in zip(axes, panels):
        across = "kl" if axis is axes[-1] else "iteration"
        for name in names:
            points = [(row[across], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points), "o-", ms=3, label=name.replace("_", " "))
        axis.set_xlabel("KL to the initial policy, nats" if across == "kl" else across, fontsize=8)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    results.save_figure(figure, output)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(OnlineDPOArgs, argv)))


if __name__ == "__main__":
    main()
