"""Online preference learning: respond, score, choose pairs, train, repeat (Dong et al. 2024, 2405.07863).

Each iteration takes prompts that no earlier one has used, samples K responses to each from the previous iteration's
policy, scores them, chooses a pair per prompt and trains that policy on the pairs, by DPO or any other loss of
`lightrlhf.dpo`. The reference is the initial policy (`--reference moving`: the previous iteration's, which is mirror
descent and less stable). `--training_step raft` instead trains on the best response to each prompt by cross-entropy
(Dong et al. 2023, 2304.06767), without prompts whose scores are all equal, which have no best one. With `--responder
initial` the program is its own control: offline learning from responses of the initial policy, at equal prompts, pairs
and reward queries.

Each stage is a program of its own (`generate`, `annotate`, `dpo` or `sft`) and leaves its files:

    iteration-02/prompts.jsonl  responses.jsonl  rewards.jsonl  pairs/  policy/  evaluation.json  evaluation.jsonl

Finished stages are skipped, so `--resume_from DIR` gives the same result as an uninterrupted run. Left out: data of
earlier iterations (pairs are used once), and optimiser states carried over between iterations.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from lightrlhf import annotate, dpo, generate, sft
from lightrlhf.cli.args import (
    RARE,
    DataArgs,
    ModelArgs,
    RewardArgs,
    RolloutLogArgs,
    SamplingArgs,
    ServerArgs,
    check_args,
    check_at_least,
    check_data_dir,
)
from lightrlhf.cli.errors import StopTraining, UsageError, one_line_errors
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import epoch_order
from lightrlhf.data.responses import ROW
from lightrlhf.data.rows import Given, load_rows
from lightrlhf.data.schema import share_columns
from lightrlhf.data.splits import IGNORE_INDEX, Row, check_vocabulary, save_split
from lightrlhf.data.tokens import decode
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.maths.ops import win_rate
from lightrlhf.maths.preference import REFERENCE_FREE
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve, starting_model
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.functions import RewardFunctions
from lightrlhf.rewards.loading import make_rewards
from lightrlhf.rewards.scorers import Encoding, Sample, finite, samples_of_row
from lightrlhf.storage.checkpoint import checkpoints, write_text
from lightrlhf.storage.gguf_files import check_model_exists
from lightrlhf.storage.jsonl import finite_metrics, read_jsonl, to_json, write_jsonl
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.results import cell, new_figure, print_table, save_figure
from lightrlhf.storage.run_dir import data_dir_of, iterations, stored
from lightrlhf.training.iterate import (
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
from lightrlhf.training.provenance import given_objects
from lightrlhf.training.rollout_log import rollout_row, write_iteration
from lightrlhf.training.run import Metrics, OnStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class OnlineDPOArgs(dpo.DPOLossArgs, DataArgs, RewardArgs, SamplingArgs, ServerArgs, RolloutLogArgs):
    """Online preference learning: respond, score, choose pairs, train, in iterations."""

    RENAMED: ClassVar[dict[str, str]] = {"num_responses": "num_generations"}
    REMOVED: ClassVar[dict[str, tuple[Any, str]]] = {
        **dpo.DPOLossArgs.REMOVED,
        "length_unit": ("tokens", "--length_penalty counts tokens"),
        "do_sample": (True, "responses are always sampled"),
        "repetition_penalty": (1.0, "responses are sampled from the policy itself"),
        "eval_interval": (0, "each iteration ends with an evaluation"),
        "eval_iters": (None, "use --eval_prompts"),
    }

    experiment_name: str = "rlhf-online-dpo"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    output_dir: str | None = None
    """Experiment dir itself, new, empty or of the run to go on with, instead of one below `log_dir`."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    iterations: int = 3
    """Number of iterations."""
    prompts_per_iteration: int | None = None
    """Fresh prompts of each iteration; when not given the training prompts are divided evenly."""
    num_generations: int = 8
    """Responses per prompt (K)."""
    rm_chat_template: bool = field(default=False, metadata=RARE)
    """Show a prompt that is plain text to the reward model as a user message of its chat template."""
    choose_type: Literal["max_random", "max_min", "max_max", "random", "max_min_p"] = "max_min"
    """Pair of a prompt: the best against a random other, the worst, the second; any two; `max_min` after a penalty."""
    length_penalty: float = field(default=0.0, metadata=RARE)
    """Reward subtracted per token of length, for `max_min_p`."""
    training_step: Literal["dpo", "raft"] = "dpo"
    """Learn from pairs, or (raft) by cross-entropy from the best response to each prompt with unequal scores."""
    reference: Literal["initial", "moving"] = "initial"
    """Reference policy: the initial policy (or `ref_model`), or the previous iteration's."""
    responder: str = "last"
    """Policy that responds: `last` (online), `initial` (offline, the initial policy), or the directory of another."""
    rollout_mini_batch_size: int = 64
    """Slots of the generation engine, and at most so many rows per pass of the reward model."""
    eval_prompts: int = 200
    """Prompts of the evaluation after each iteration: the first ones of the validation split."""
    epochs: int | None = None
    """Passes over the pairs of an iteration; 1 when `max_steps` is not given either."""
    lr_warmup_ratio: float | None = 0.1
    """Share of an iteration's steps for a warm-up from 0: a fresh Adam at the full rate can throw a policy far off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_generation()
        self.check_servers()
        self.check_rollout_log()
        find_device(self.accelerator)
        check_one_machine(self)
        if self.loss_type in UNPAIRED_LOSSES:
            raise ValueError(
                f"--loss_type {self.loss_type} learns from single responses, but this program chooses pairs; "
                "use a loss of pairs, such as bco_pair"
            )
        for name in ("iterations", "rollout_mini_batch_size", "eval_prompts"):
            check_at_least(self, name, 1)
        check_at_least(self, "num_generations", 2)
        if self.prompts_per_iteration is not None:
            check_at_least(self, "prompts_per_iteration", 1)
        if self.responder not in ("last", "initial"):
            check_model_exists(self.responder, "--responder (last, initial or a model)")
        if self.reference == "moving" and self.ref_model:
            raise ValueError(f"--ref_model {self.ref_model} requires --reference initial")
        if self.length_penalty and self.choose_type != "max_min_p":
            raise ValueError(f"--length_penalty {self.length_penalty} requires --choose_type max_min_p")


def train(
    args: OnlineDPOArgs,
    *,
    prompts: Given | None = None,
    reward: RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by online preference learning; returns the experiment dir.

    Objects given here replace what the flags would load. prompts: see `data.rows`; reward: f(prompts, completions,
    **columns) -> a number or None for each; on_step: called with (iteration, metrics) after each iteration, may raise
    `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    check_args(args, OnlineDPOArgs)
    started = time.perf_counter()
    if prompts is None:
        check_data_dir(args)
    args.check_start()
    args.check_reward(reward)
    data_dir = args.data_dir if prompts is None else None
    tokenizer = None if prompts is None else load_tokenizer(None, starting_model(args)[0])
    rows = load_rows("prompts", "train", args.data_dir, prompts, tokenizer, args.verify)
    shards = prompt_shards(args, rows)
    held_out = load_rows("prompts", "validation", args.data_dir, prompts, tokenizer, args.verify)[: args.eval_prompts]
    share_columns([*rows, *held_out])
    given = given_objects(prompts=prompts, reward=reward)
    work = f"{len(shards[0]):,} prompts, {args.num_generations} responses to each"
    data = data_dir or "given/prompts"
    if args.dry_run:
        with trial_directory(args, "online_dpo", data, work) as (directory, initial):
            tokenizer = tokenizer or load_tokenizer(data_dir, initial, verify=args.verify)
            try_iteration(args, directory / "iteration-01", shards[0], initial, data_dir, tokenizer, reward)
        return place_of(args, data)
    directory, initial = open_directory(args, "online_dpo", data, work, given, rows=rows)
    with stopped_by_signals(directory), lock_folder(directory):
        tokenizer, policy = tokenizer or load_tokenizer(data_dir, initial, verify=args.verify), initial
        with kept_if_started(args, directory):
            evaluate_iteration(args, directory / "iteration-00", initial, initial, tokenizer, held_out, reward)
        for number, shard in enumerate(shards, start=1):
            folder = directory / f"iteration-{number:02d}"
            is_new = not (folder / "policy").is_dir()
            if is_new:
                print(f"\niteration {number} of {args.iterations}", flush=True)
                respond(args, folder, shard, number, responder_of(args, policy, initial), data_dir)
                score_and_choose(args, folder, initial, data_dir, reward)
                log_iteration(args, folder, number, tokenizer)
                learn(args, folder, number, policy, initial, tokenizer)
            policy = str(checkpoints(folder / "policy")[-1])
            link_checkpoint(directory, number, policy)
            evaluate_iteration(args, folder, policy, initial, tokenizer, held_out, reward)
            metrics = report(args, directory)
            try:
                if on_step is not None and is_new:
                    on_step(number, metrics)
            except StopTraining:
                break
        left = [n for n in range(1, args.iterations + 1) if not (directory / f"iteration-{n:02d}" / "policy").is_dir()]
        return finish(args, directory, ", ".join(f"iteration {number}" for number in left), started)


def try_iteration(
    args: OnlineDPOArgs,
    folder: Path,
    prompts: Sequence[Row],
    initial: str,
    data_dir: str | None,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFunctions | None,
) -> None:
    """Do the stages of the first iteration for as many prompts as a step of training has, up to its first steps."""
    started, tried = time.perf_counter(), prompts[: args.mini_batch_size * args.devices]
    respond(args, folder, tried, 1, responder_of(args, initial, initial), data_dir)
    score_and_choose(args, folder, initial, data_dir, reward)
    seconds, sample = time.perf_counter() - started, samples_of(folder, tokenizer, 1)[0]
    print_trial(args, seconds, len(tried), len(prompts), "prompts", sample, tokenizer)
    steps = steps_of_iteration(args, len(prompts))  # if each prompt gives a pair
    learn(dataclasses.replace(args, epochs=None, max_steps=steps), folder, 1, initial, initial, tokenizer)


# ----------------------------------------------------------------------------------------------------------- stages
def responder_of(args: OnlineDPOArgs, policy: str, initial: str) -> str:
    """The folder of the model that responds; policy: that of the last iteration."""
    return {"last": policy, "initial": initial}.get(args.responder) or resolve(args.responder, "--responder")


def prompt_shards(args: OnlineDPOArgs, rows: list[Row]) -> list[list[Row]]:
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
    order = epoch_order(len(rows), args.seed, 0)
    return [[rows[i] for i in order[t * size : (t + 1) * size]] for t in range(args.iterations)]


def respond(
    args: OnlineDPOArgs, folder: Path, prompts: Sequence[Row], number: int, responder: str, data_dir: str | None
) -> None:
    """Write `prompts.jsonl` and `responses.jsonl`."""
    tokenizer = load_tokenizer(data_dir, responder, verify=args.verify)
    rows = []
    for row in prompts:
        ids = torch.as_tensor(row["input_ids"]).tolist()
        rows.append({**row["columns"], "prompt": decode(tokenizer, ids), "prompt_ids": ids})
    write_jsonl(folder / "prompts.jsonl", rows)
    devices = 1 if args.rollout_server else args.devices  # one process asks all servers
    stage = generate.GenerateArgs(
        **shared_flags(args, SamplingArgs),
        **shared_flags(args, ServerArgs),
        model_name=responder,
        trust_remote_code=args.trust_remote_code,
        prompts_file=str(folder / "prompts.jsonl"),
        num_prompts=len(rows),
        num_generations=args.num_generations,
        output_file=str(folder / "responses.jsonl"),
        rollout_mini_batch_size=args.rollout_mini_batch_size,
        seed=args.seed * 1000 + number,
        accelerator=args.accelerator,
        devices=devices,
    )
    run_on_devices(generate.run, stage, devices)


def score_and_choose(
    args: OnlineDPOArgs, folder: Path, initial: str, data_dir: str | None, reward: RewardFunctions | None
) -> None:
    """Write `rewards.jsonl`, and the pairs into `pairs/`."""
    stage = annotate.AnnotateArgs(
        **shared_flags(args, RewardArgs),
        responses_file=str(folder / "responses.jsonl"),
        output_file=str(folder / "rewards.jsonl"),
        rm_chat_template=args.rm_chat_template,
        trust_remote_code=args.trust_remote_code,
        rollout_mini_batch_size=args.rollout_mini_batch_size,
        choose_type=args.choose_type,
        length_penalty=args.length_penalty,
        output_dir=str(folder / "pairs"),
        data_dir=data_dir,
        verify=args.verify,
        tokenizer_name=None if data_dir else initial,
        seed=args.seed,
        accelerator=args.accelerator,
    )
    annotate.run(stage, reward=reward)


def log_iteration(args: OnlineDPOArgs, folder: Path, number: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the responses to the first prompts to `rollouts.jsonl` of the experiment dir."""
    if not args.log_rollouts:
        return
    version = {"last": number - 1, "initial": 0}.get(args.responder)
    write_iteration(folder.parent, number, version, samples_of(folder, tokenizer, args.log_rollouts))


