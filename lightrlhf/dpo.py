"""Direct preference optimisation (DPO, Rafailov et al. 2023) and the losses of its relatives, one function each.

A policy is its own reward model: r(y) = beta (log pi(y|x) - log pi_ref(y|x)) + c(x). With a and b these log-ratios of
the chosen and the rejected response,

    L = -log sigmoid(beta (a - b)),  summed over pairs, divided once by their global number                      (eq. 7)

`LOSSES` holds this and sixteen others, to be called on `Pairs`. `--rapo` weighs the rejected side, u = a - lambda b
(the RAPO code of Online-RLHF); `--length_alpha` corrects for length (R-DPO); `--rpo_alpha` adds the likelihood of the
chosen response (RPO). The reference's log-probabilities are computed once, before training, by the policy itself as it
was loaded (or by `--ref_model`), so no second model is in memory.

Left out: training without a reference (SimPO, ORPO), divergences other than KL, unpaired data (KTO).
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import (
    RARE,
    DataArgs,
    EvalArgs,
    ModelArgs,
    StartArgs,
    TrainArgs,
    check_at_least,
    check_data_dir,
    check_positive,
)
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, micro_batches, preference_batch
from lightrlhf.data.rows import Given, load_rows
from lightrlhf.data.splits import Row, check_vocabulary, longest_text
from lightrlhf.maths.ops import wins
from lightrlhf.maths.preference import (
    GAP_LOSSES,
    LENGTH_LOSSES,
    LOSSES,
    RANKED_LOSSES,
    RAPO,
    SMOOTHED,
    SOFT_LABEL_LOSSES,
    Pairs,
    chosen_nll,
    constant_weight,
)
from lightrlhf.models.given import load_start
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, share_prefixes
from lightrlhf.models.roles import Policy, count_parameters, inference, policy_inputs, vocabulary_size
from lightrlhf.models.saving import hash_weights
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.provenance import given_objects
from lightrlhf.training.run import Metrics, OnStep, Run

SCORING_TOLERANCE = 1e-2  # nats per token


@dataclass(frozen=True, kw_only=True)
class DPOLossArgs(TrainArgs, DataArgs, StartArgs):
    """Direct preference optimisation."""

    experiment_name: str = "rlhf-dpo"
    """Folder below `log_dir` for the runs of one algorithm."""
    ref_model: str | None = field(default=None, metadata=RARE)
    """Experiment dir, checkpoint or folder of another reference; the starting policy when not given."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    disable_dropout: bool = field(default=True, metadata=RARE)
    """Set the probability of every dropout module to 0."""
    loss_type: Literal[
        "sigmoid",
        "robust",
        "ipo",
        "hinge",
        "nca_pair",
        "sppo_hard",
        "exo_pair",
        "bco_pair",
        "apo_zero",
        "apo_down",
        "aot",
        "aot_pair",
        "rev_kl",
        "kl",
        "tv",
        "hellinger",
        "raft",
    ] = "sigmoid"
    """Loss of a pair; howto/algorithms/dpo.md has the formulas."""
    beta: float = 0.1
    """Strength of the KL constraint to the reference: the temperature of the implicit reward."""
    label_smoothing: float = field(default=0.0, metadata=RARE)
    """Assumed share of pairs with flipped labels."""
    rapo: str | None = field(default=None, metadata=RARE)
    """Weight lambda of the rejected side in u = a - lambda b: const:0.5 (any number), ra, app_1 or app_2; else 1."""
    length_alpha: float = field(default=0.0, metadata=RARE)
    """Length correction: reward per token that is attributed to length alone (R-DPO)."""
    rpo_alpha: float = field(default=0.0, metadata=RARE)
    """Weight of the chosen response's negative log-likelihood per token, added to the loss (RPO)."""
    max_length: int | None = None
    """Longest prompt with response, in tokens; the rest is truncated."""
    max_prompt_length: int | None = None
    """Longest prompt, in tokens."""
    truncation_mode: Literal["keep_end", "keep_start"] = field(default="keep_end", metadata=RARE)
    """End of a prompt that truncation to `max_prompt_length` keeps."""

    REMOVED: ClassVar = {
        "margin_scale": (1.0, "scale the margins of the data instead"),
        "rapo_lambda": (0.5, "give the weight as --rapo const:0.5"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        check_positive(self, "learning_rate", "beta")
        for name in ("length_alpha", "rpo_alpha"):
            check_at_least(self, name, 0)
        if self.rapo:
            constant_weight(self.rapo)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label_smoothing {self.label_smoothing} must lie in [0, 0.5)")
        for flag, fitting in (("label_smoothing", SMOOTHED), ("rapo", GAP_LOSSES), ("length_alpha", LENGTH_LOSSES)):
            if getattr(self, flag) and self.loss_type not in fitting:
                raise ValueError(
                    f"--loss_type {self.loss_type} does not support --{flag} {getattr(self, flag)}; "
                    f"use one of {', '.join(sorted(fitting))}"
                )
        for name in ("max_length", "max_prompt_length"):
            if getattr(self, name) is not None:
                check_at_least(self, name, 1)
        if self.max_length and (self.max_prompt_length or 0) >= self.max_length:
            raise ValueError(
                f"--max_prompt_length {self.max_prompt_length} leaves no room for a response in --max_length "
                f"{self.max_length}; try --max_prompt_length {self.max_length // 2}"
            )


@dataclass(frozen=True, kw_only=True)
class DPOArgs(DPOLossArgs, EvalArgs):
    """Direct preference optimisation on preference pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_eval()


# --------------------------------------------------------------------------------------------------------- program
def train(
    args: DPOArgs,
    *,
    policy: Any = None,
    tokenizer: Any = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by DPO; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; rows: see `data.rows`;
    on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    if rows is None:
        check_data_dir(args)
    args.check_start(policy)
    given = given_objects(policy=policy, tokenizer=tokenizer, rows=rows)
    tokenizer = load_tokenizer(args.data_dir if rows is None else None, starting_model(args)[0], tokenizer)
    pairs, notes = load_pairs(args, "train", rows, tokenizer)
    validation = load_pairs(args, "validation", rows, tokenizer)[0] if args.eval_interval else []
    run = Run(args, "dpo", on_step, given, data=None if rows is None else "given/rows")
    policy = load_start(policy, args, tokenizer)
    check_vocabulary(pairs + validation, vocabulary_size(policy), args.data_dir)
    check_positions(pairs + validation, policy, args.data_dir)
    share_prefixes(policy, longest_text(pairs + validation))
    for note in notes:
        run.print0(note)
    run.print0("{:,} parameters, {:,} trainable; {:,} pairs".format(*count_parameters(policy), len(pairs)))
    with run.phase("reference"):
        reference = reference_logps(run, policy, pairs + validation, tokenizer)
    scored = with_reference(pairs + validation, reference["logps"])
    pairs, validation = scored[: len(pairs)], scored[len(pairs) :]

    num_steps, results, baseline = run.num_steps(len(pairs), args.mini_batch_size), {}, RunningMean()
    model = run.setup("policy", policy, args.learning_rate, num_steps)
    if run.resumed:
        baseline = RunningMean(**run.resumed["extra"]["baseline"])
    elif args.ref_model is None:
        check_start(run, model, pairs, tokenizer.pad_token_id)
    for step in run.steps(num_steps):
        started = time.perf_counter()
        batch = run.global_batch(pairs, step, args.mini_batch_size)
        shard = run.shard(batch)
        with run.phase("update"):
            metrics = train_step(run, model, shard, tokenizer.pad_token_id, baseline.value)
        baseline.update(metrics["rewards/chosen"] + metrics["rewards/rejected"], len(batch))
        run.step += 1
        if run.due(args.log_interval, num_steps):
            run.log({**metrics, "train/lr": run.learning_rate("policy"), **run.speed(shard, started)})
        if validation and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = evaluate(run, model, validation, tokenizer.pad_token_id, baseline.value)
            run.log(results)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer, extra={"reference": reference, "baseline": vars(baseline)})
    return run.finish(results)


@dataclass
class RunningMean:
    """Mean implicit reward of both sides over the finished steps, 0 before the first.

    The current step is not included: its mean is known only after all its micro-batches.
    """

    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / max(self.count, 1)

    def update(self, both: float, num_pairs: int) -> None:
        """`both`: mean chosen and mean rejected reward of a step, added."""
        self.total += both * num_pairs
        self.count += 2 * num_pairs


# ------------------------------------------------------------------------------------------------------------ data
def load_pairs(
    args: DPOArgs, split: str, given: Given | None = None, tokenizer: Any = None
) -> tuple[list[Row], list[str]]:
    """Pairs of a split, truncated to `--max_length`, and notes on how many were truncated or left out.

    Raises: UsageError when a pair lacks what the loss reads, or a prompt leaves no room for a response.
    """
    path = f"{args.data_dir}/preference_{split}.pt" if given is None else f"the given {split} rows"
    rows = load_rows("preference", split, args.data_dir, given, tokenizer)
    if not rows:
        return [], []
    if args.loss_type in SOFT_LABEL_LOSSES:
        check_column(rows, "margin", f"--loss_type {args.loss_type}", path)
    if args.rapo == "ra":
        check_column(rows, "rejected_score", "--rapo ra", path)
    truncated = [truncate(row, args) for row in rows]
    different = [row for row in truncated if list(row["chosen_input_ids"]) != list(row["rejected_input_ids"])]
    if not different:
        raise UsageError(f"{path}: no pair differs within --max_length {args.max_length}; raise it")
    shortened, lost = sum(one is not other for one, other in zip(truncated, rows)), len(rows) - len(different)
    notes = [f"{shortened:,} of {len(rows):,} pairs of {path} were truncated"] if shortened else []
    notes += [f"{lost:,} pairs of {path} have two equal responses and are left out"] if lost else []
    return different, notes


def check_column(rows: list[Row], name: str, flag: str, path: str) -> None:
    """Raises: UsageError naming the first row without a finite number in this column."""
    for index, row in enumerate(rows):
        value = row.get("columns", {}).get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(
                f"{flag} reads the column {name} of each pair, but row {index} of {path} has {value}; "
                "prepare the pairs with it, or use --loss_type sigmoid without --rapo ra"
            )


def truncate(row: Row, args: DPOArgs) -> Row:
    """Truncate the prompt to `max_prompt_length`, then both responses to the rest of `max_length`.

    A truncated response gets no end token. Returns the row itself when nothing is too long.
    """
    start = row["prompt_len"]
    prompt_len = min(start, args.max_prompt_length or start)
    room = (args.max_length or 2**62) - prompt_len
    if args.max_length and room < 1:
        raise UsageError(
            f"--max_length {args.max_length} leaves no room for a response after a prompt of {prompt_len} tokens; "
            f"give --max_prompt_length {args.max_length // 2 or 1} too"
        )
    sides = {name: row[name] for name in ("chosen_input_ids", "rejected_input_ids")}
    if prompt_len == start and all(len(ids) - start <= room for ids in sides.values()):
        return row
    first = start - prompt_len if args.truncation_mode == "keep_end" else 0
    for name, ids in sides.items():
        response = ids[start : start + min(room, len(ids))]
        sides[name] = torch.cat([torch.as_tensor(ids[first : first + prompt_len]), torch.as_tensor(response)])
    return {**row, "prompt_len": prompt_len, **sides}


# ------------------------------------------------------------------------------------------------------- reference
def reference_logps(run: Run[DPOArgs], policy: Policy, rows: list[Row], tokenizer: Any) -> dict[str, Any]:
    """Log-probabilities of all chosen, then all rejected responses under the reference, with a hash.

    A resumed run reuses those of its checkpoint if the hash of the reference's weights and of the data is the same.
    Call it before `run.setup`, which loads the trained weights of a resumed run.
    """
    reference = policy
    if run.args.ref_model is not None:
        load_tokenizer(
            run.args.data_dir if Path(run.args.data_dir).is_dir() else None, run.args.ref_model
        )  # refuses a model with another tokenizer
        plain = ModelArgs(trust_remote_code=run.args.trust_remote_code)
        reference = load_policy(run.args.ref_model, plain, tokenizer, "--ref_model")
        check_vocabulary(rows, vocabulary_size(reference), run.args.data_dir)
        check_positions(rows, reference, run.args.data_dir)
    digest = fingerprint(reference, rows)
    stored = run.resumed["extra"]["reference"] if run.resumed else None
    if stored and stored["fingerprint"] == digest:
        return stored
    if stored:
        run.print0("the reference or the data has changed since this run began: computing log-probabilities again")
    logps = score_pairs(run, reference.to(run.device), rows, tokenizer.pad_token_id)
    return {"fingerprint": digest, "logps": logps.tolist()}


def fingerprint(reference: Policy, rows: list[Row]) -> str:
    """SHA-256 of a model's weights and of the pairs' tokens."""
    digest = hash_weights(reference)
    for row in rows:
        sides = [torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected")]
        digest.update(repr((row["prompt_len"], sides)).encode())
    return digest.hexdigest()


def with_reference(rows: list[Row], logps: list[float]) -> list[Row]:
    """The rows with the two log-probabilities under the reference."""
    halves = zip(rows, logps[: len(rows)], logps[len(rows) :], strict=True)
    return [{**row, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected} for row, chosen, rejected in halves]


def check_start(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> None:
    """Raises: RunFailure when policy and reference, which start from the same weights, give other log-probabilities."""
    rows = rows[: max(run.args.micro_batch_size, run.world_size)]
    pairs = make_pairs(run.args, rows, score_pairs(run, model, rows, pad_id))
    gap = float((pairs.chosen_ratio / pairs.chosen_lengths).abs().max())
    if not gap < SCORING_TOLERANCE:
        raise RunFailure(f"before the first update the policy is {gap} nats per token away from the reference")


# -------------------------------------------------------------------------------------------------------- learning
def sequence_logps(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each whole response: (2B,), the chosen ones first."""
    return model(**policy_inputs(batch)).logprobs.sum(1)


def score_pairs(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> Tensor:
    """Log-probabilities of N pairs, dropout off, computed on all ranks: (2N,) on each, the chosen ones first."""
    logps = torch.zeros(2, len(rows), device=run.device)
    here = run.shard(range(len(rows)))
    logps[:, here] = score_shard(run, model, [rows[i] for i in here], pad_id).reshape(2, -1)
    return run.sum_over_ranks(logps).reshape(-1)


def score_shard(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> Tensor:
    """Log-probabilities of this rank's B pairs, dropout off: (2B,), the chosen ones first."""
    logps = torch.zeros(2, len(rows), device=run.device)
    numbered = [{**row, "index": index} for index, row in enumerate(rows)]
    with inference(model):
        for micro in run.pad_passes(micro_batches(numbered, run.args.micro_batch_size)):
            with run.autocast():
                scores = sequence_logps(model, preference_batch(micro, pad_id).to(run.device))  # (2B,)
            logps[:, [row["index"] for row in micro]] = scores.float().reshape(2, -1)
    return logps.reshape(-1)


def make_pairs(args: DPOArgs, rows: list[Row], logps: Tensor, baseline: float = 0.0) -> Pairs:
    """The inputs of a loss for B rows; logps (2B,), the chosen ones first."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logps.device, dtype=logps.dtype)  # (B,)

    chosen, rejected = logps.chunk(2)
    soft = args.loss_type in SOFT_LABEL_LOSSES
    pairs = Pairs(
        policy_chosen_logps=chosen,
        policy_rejected_logps=rejected,
        ref_chosen_logps=column([row["ref_chosen_logps"] for row in rows]),
        ref_rejected_logps=column([row["ref_rejected_logps"] for row in rows]),
        chosen_lengths=column([len(row["chosen_input_ids"]) - row["prompt_len"] for row in rows]),
        rejected_lengths=column([len(row["rejected_input_ids"]) - row["prompt_len"] for row in rows]),
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        length_alpha=args.length_alpha,
        baseline=baseline,
        margins=column([row["columns"]["margin"] if soft else 0.0 for row in rows]),
    )
    if args.rapo is None:
        return pairs
    weight: Tensor | float | None = constant_weight(args.rapo)
    if weight is None:
        scores = column([row["columns"]["rejected_score"] for row in rows]) if args.rapo == "ra" else None
        weight = RAPO[args.rapo](pairs, scores)
    return dataclasses.replace(pairs, rejected_weight=weight)


def train_step(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """One optimiser step on this rank's pairs; returns the metrics of the global batch."""
    args = run.args
    count = run.total(len(rows))
    ranked = args.loss_type in RANKED_LOSSES
    if ranked:
        rows = with_slopes(run, model, rows, pad_id)
    sums = torch.zeros(7, device=run.device)
    micros = run.pad_passes(micro_batches(rows, args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = preference_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            logps = sequence_logps(model, batch)  # (2B,)
            pairs = make_pairs(args, micro, logps, baseline)
            loss = ranked_loss(micro, logps) if ranked else LOSSES[args.loss_type](pairs).sum()
            nll = chosen_nll(pairs).sum()
            run.backward((loss + args.rpo_alpha * nll) / count)
        sums += torch.stack([loss, nll, *pair_sums(pairs)]).detach()
    metrics = pair_metrics(args, (run.sum_over_ranks(sums) / count).tolist())
    losses = {f"train/{name}": metrics.pop(name) for name in ("loss", "preference_loss", "nll")}
    return {**losses, "train/grad_norm": run.optimize("policy"), **metrics}


def with_slopes(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> list[Row]:
    """This rank's rows with the derivatives of a ranked loss by their two log-probabilities.

    Ranks need all pairs of a step, gradients only a micro-batch at a time: a first pass without gradients finds the
    derivative of the loss by each log-probability, a second (`ranked_loss`) carries it into the weights.
    """
    total = int(run.total(len(rows)))
    here = run.shard(range(total))  # places of this rank's rows in the global batch
    reference = [[row[f"ref_{side}_logps"] for row in rows] for side in ("chosen", "rejected")]
    gathered = torch.zeros(4, total, device=run.device)
    gathered[:2, here] = score_shard(run, model, rows, pad_id).reshape(2, -1)
    gathered[2:, here] = torch.tensor(reference, device=run.device)
    logps, ref_logps = run.sum_over_ranks(gathered).chunk(2)  # (2, N) each
    logps = logps.clone().requires_grad_()
    args = run.args
    pairs = Pairs(
        policy_chosen_logps=logps[0],
        policy_rejected_logps=logps[1],
        ref_chosen_logps=ref_logps[0],
        ref_rejected_logps=ref_logps[1],
        beta=args.beta,
        label_smoothing=args.label_smoothing,
    )
    loss = LOSSES[args.loss_type](pairs).sum()
    slopes = torch.autograd.grad(loss, logps)[0].T[here].tolist()
    return [{**row, "slopes": pair, "loss": float(loss.detach()) / total} for row, pair in zip(rows, slopes)]


def ranked_loss(rows: list[Row], logps: Tensor) -> Tensor:
    """These rows' part of a ranked loss: its value, and by `slopes` its gradient."""
    slopes = torch.tensor([row["slopes"] for row in rows], device=logps.device).T.reshape(-1)  # (2B,)
    return sum(row["loss"] for row in rows) + (slopes * (logps - logps.detach())).sum()


def pair_sums(pairs: Pairs) -> list[Tensor]:
    """Sums over pairs: implicit rewards of both sides, accuracy (a tie is half right), log-probabilities of both."""
    chosen, rejected = pairs.beta * pairs.chosen_ratio, pairs.beta * pairs.rejected_ratio
    columns = (chosen, rejected, wins(chosen, rejected), pairs.policy_chosen_logps, pairs.policy_rejected_logps)
    return [column.sum() for column in columns]


def pair_metrics(args: DPOArgs, means: list[float]) -> Metrics:
    """Means over pairs by metric name."""
    loss, nll, chosen, rejected, right, chosen_logps, rejected_logps = means
    return {
        "loss": loss + args.rpo_alpha * nll,
        "preference_loss": loss,
        "nll": nll,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": right,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }


@torch.no_grad()
def evaluate(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """Metrics of (the first `--eval_iters` micro-batches of) a split; a ranked loss ranks all of it together."""
    args = run.args
    rows = run.eval_rows(rows, args.micro_batch_size)
    pairs = make_pairs(args, rows, score_pairs(run, model, rows, pad_id), baseline)
    sums = torch.stack([LOSSES[args.loss_type](pairs).sum(), chosen_nll(pairs).sum(), *pair_sums(pairs)])
    return {f"val/{name}": value for name, value in pair_metrics(args, (sums / len(rows)).tolist()).items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(DPOArgs, argv)))


if __name__ == "__main__":
    main()
