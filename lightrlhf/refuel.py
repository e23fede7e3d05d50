"""REFUEL: multi-turn RLHF by regressing the relative future (Gao et al. 2024, 2410.04612).

Two replies y, y' to one prefix, turn h of a dialogue, are each rolled on by the policy itself, with a user, to a later
turn. R and R' are the scores there; their difference is an unbiased difference of Q values, so no critic is needed.
With S the log-probability of turn h's tokens alone, at the sampling temperature, the policy learns by least squares

    L = ([S(y) - S_old(y)] - [S(y') - S_old(y')] - eta (R - R'))^2,  averaged over pairs

One turn is REBEL (Gao et al. 2024, 2404.16767). Setting one makes files, stage by stage, in iterations:

    iteration-01/dialogues.jsonl   generate: roll out, sample horizon and turn, roll out again from there
                 rewards.jsonl     rank: the score of every prefix of both
                 pairs/            tokenize: filtered refuel_{train,validation,test}.pt, report.json
                 policy/           train; evaluation.json: scores by turn on held-out dialogues

What is there is not done again. `--setting online` generates while it trains, on dialogues whose user turns are fixed.
The baselines of the paper are two flags: `--prefix` (whose dialogue precedes turn h) and `--turn` (which turn learns).
Left out: learning all turns of a dialogue at once, which would bias the difference.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrlhf.cli.args import (
    DataArgs,
    EvalArgs,
    ModelArgs,
    RewardArgs,
    SamplingArgs,
    StartArgs,
    TrainArgs,
    check_at_least,
    check_data_dir,
    check_positive,
)
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, dialogue_pair_batch, micro_batches
from lightrlhf.data.splits import Row, check_vocabulary, load_split, longest_text, save_split
from lightrlhf.data.tokens import decode
from lightrlhf.generation.dialogue_pairs import (
    INVALID_REWARD,
    SIDES,
    branch,
    make_pair,
    nth_opening,
    side_of,
    split_of,
    turn_row,
)
from lightrlhf.generation.dialogues import (
    Dialogue,
    as_row,
    load_dialogues,
    mix_seed,
    roll_out,
    room_of,
    sample_of,
    score_turns,
)
from lightrlhf.generation.engine import generate
from lightrlhf.generation.users import UserArgs, load_user, recorded_user
from lightrlhf.maths.ops import whiten
from lightrlhf.models.loading import find_device, load_policy, train_last_layers
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, share_prefixes
from lightrlhf.models.roles import Policy, count_parameters, policy_inputs, vocabulary_size
from lightrlhf.models.sharding import unsharded
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import make_scorer
from lightrlhf.storage.checkpoint import checkpoints, write_text
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl, write_jsonl
from lightrlhf.training.iterate import keep_policy, link_checkpoint, mean, open_directory, run_begun
from lightrlhf.training.run import Metrics, Run

CHUNK = 256  # dialogues between two writes


@dataclass(frozen=True, kw_only=True)
class RefuelArgs(TrainArgs, DataArgs, EvalArgs, StartArgs, RewardArgs, SamplingArgs, UserArgs):
    """Multi-turn RLHF by regressing the relative future."""

    experiment_name: str = "rlhf-refuel"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    setting: Literal["simulated", "online"] = "simulated"
    """Files made in stages, with any user (simulated), or roll-outs while training, with the data's turns (online)."""
    stage: Literal["all", "generate", "rank", "tokenize", "train"] = "all"
    """One stage of the first unfinished iteration, or all stages of all iterations."""
    iterations: int = 1
    """How often all stages are done, each time from the last policy."""
    output_dir: str | None = None
    """Experiment dir to write, or to go on with; below `log_dir` when not given."""
    num_data: int = 0
    """Dialogues of an iteration, in a seeded order of the training split, which goes round; 0 takes all."""
    horizon: Literal["random", "final"] = "random"
    """Turn whose score counts: uniform over the turns, or always the last one."""
    prefix: Literal["policy", "dataset"] = "policy"
    """Whose dialogue precedes the turn that learns: the policy's own, or the data's."""
    turn: Literal["random", "last"] = "random"
    """Turn that learns: uniform up to the horizon, or the last turn alone."""
    loss_type: Literal["refuel", "dpo"] = "refuel"
    """Regress the difference of scores (refuel), or learn only which of the two is higher (multi-turn dpo)."""
    eta: float = 1.0
    """Factor on the difference of scores: how far one iteration goes."""
    beta: float = 0.1
    """Temperature of the implicit reward of `--loss_type dpo`."""
    total_length: int = 2048
    """Longest dialogue to the turn that learns, in tokens; longer ones are dropped."""
    temperature: float = 0.8
    """Divides the logits, for sampling and for every log-probability of the samples."""
    validation_percentage: float = 0.05
    """Share of dialogues whose pairs go into the validation split, and as many into the test split."""
    rm_chat_template: bool = False
    """Show a prompt that is plain text to the reward model as a user message of its chat template."""
    rollout_mini_batch_size: int = 64
    """Slots of the generation engine, and at most so many rows per pass of the reward model."""
    eval_dialogues: int = 100
    """Dialogues of the validation split that an iteration is evaluated on, the first ones; 0 switches it off."""
    print_sample_output_freq: int = 0
    """Steps between samples of the policy in `samples.jsonl`; 0 writes none."""
    num_layers_unfrozen: int = 0
    """Top transformer layers that learn; 0 lets `finetune_mode` say what learns."""
    rollout_size: int = 32
    """Online: dialogues per step and device, a pair each."""
    noptepochs: int = 4
    """Online: passes over the pairs of a step."""
    kl_coef: float = 0.05
    """Online: weight of the log-ratio to the initial policy, at the turn that learns, taken off its score."""
    penalty_reward_value: float = -2.0
    """Online: score of a dialogue whose turn that learns was cut by its length."""
    whiten_rewards: bool = False
    """Online: shift and scale the rewards of a step, over both sides and all devices, to mean 0 and variance 1."""
    offload: bool = False
    """Online: keep the reward model, and a reference that shares nothing, on the CPU while they are not at work."""
    learning_rate: float = 3e-7
    """Peak learning rate."""
    optimizer_eps: float = 1e-8
    """Added to the denominator of the optimiser's step."""
    lr_warmup_ratio: float | None = 0.1
    """Share of all steps for a linear warm-up from 0, instead of `lr_warmup_steps`."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        self.check_generation()
        self.check_user()
        self.check_eval()
        find_device(self.accelerator)
        for name in ("iterations", "total_length", "rollout_mini_batch_size", "rollout_size", "noptepochs"):
            check_at_least(self, name, 1)
        for name in ("num_data", "eval_dialogues", "print_sample_output_freq", "num_layers_unfrozen", "kl_coef"):
            check_at_least(self, name, 0)
        check_positive(self, "learning_rate", "eta", "beta")
        if not 0 <= self.validation_percentage < 0.5:
            raise ValueError(f"--validation_percentage {self.validation_percentage} must lie in [0, 0.5), such as 0.05")
        if self.num_layers_unfrozen and self.finetune_mode != "all":
            raise ValueError(
                f"--num_layers_unfrozen {self.num_layers_unfrozen} and --finetune_mode {self.finetune_mode} both say "
                "what learns; give one of them"
            )
        if self.setting == "online":
            for name, plain in (("output_dir", None), ("stage", "all"), ("user_function", None), ("user_model", None)):
                if getattr(self, name) != plain:
                    raise ValueError(f"--{name} {getattr(self, name)} has no place in --setting online")


# ------------------------------------------------------------------------------------------------------------- loss
def refuel_loss(logps: Tensor, old_logps: Tensor, rewards: Tensor, eta: float) -> Tensor:
    """REFUEL's loss of each pair: (2B,) all, the first sides before the second ones -> (B,).

    ([S - S_old] - [S' - S'_old] - eta (R - R'))^2 with S summed over turn h's tokens (Gao et al. 2024, 2410.04612; eta
    multiplies the scores, as in the authors' code). With one turn it is REBEL's.
    """
    return (log_ratio_gap(logps, old_logps) - eta * first_minus_second(rewards)).pow(2)


def pairwise_loss(logps: Tensor, old_logps: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Multi-turn DPO on the same pairs: -log sigmoid(beta ([S - S_old] - [S' - S'_old])) with S of the side that has
    the higher score; 0 where both are equal: (2B,) all -> (B,)."""
    sign = first_minus_second(rewards).sign()
    return -F.logsigmoid(sign * beta * log_ratio_gap(logps, old_logps)) * sign.abs()


def log_ratio_gap(logps: Tensor, old_logps: Tensor) -> Tensor:
    """[S - S_old] - [S' - S'_old]: (2B,) -> (B,), the difference of scores that the policy stands for, times eta."""
    return first_minus_second(logps - old_logps)


def first_minus_second(values: Tensor) -> Tensor:
    """First side less second side: (2B,) -> (B,)."""
    first, second = values.chunk(2)
    return first - second


def turn_logps(model: nn.Module, batch: Batch, temperature: float) -> Tensor:
    """S, the log-probability of the actions of each row, which are one turn's tokens: -> (2B,)."""
    return model(**policy_inputs(batch), temperature=temperature).logprobs.sum(1)


# ---------------------------------------------------------------------------------------------------------- program
class PolicyCollapsed(UsageError):
    """A policy that gives both replies alike in all dialogues, so that no pair tells them apart."""


def train(args: RefuelArgs) -> Path:
    """REFUEL; returns the experiment dir."""
    check_data_dir(args)
    args.check_start()
    args.check_reward()
    if args.setting == "online":
        return online(args)
    if args.stage in ("all", "generate"):
        dialogues_in(args.data_dir, "train")  # what cannot be read is refused before anything is written
    directory, policy = open_directory(args, "refuel")
    evaluate_iteration(args, directory / "iteration-00", policy)
    for number in range(1, args.iterations + 1):
        folder = directory / f"iteration-{number:02d}"
        is_new = not (folder / "policy").is_dir()
        if is_new:
            try:
                for name in STAGES if args.stage == "all" else (args.stage,):
                    STAGES[name](args, directory, folder, number, policy)
            except PolicyCollapsed as problem:
                print(f"{problem}; iteration {number - 1} is the last", flush=True)
                break
        if not (folder / "policy").is_dir():
            break  # of one stage alone
        policy = str(checkpoints(folder / "policy")[-1])
        link_checkpoint(directory, number, policy)
        evaluate_iteration(args, folder, policy)
        report(directory)
        if is_new and args.stage != "all":
            break
    print(f"finished: {directory}")
    return directory


def require_stage(path: Path, stage: str) -> None:
    """Raises: UsageError when the stage before has not been done."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; run --stage {stage} before, or --stage all")


# --------------------------------------------------------------------------------------------------------- generate
def generate_dialogues(args: RefuelArgs, directory: Path, folder: Path, number: int, policy: str) -> None:
    """Write `dialogues.jsonl`: two dialogues a line with a common prefix, and which turn and horizon they are of.

    A chunk that a kill cut is rolled out again in the same batches, so nothing changes.
    """
    from tqdm import tqdm

    rows = dialogues_in(args.data_dir, "train")
    size = args.num_data or len(rows)
    chosen = [nth_opening(rows, place, args.seed) for place in range((number - 1) * size, number * size)]
    with JsonlWriter(folder / "dialogues.jsonl", {"iteration": number, "num_rows": size}) as writer:
        done = len(writer.rows)
        if done == size:
            return
        device = find_device(args.accelerator)
        tokenizer = tokenizer_of(directory)
        model = load_policy(policy, ModelArgs(trust_remote_code=args.trust_remote_code), tokenizer).eval().to(device)
        check_vocabulary([{"input_ids": row.input_ids} for row in rows], vocabulary_size(model), args.data_dir)
        user = load_user(args, device, args.rollout_mini_batch_size)
        bar = tqdm(total=size, initial=done, desc=f"generate {number}", unit=" dialogues")
        for start in range(done // CHUNK * CHUNK, size, CHUNK):
            lines = branch(args, model, tokenizer, chosen[start : start + CHUNK], user)
            writer.append(*lines[max(done - start, 0) :])
            bar.update(len(lines) - max(done - start, 0))
        bar.close()


dialogues_in = functools.cache(load_dialogues)


@functools.cache
def tokenizer_of(directory: Path) -> Any:
    """The tokenizer of a run, read once: that of its data, else of the initial policy."""
    stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    return load_tokenizer(stored["data_dir"], stored["initial"])


# ------------------------------------------------------------------------------------------------- rank and tokenize
def rank(args: RefuelArgs, directory: Path, folder: Path, number: int, policy: str) -> None:
    """Write `rewards.jsonl`: the score of every prefix of both dialogues, `INVALID_REWARD` where there is none."""
    require_stage(folder / "dialogues.jsonl", "generate")
    rows = read_jsonl(folder / "dialogues.jsonl")
    content = hashlib.sha256((folder / "dialogues.jsonl").read_bytes()).hexdigest()
    with JsonlWriter(folder / "rewards.jsonl", {"dialogues_sha256": content}) as writer:
        done = len(writer.rows)
        if done == len(rows):
            return
        scorer = make_scorer(args, find_device(args.accelerator), args.rollout_mini_batch_size)
        for start in range(done // CHUNK * CHUNK, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            scores = score_turns(scorer, [side_of(row, side) for row in chunk for side in SIDES])
            scores = [[INVALID_REWARD if score is None else score for score in turns] for turns in scores]
            lines = [
                {"index": row["index"], "first": first, "second": second}
                for row, first, second in zip(chunk, scores[::2], scores[1::2])
            ]
            writer.append(*lines[max(done - start, 0) :])


def tokenize(args: RefuelArgs, directory: Path, folder: Path, number: int, policy: str) -> None:
    """Write `pairs/refuel_{train,validation,test}.pt` and `report.json` with what was dropped and why.

    Raises: UsageError when no pair is left to train on; AlwaysTheSame when that is what training has led to.
    """
    if (folder / "pairs" / "report.json").is_file():
        return
    require_stage(folder / "rewards.jsonl", "rank")
    rows, rewards = read_jsonl(folder / "dialogues.jsonl"), read_jsonl(folder / "rewards.jsonl")
    counts: Counter[str] = Counter()
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for row, scores in zip(rows, rewards, strict=True):
        pair = make_pair(args, row, scores)
        counts["pairs" if isinstance(pair, dict) else pair] += 1
        if isinstance(pair, dict):
            splits[split_of(args, row)].append(pair)
    told = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    if not splits["train"]:
        has_collapsed = number > 1 and set(counts) == {"the same reply twice"}
        problem = PolicyCollapsed if has_collapsed else UsageError
        raise problem(f"{folder / 'dialogues.jsonl'} gives no pair to train on: {told}")
    for split, members in splits.items():
        if members:
            save_split(folder / "pairs", "refuel", split, members)
    tokenizer_of(directory).save_pretrained(folder / "pairs" / "tokenizer")
    queries = sum(len(scores[side]) for scores in rewards for side in SIDES)
    firsts = [scores["first"] for scores in rewards]
    told_by_turn = [mean(s[h] for s in firsts if len(s) > h) for h in range(max(map(len, firsts)))]
    summary = {"counts": dict(counts), "rows": {k: len(v) for k, v in splits.items()}}
    summary |= {"reward_queries": queries, "score_by_turn": told_by_turn}
    write_text(folder / "pairs" / "report.json", json.dumps(summary, indent=1))
    print(f"{folder / 'pairs'}: {told}")


# ------------------------------------------------------------------------------------------------------------ train
def train_iteration(args: RefuelArgs, directory: Path, folder: Path, number: int, policy: str) -> None:
    """Train from `policy` on the pairs; the run is `training/…` until it is done, then `policy/`."""
    if args.stage == "all" and (args.devices > 1 or args.num_nodes > 1):  # ranks are processes that start from here
        flags = ["--resume_from", str(directory), "--stage", "train", "--iterations", str(number)]
        done = subprocess.run([sys.executable, "-m", "lightrlhf.refuel", *flags])
        if done.returncode:
            sys.exit(done.returncode)
        return
    require_stage(folder / "pairs" / "report.json", "tokenize")
    shared = {"data_dir": str(folder / "pairs"), "log_dir": str(folder), "experiment_name": "training"}
    shared |= {"sft_experiment_dir": policy, "model_name": None, "push_to_hub": None, "output_dir": None}
    resume = run_begun(folder)
    shared["seed"] = mix_seed(args.seed, number) % 2**31
    run = Run(dataclasses.replace(args, **shared, resume_from=resume), "refuel")
    learn(run, tokenizer_of(directory))
    if run.is_first:
        keep_policy(folder)
    run.fabric.barrier()
    if not run.is_first:
        sys.exit(0)  # the first rank goes on alone


STAGES = {"generate": generate_dialogues, "rank": rank, "tokenize": tokenize, "train": train_iteration}


def learn(run: Run[RefuelArgs], tokenizer: Any) -> None:
    """The training loop on the pairs of an iteration."""
    args = run.args
    rows = load_split(args.data_dir, "refuel", "train")
    has_validation = args.eval_interval and (Path(args.data_dir) / "refuel_validation.pt").is_file()
    validation = load_split(args.data_dir, "refuel", "validation") if has_validation else []
    policy = load_learner(args, args.sft_experiment_dir, "--sft_experiment_dir", tokenizer)
    check_vocabulary(rows, vocabulary_size(policy), args.data_dir)
    check_positions(rows, policy, args.data_dir)
    share_prefixes(policy, longest_text(rows))
    run.print0("{:,} parameters, {:,} trainable; {:,} pairs".format(*count_parameters(policy), len(rows)))
    with run.phase("old log-probabilities"):
        old = old_logps(run, policy.to(run.device), [*rows, *validation], tokenizer.pad_token_id)
    rows, validation = with_old(rows, old[:, : len(rows)]), with_old(validation, old[:, len(rows) :])
    num_steps, results = run.num_steps(len(rows), args.mini_batch_size), {}
    model = run.setup("policy", policy, args.learning_rate, num_steps)
    for step in run.steps(num_steps):
        started = time.perf_counter()
        batch = run.global_batch(rows, step, args.mini_batch_size)
        with run.phase("update"):
            metrics = train_step(run, model, run.shard(batch), tokenizer.pad_token_id)
        run.step += 1
        if run.due(args.log_interval, num_steps):
            run.log({**metrics, "train/lr": run.learning_rate("policy"), **run.speed(run.shard(batch), started)})
        if validation and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = validate(run, model, validation, tokenizer.pad_token_id)
            run.log(results)
        if args.print_sample_output_freq and run.due(args.print_sample_output_freq, num_steps):
            log_samples(run, policy, batch[:2], tokenizer)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer)
    run.finish(results)


def load_learner(args: RefuelArgs, source: str, flag: str, tokenizer: Any) -> Policy:
    """The policy with what learns switched on."""
    policy = load_policy(source, args, tokenizer, flag)
    if args.num_layers_unfrozen:
        train_last_layers(policy.model, args.num_layers_unfrozen)
    return policy


def old_logps(run: Run[RefuelArgs], policy: Policy, rows: Sequence[Row], pad_id: int) -> Tensor:
    """S_old of both sides of all rows, (2, N), under the policy that this training begins with, on this machine.

    Kept beside the pairs with a hash of the weights, the rows, precision, device and torch's version: other machines
    round otherwise, so log-probabilities that were found elsewhere are stale.
    """
    path, digest = Path(run.args.data_dir) / "old_logprobs.pt", fingerprint(run, policy, rows)
    stored = torch.load(path, weights_only=True) if path.is_file() else {}
    if stored.get("fingerprint") == digest:
        return stored["logps"]
    if stored:
        run.print0(f"{path} is of another policy, precision or device: log-probabilities computed anew")
    logps = score(run, policy, rows, pad_id).cpu()
    if run.is_first:
        torch.save({"fingerprint": digest, "logps": logps}, path.with_name(path.name + ".partial"))
        path.with_name(path.name + ".partial").replace(path)
    run.fabric.barrier()
    return logps


def fingerprint(run: Run[RefuelArgs], policy: Policy, rows: Sequence[Row]) -> str:
    """SHA-256 of all that log-probabilities depend on."""
    device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
    about = (run.args.precision, device, torch.__version__, run.args.temperature, run.args.micro_batch_size)
    digest = hashlib.sha256(repr(about).encode())
    for name, tensor in policy.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for row in rows:
        parts = [row[f"{side}_{name}"] for side in ("chosen", "rejected") for name in ("input_ids", "action_mask")]
        digest.update(repr([torch.as_tensor(part).tolist() for part in parts]).encode())
    return digest.hexdigest()


def with_old(rows: Sequence[Row], logps: Tensor) -> list[Row]:
    """The rows, each with both its old log-probabilities."""
    return [{**row, "old_logps": pair} for row, pair in zip(rows, logps.T.tolist())]


def score(run: Run[RefuelArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Tensor:
    """S of both sides of N rows, the work split over ranks: (2, N) on each."""
    logps = torch.zeros(2, len(rows), device=run.device)
    mine = run.shard(range(len(rows)))
    logps[:, mine] = score_here(run, model, [rows[i] for i in mine], pad_id)
    return run.sum_over_ranks(logps)


@torch.no_grad()
def score_here(run: Run[RefuelArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Tensor:
    """S of both sides of this rank's B rows, dropout off: (2, B)."""
    was_training = model.training
    model.eval()
    logps = torch.zeros(2, len(rows), device=run.device)
    numbered = [{**row, "place": place} for place, row in enumerate(rows)]
    for micro in run.pad_passes(micro_batches(numbered, run.args.micro_batch_size)):
        with run.autocast():
            found = turn_logps(model, dialogue_pair_batch(micro, pad_id).to(run.device), run.args.temperature)
        logps[:, [row["place"] for row in micro]] = found.float().reshape(2, -1)
    model.train(was_training)
    return logps


def train_step(run: Run[RefuelArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Metrics:
    """One optimiser step on the pairs of all ranks, `rows` being this one's; returns their metrics."""
    sums = torch.zeros(6, device=run.device)
    total = run.total(len(rows))
    micros = run.pad_passes(micro_batches(rows, run.args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = dialogue_pair_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            losses, told = pair_losses(run.args, turn_logps(model, batch, run.args.temperature), micro)
            run.backward(losses.sum() / total)
        sums += told
    return {
        **mean_metrics("train/", (run.sum_over_ranks(sums) / total).tolist()),
        "train/grad_norm": run.optimize("policy"),
    }


def pair_losses(args: RefuelArgs, logps: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Losses (B,) of rows and, without gradients, the sums (6,) that `named` names; logps (2B,), chosen ones first."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logps.device, dtype=logps.dtype)

    rewards = column([row[f"{side}_reward"] for side in ("chosen", "rejected") for row in rows])  # (2B,)
    old = column([row["old_logps"][side] for side in (0, 1) for row in rows])  # (2B,)
    if args.loss_type == "refuel":
        losses = refuel_loss(logps, old, rewards, args.eta)
    else:
        losses = pairwise_loss(logps, old, rewards, args.beta)
    moved, wanted = log_ratio_gap(logps, old).detach(), args.eta * first_minus_second(rewards)
    aligned = (moved * wanted > 0).float()
    first, second = (logps - old).detach().chunk(2)
    return losses, torch.stack([x.sum() for x in (losses.detach(), moved, wanted, aligned, first, second)])


def mean_metrics(prefix: str, means: Sequence[float]) -> Metrics:
    """Means over pairs by their names."""
    loss, moved, wanted, aligned, chosen, rejected = means
    return {
        f"{prefix}loss": loss,
        f"{prefix}future": moved,
        f"{prefix}target": wanted,
        f"{prefix}sign_align": aligned,
        f"{prefix}chosen_ratio": chosen,
        f"{prefix}rejected_ratio": rejected,
    }


def validate(run: Run[RefuelArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Metrics:
    """The same metrics on held-out pairs."""
    logps = score(run, model, rows, pad_id).reshape(-1)
    _, sums = pair_losses(run.args, logps, rows)
    return mean_metrics("val/", (sums / len(rows)).tolist())


def log_samples(run: Run[RefuelArgs], policy: Policy, rows: Sequence[Row], tokenizer: Any) -> None:
    """What the policy now says at turn h of rows, beside both replies that it learned from."""
    samples = []
    for row in rows:
        sides = {side: torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected")}
        start = int(torch.as_tensor(row["chosen_action_mask"]).long().argmax()) + 1
        prefix = sides["chosen"][:start]
        noise = torch.rand(1, run.args.max_new_tokens, generator=run.generator(run.step))
        said = generate(policy, [prefix], run.args, [tokenizer.eos_token_id], noise, 1, tokenizer)
        replies = {f"{side}_reply": decode(tokenizer, ids[start:]) for side, ids in sides.items()}
        samples.append({"prefix": decode(tokenizer, prefix), "reply": decode(tokenizer, said.responses[0]), **replies})
    run.log_samples(samples)


# ----------------------------------------------------------------------------------------------------------- online
def online(args: RefuelArgs) -> Path:
    """Setting two: each step rolls dialogues of the data out from a random turn, twice, and learns from the pairs."""
    run = Run(args, "refuel")
    source, flag = starting_model(args)
    tokenizer = load_tokenizer(args.data_dir, source)
    policy = load_learner(args, source, flag, tokenizer)
    share_prefixes(policy, args.total_length)
    rows, held_out = (with_room(run, policy, split) for split in ("train", "validation"))
    reference = run.freeze(policy.reference())
    scorer = make_scorer(args, find_device(args.accelerator), args.rollout_mini_batch_size)
    num_steps, results = run.num_steps(len(rows), args.rollout_size), {}
    parts = math.ceil(args.rollout_size / args.mini_batch_size)
    model = run.setup("policy", policy, args.learning_rate, num_steps * args.noptepochs * parts)
    run.print0("{:,} parameters, {:,} trainable; {:,} dialogues".format(*count_parameters(policy), len(rows)))
    for step in run.steps(num_steps):
        started = time.perf_counter()
        chosen = run.global_batch(rows, step, args.rollout_size)
        with run.phase("rollout"):
            pairs, told = online_pairs(run, model, reference, scorer, run.shard(chosen), tokenizer)
        with run.phase("update"):
            parts = min(parts, len(chosen) // run.world_size)  # equally many on each rank
            for epoch in range(args.noptepochs):
                order = torch.randperm(len(pairs), generator=run.generator(step, epoch, run.rank)).tolist()
                for part in range(parts):
                    places = order[len(order) * part // parts : len(order) * (part + 1) // parts]
                    metrics = train_step(run, model, [pairs[i] for i in places], tokenizer.pad_token_id)
        run.step += 1
        if run.due(args.log_interval, num_steps):
            times = {f"time/{name}": run.seconds[name] for name in ("rollout", "update")}
            run.log({**told, **metrics, "train/lr": run.learning_rate("policy"), **run.speed(pairs, started), **times})
        if args.eval_dialogues and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = online_score(run, model, scorer, held_out[: args.eval_dialogues], tokenizer)
            run.log(results)
        if args.print_sample_output_freq and run.due(args.print_sample_output_freq, num_steps):
            log_samples(run, policy, pairs[:2], tokenizer)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer)
    return run.finish(results)


def with_room(run: Run[RefuelArgs], policy: Policy, split: str) -> list[Dialogue]:
    """The dialogues of a split that the model has positions for, each turn taken as long as it may become.

    Raises: UsageError when there are none.
    """
    args, rows = run.args, load_dialogues(run.args.data_dir, split)
    check_vocabulary([{"input_ids": row.input_ids} for row in rows], vocabulary_size(policy), args.data_dir)

    def longest(row: Dialogue) -> int:
        return len(row.input_ids) + sum(max(args.max_new_tokens - (end - start), 0) for start, end in row.turn_spans)

    fitting = [row for row in rows if longest(row) <= min(room_of(policy), args.total_length)]
    if not fitting:
        raise UsageError(
            f"--max_new_tokens {args.max_new_tokens} in each turn does not fit into --total_length {args.total_length} "
            f"or the model's positions for any dialogue of {args.data_dir}; give fewer"
        )
    if len(fitting) < len(rows):
        run.print0(f"{len(rows) - len(fitting):,} of {len(rows):,} dialogues could become too long and are left out")
    return fitting


def online_pairs(
    run: Run[RefuelArgs], model: nn.Module, reference: Policy, scorer: Any, rows: Sequence[Dialogue], tokenizer: Any
) -> tuple[list[Row], Metrics]:
    """A pair from each dialogue of this rank, with `old_logps` and rewards, and the means over all ranks.

    R = s - kl_coef (S_old - S_ref) at turn h, where s is the score of the whole dialogue, or `penalty_reward_value`
    where turn h has no end; whitened over both sides and all ranks where asked. A pair with an invalid score is kept
    with no difference of rewards, so that ranks stay in step.
    """
    args, device = run.args, run.device
    turns = [random.Random(f"{args.seed} {run.step} {row.index}").randrange(row.num_turns) for row in rows]
    starts, ends = [row.before(h) for row, h in zip(rows, turns)], [row.num_turns for row in rows]
    both = [online_roll_out(run, model, starts, ends, tokenizer, mix_seed(run.step, side)) for side in range(2)]
    scores = online_scores(run, scorer, [dialogue for side in both for dialogue in side])
    cut = [dialogue.truncated[h] for side in both for dialogue, h in zip(side, turns)]
    scores = [args.penalty_reward_value if is_cut else score for is_cut, score in zip(cut, scores)]
    pairs = [turn_row(one, two, h) for one, two, h in zip(*both, turns)]
    old = score_here(run, model, pairs, tokenizer.pad_token_id)  # (2, B)
    with at_work(reference, device, args.offload and not shares_parameters(reference, model)):
        kl = old - score_here(run, reference, pairs, tokenizer.pad_token_id)  # (2, B)
    given = torch.tensor([math.nan if score is None else score for score in scores], device=device).reshape(2, -1)
    valid = given.isfinite().all(0).expand_as(given)  # (2, B)
    rewards = torch.where(valid, given - args.kl_coef * kl, 0.0)
    if args.whiten_rewards:
        rewards = whiten(rewards, valid, sum_over_ranks=run.sum_over_ranks)
    for i, pair in enumerate(pairs):
        pair |= {"chosen_reward": float(rewards[0, i]), "rejected_reward": float(rewards[1, i])}
        pair["old_logps"] = old[:, i].tolist()
    told = torch.stack([valid.sum(), torch.where(valid, given, 0.0).sum(), rewards.sum(), kl.sum()]).double()
    tokens = sum(int(pair[f"{side}_action_mask"].sum()) for pair in pairs for side in ("chosen", "rejected"))
    counts = torch.tensor([kl.numel(), sum(cut), tokens], device=device)
    num_valid, total, reward, ratio, sides, num_cut, tokens = run.sum_over_ranks(torch.cat([told, counts])).tolist()
    return pairs, {
        "objective/score": total / max(num_valid, 1.0),
        "objective/reward": reward / max(num_valid, 1.0),
        "objective/kl": ratio / sides,
        "objective/valid_ratio": num_valid / sides,
        "completions/truncated_ratio": num_cut / sides,
        "completions/mean_length": tokens / sides,
    }


def online_roll_out(
    run: Run[RefuelArgs], model: nn.Module, starts: list[Dialogue], ends: Sequence[int], tokenizer: Any, key: int
) -> list[Dialogue]:
    """Dialogues of this rank to their ends, with the data's user."""
    policy, slots = getattr(model, "module", model), run.args.rollout_mini_batch_size
    with unsharded(policy):
        return roll_out(policy, tokenizer, starts, ends, recorded_user, run.args, mix_seed(run.args.seed, key), slots)


def online_scores(run: Run[RefuelArgs], scorer: Any, dialogues: Sequence[Dialogue]) -> list[float | None]:
    """The score of each whole dialogue."""
    with at_work(getattr(scorer, "model", None), run.device, run.args.offload):
        return [score for (score,) in scorer([[sample_of(row, row.num_turns - 1)] for row in dialogues])]


@contextmanager
def at_work(module: nn.Module | None, device: torch.device, offload: bool) -> Iterator[None]:
    """Inside, a module is on the device; with `offload` it is on the CPU before and after."""
    if module is not None and offload:
        module.to(device)
    yield
    if module is not None and offload:
        module.to("cpu")


def shares_parameters(one: nn.Module, other: nn.Module) -> bool:
    """Whether moving one would move the other."""
    return not {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())


def online_score(
    run: Run[RefuelArgs], model: nn.Module, scorer: Any, rows: Sequence[Dialogue], tokenizer: Any
) -> Metrics:
    """Mean score of held-out dialogues that the policy held from their openings, the same noise each time."""
    mine = run.shard(rows)
    rolled = online_roll_out(run, model, [r.before(0) for r in mine], [r.num_turns for r in mine], tokenizer, -1)
    scores = [score for score in online_scores(run, scorer, rolled) if score is not None]
    return {"val/score": run.total(sum(scores)) / max(run.total(len(scores)), 1.0)}


# ------------------------------------------------------------------------------------------------------- evaluation
def evaluate_iteration(args: RefuelArgs, folder: Path, policy: str) -> None:
    """Write `evaluation.json`, the mean score after each turn of held-out dialogues, unless it is there.

    All policies meet the same openings, noise and user; the scorer is the training's own.
    """
    if not args.eval_dialogues or (folder / "evaluation.json").is_file():
        return
    device = find_device(args.accelerator)
    rows = [row.before(0) for row in dialogues_in(args.data_dir, "validation")[: args.eval_dialogues]]
    tokenizer = tokenizer_of(folder.parent)
    model = load_policy(policy, ModelArgs(trust_remote_code=args.trust_remote_code), tokenizer).eval().to(device)
    check_vocabulary([{"input_ids": row.input_ids} for row in rows], vocabulary_size(model), args.data_dir)
    slots = args.rollout_mini_batch_size
    rolled = roll_out(model, tokenizer, rows, args.num_turns, load_user(args, device, slots), args, args.seed, slots)
    scores = score_turns(make_scorer(args, find_device(args.accelerator), args.rollout_mini_batch_size), rolled)
    by_turn = [mean(s[h] for s in scores if len(s) > h and s[h] is not None) for h in range(args.num_turns)]
    lengths = [end - start for row in rolled for start, end in row.turn_spans]
    cut = [flag for row in rolled for flag in row.truncated]
    results = {"score_by_turn": by_turn, "mean_length": mean(lengths), "truncated_ratio": mean(cut)}
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "evaluation.jsonl", [{"scores": s, **as_row(row)} for row, s in zip(rolled, scores)])
    write_text(folder / "evaluation.json", json.dumps(results, indent=1))


def report(directory: Path) -> None:
    """Write `results.json` and `metrics.jsonl`, the step being the iteration, and print the last scores."""
    rows, queries = [], 0
    for folder in sorted(directory.glob("iteration-*")):
        row: Row = {"iteration": int(folder.name.partition("-")[2])}
        if (folder / "pairs" / "report.json").is_file():
            told = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
            queries += told["reward_queries"]
            row |= {"pairs": told["counts"]["pairs"], "rollout_score_by_turn": told["score_by_turn"]}
        if (folder / "evaluation.json").is_file():
            row |= json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        rows.append({**row, "reward_queries": queries})
    write_text(directory / "results.json", json.dumps(rows, indent=1))
    logged = [
        {
            "step": row["iteration"],
            **{f"val/score_turn_{h}": score for h, score in enumerate(row.get("score_by_turn", []), start=1)},
            **{f"completions/{name}": row[name] for name in ("mean_length", "truncated_ratio") if name in row},
        }
        for row in rows
    ]
    write_jsonl(directory / "metrics.jsonl", logged)
    write_text(directory / "README.md", card(directory, rows))
    if "score_by_turn" in rows[-1]:
        shown = " ".join(f"{value:.3f}" for value in rows[-1]["score_by_turn"])
        print(f"iteration {rows[-1]['iteration']}: score by turn {shown}", flush=True)


def card(directory: Path, rows: Sequence[Row]) -> str:
    """The model card: what, from what, how, results."""
    stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    lines = [
        "---",
        "library_name: transformers",
        "tags: [lightrlhf, refuel]",
        "---",
        f"# {stored['experiment_name']}",
        "",
    ]
    lines += [f"`{stored['initial']}` trained by `lightrlhf.refuel` on `{stored['data_dir']}`.", ""]
    turns = max((len(row.get("score_by_turn", [])) for row in rows), default=0)
    lines += ["| iteration | " + " | ".join(f"score at turn {h + 1}" for h in range(turns)) + " | reward queries |"]
    lines += ["|---" * (turns + 2) + "|"]
    for row in rows:
        scores = [f"{value:.3f}" for value in row.get("score_by_turn", [])]
        lines += [f"| {row['iteration']} | {' | '.join(scores)} | {row['reward_queries']} |"]
    lines += ["", "| argument | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in stored.items() if value is not None]
    return "\n".join(lines) + "\n"


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(RefuelArgs, argv)))


if __name__ == "__main__":
    main()