def samples_of(folder: Path, tokenizer: PreTrainedTokenizerBase, number: int) -> list[Row]:
    """The first responses of an iteration and their scores, as rows of `rollouts.jsonl`."""
    logged = []
    for group, row in enumerate(read_jsonl(folder / "rewards.jsonl", may_be_cut=True)[:number]):
        columns = {name: value for name, value in row.items() if name not in ROW}
        for ids, score, truncated in zip(row["response_ids"], row["rewards"], row["truncated"]):
            given = {"score": score, "truncated": truncated, "columns": columns}
            logged.append(rollout_row(tokenizer, row["prompt_ids"], ids, group=group, **given))
    return logged[:number]


def learn(
    args: OnlineDPOArgs, folder: Path, number: int, policy: str, initial: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Train from `policy` on what was chosen; the run is in `training/` until it is finished, then `policy/`."""
    changes: dict[str, Any] = {
        "data_dir": str(folder / "pairs"),
        "log_dir": str(folder),
        "experiment_name": "training",
        "output_dir": None,
        "seed": args.seed * 1000 + number,
        "resume_from": find_started_run(folder),
        "push_to_hub": None,
    }
    if args.training_step == "raft":
        write_best(folder, tokenizer)
        changes |= {"model_name": policy, "use_targets": True, "eval_interval": 0}
        run_on_devices(sft.train, sft.SFTArgs(**shared_flags(args, sft.SFTArgs) | changes), args.devices)
    else:
        fixed = args.ref_model or initial
        changes |= {"sft_experiment_dir": policy, "model_name": None, "eval_interval": 0}
        is_fixed = args.reference == "initial" and args.loss_type not in REFERENCE_FREE
        changes |= {"ref_model": fixed if is_fixed else None}
        run_on_devices(dpo.train, dpo.DPOArgs(**shared_flags(args, dpo.DPOArgs) | changes), args.devices)
    if not args.dry_run:
        keep_policy(folder)


def write_best(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the best response to each prompt to `pairs/finetune_train.pt`, and the counts to the pairs' report.

    A prompt whose scores are all equal has no best response, be they all wrong, and is left out.
    Raises: UsageError when no prompt is left.
    """
    encoding = Encoding(tokenizer)
    rows = []
    counts: Counter[str] = Counter()
    for row in read_jsonl(folder / "rewards.jsonl"):
        scored = zip(row["rewards"], samples_of_row(row))
        valid = [(reward, sample) for reward, sample in scored if reward is not None and sample is not None]
        if len({reward for reward, _ in valid}) < 2:
            counts["equal scores" if valid else "no valid score"] += 1
            continue
        counts["demonstrations"] += 1
        prompt, response = encoding.prompt_and_response(max(valid, key=lambda one: one[0])[1])
        targets = torch.tensor([IGNORE_INDEX] * len(prompt) + response)
        rows.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
    counted = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    if not rows:
        raise UsageError(f"{folder / 'rewards.jsonl'} has no best response to learn from: {counted}")
    save_split(folder / "pairs", "finetune", "train", rows)
    report = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
    write_text(folder / "pairs" / "report.json", json.dumps(report | {"raft": dict(counts)}, indent=1))
    print(f"{folder / 'pairs'}: {counted}")


# ------------------------------------------------------------------------------------------------------- evaluation
def evaluate_iteration(
    args: OnlineDPOArgs,
    folder: Path,
    policy: str,
    initial: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    reward: RewardFunctions | None,
) -> None:
    """Write `evaluation.json` and a record per prompt to `evaluation.jsonl`, unless they exist.

    Responses are scored together with those of the initial policy to the same prompts, by the scorer of training and by
    the judge of the data where it has one; all policies get the same sampling noise.
    """
    if not rows or (folder / "evaluation.json").is_file():
        return
    device = find_device(args.accelerator)
    models = ModelArgs(trust_remote_code=args.trust_remote_code)
    current, start = (load_policy(name, models, tokenizer).eval().to(device) for name in (policy, initial))
    check_vocabulary(rows, vocabulary_size(current), args.data_dir)
    noise = torch.rand(len(rows), args.max_new_tokens, generator=torch.Generator().manual_seed(args.seed))
    rollout = generate_rollout(current, start, rows, args, tokenizer, noise, args.rollout_mini_batch_size)
    kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1).tolist()  # (B,) nats per response
    truncated = rollout.truncated.tolist()
    responses = zip(rollout.columns, rollout.prompt_ids(), rollout.response_ids())
    records = [
        {
            **columns,
            "prompt": decode(tokenizer, prompt),
            "response": decode(tokenizer, response),
            "truncated": truncated[i],
            "kl": kl[i],
            "prompt_ids": prompt,
            "response_ids": response,
        }
        for i, (columns, prompt, response) in enumerate(responses)
    ]
    first = folder.parent / "iteration-00" / "evaluation.jsonl"
    before = read_jsonl(first) if first.is_file() and folder.name != "iteration-00" else records
    add_scores(args, records, before, reward, data_dir_of(str(folder.parent)))
    write_jsonl(folder / "evaluation.jsonl", records, settings={})
    write_text(folder / "evaluation.json", to_json(summary(records, before), indent=1))


def add_scores(
    args: OnlineDPOArgs, records: list[Row], before: list[Row], reward: RewardFunctions | None, data_dir: str | None
) -> None:
    """Add `reward` to the records, and `gold` where the data has a judge."""
    scorer = make_rewards(
        args, find_device(args.accelerator), args.rollout_mini_batch_size, reward, grouped=True
    ).of_groups
    groups = [[as_sample(record), as_sample(other)] for record, other in zip(records, before)]
    for record, rewards in zip(records, scorer(groups)):
        record["reward"] = rewards[0]
    judge = data_dir and stored(data_dir, "judge")
    if judge:
        texts = ([record[key] for record in records] for key in ("prompt", "response"))
        for record, gold in zip(records, load_function(judge, "the judge of the data")(*texts)):
            record["gold"] = finite(float(gold["score"]))


def as_sample(record: Row) -> Sample:
    """A record as a scorer's sample."""
    own = ("prompt", "response", "truncated", "kl", "prompt_ids", "response_ids", "reward", "gold")
    columns = {name: value for name, value in record.items() if name not in own}
    names = ("prompt", "response", "truncated", "prompt_ids", "response_ids")
    return Sample(**{name: record[name] for name in names}, columns=columns)


def summary(records: list[Row], before: list[Row]) -> Metrics:
    """Means over prompts; win rates are against the initial policy's responses, ties half."""
    results: Metrics = {"kl": mean(record["kl"] for record in records)}
    for name, rate in (("reward", "win_rate"), ("gold", "gold_win_rate")):
        pairs = [
            (one[name], other[name])
            for one, other in zip(records, before)
            if one.get(name) is not None and other.get(name) is not None
        ]
        if pairs:
            results[name] = mean(one for one, _ in pairs)
            results[rate] = win_rate(pairs)[0]
    results["mean_length"] = mean(len(record["response_ids"]) for record in records)
    results["truncated_ratio"] = mean(record["truncated"] for record in records)
    return results


# ------------------------------------------------------------------------------------------------------------ files
def results_of(directory: Path) -> list[Metrics]:
    """One row per evaluated iteration, with the pairs and reward queries up to it."""
    rows: list[Metrics] = []
    pairs = queries = 0
    for number, folder in iterations(directory).items():
        if not (folder / "evaluation.json").is_file():
            continue
        row: Metrics = {"iteration": number}
        if (folder / "pairs" / "report.json").is_file():
            report = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
            pairs += report["counts"]["pairs"]
            queries += sum(len(line["rewards"]) for line in read_jsonl(folder / "rewards.jsonl"))
        row |= json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        rows.append(row | {"pairs": pairs, "reward_queries": queries})
    return rows


def report(args: OnlineDPOArgs, directory: Path) -> Metrics:
    """Write `results.json` and `metrics.jsonl`; after the last iteration also draw the curves and print a table.

    Returns the metrics of the last iteration.
    """
    rows = results_of(directory)
    write_text(directory / "results.json", to_json(rows, indent=1))
    names = {"reward": "val/score", "gold": "val/gold", "kl": "objective/kl", "mean_length": "completions/mean_length"}
    names |= {"truncated_ratio": "completions/truncated_ratio", "win_rate": "val/win_rate"}
    logged: list[Metrics] = [
        {"step": row["iteration"], **finite_metrics({names[k]: v for k, v in row.items() if k in names})}
        for row in rows
    ]
    write_jsonl(directory / "metrics.jsonl", logged)
    if len(rows) > args.iterations:
        draw(rows, directory / "curves.png")
        show(args, rows)
    return {name: value for name, value in logged[-1].items() if name != "step"} if logged else {}


def show(args: OnlineDPOArgs, rows: list[Metrics]) -> None:
    """Print the results by iteration as a table."""
    cells = [[cell(row, name) for name in rows[-1]] for row in rows]
    print_table(f"{args.experiment_name}, on held-out prompts", [name.replace("_", " ") for name in rows[-1]], cells)


def draw(rows: list[Metrics], output: Path) -> None:
    """Draw reward, KL and length by iteration, and reward by KL."""
    scores: list[str] = [name for name in ("reward", "gold") if name in rows[-1]]
    panels: list[list[str]] = [scores, ["kl"], ["mean_length"], scores]
    figure, axes = new_figure(4.2 * len(panels), 3.2, columns=len(panels))
    for axis, names in zip(axes, panels):
        across = "kl" if axis is axes[-1] else "iteration"
        for name in names:
            points = [(row[across], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points), "o-", ms=3, label=name.replace("_", " "))
        axis.set_xlabel("KL to the initial policy, nats" if across == "kl" else across, fontsize=8)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    save_figure(figure, output)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(OnlineDPOArgs, argv)))


if __name__ == "__main__":
    main()
