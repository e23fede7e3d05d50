"""Direct preference optimisation (DPO, Rafailov et al. 2023) and the losses of its relatives, one function each.

A policy is its own reward model: r(y) = beta (log pi(y|x) - log pi_ref(y|x)) + c(x). With a and b these log-ratios of
the chosen and the rejected response,

    L = -log sigmoid(beta (a - b)),  summed over pairs, divided once by their global number                      (eq. 7)

`LOSSES` holds this and twenty others, to be called on `Pairs`. `--f_divergence` takes another divergence than the KL;
`--rapo` weighs the rejected side, u = a - lambda b (the RAPO code of Online-RLHF); `--length_alpha` corrects for length
(R-DPO); `--rpo_alpha` adds the likelihood of the chosen response (RPO). `UNPAIRED_LOSSES` learn from single responses
that are labelled good or bad, `unpaired_*.pt`: KTO and BCO.

The reference's log-probabilities are computed once, before training, by the policy itself as it was loaded (or by
`--ref_model`), so no second model is in memory. KTO also needs them of each step's mismatched prompts and responses:
the order of the data follows from the seed, so these are known before training, too, and computed then for all steps.
SimPO, ORPO and CPO have no reference.

Left out: BCO's weights by the density of prompts, KTO on pairs taken apart, the reference as a mixture of policies.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import above, at_least, check_args, flag, positive
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, RolloutLogArgs, StartArgs, TensorParallelArgs, TrainArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import micro_batch_indices
from lightrlhf.data.mixtures import interleave
from lightrlhf.data.rows import Given, load_rows, sources
from lightrlhf.data.splits import Row, check_data_dir, check_vocabulary, token_keys
from lightrlhf.generation.held_out import HeldOut
from lightrlhf.maths.ops import wins
from lightrlhf.maths.preference import (
    DIVERGENCES,
    GAP_LOSSES,
    LENGTH_LOSSES,
    LOSSES,
    RANKED_LOSSES,
    RAPO,
    REFERENCE_FREE,
    REWARDS,
    SMOOTHED,
    SOFT_LABEL_LOSSES,
    Pairs,
    chosen_nll,
    constant_weight,
    implicit_rewards,
)
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES, Responses
from lightrlhf.models.given import load_start
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, enable_packing
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.provenance import given_objects
from lightrlhf.training.reference import (
    Mismatches,
    compare_start,
    make_batch,
    reference_logps,
    score_rows,
    score_shard,
    sequence_logps,
    with_reference,
)
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.scored import by_place, parts_to_score


@dataclass(frozen=True, kw_only=True)
class DPOLossArgs(TrainArgs, StartArgs):
    """Direct preference optimisation."""

    experiment_name: str = "rlhf-dpo"
    """Folder below `log_dir` for the runs of one algorithm."""
    ref_model: str | None = flag(None, excludes={"loss_type": REFERENCE_FREE}, show="rarely")
    """Experiment dir, checkpoint or folder of another reference; the starting policy when not given."""
    learning_rate: float = positive(1e-6)
    """Peak learning rate."""
    lr_warmup_ratio: float | None = 0.03
    """Share of all steps for a linear warm-up from 0."""
    disable_dropout: bool = True
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
        "discopop",
        "simpo",
        "orpo",
        "cpo",
        "kto",
        "bco",
    ] = "sigmoid"
    """Loss of a pair, or (kto, bco) of a labelled response; howto/algorithms/dpo.md has the formulas."""
    beta: float = positive(0.1)
    """Strength of the KL constraint to the reference: the temperature of the implicit reward."""
    f_divergence: Literal["reverse_kl", "alpha", "js", "forward_kl"] = flag(
        "reverse_kl", needs={"loss_type": LENGTH_LOSSES}, show="rarely"
    )
    """Divergence of that constraint."""
    f_alpha: float = above(0, 0.5, below=1, needs={"f_divergence": "alpha"}, show="rarely")
    """Alpha of `--f_divergence alpha`: near 0 the reverse KL, near 1 the forward KL."""
    simpo_gamma: float | None = at_least(0, None, needs={"loss_type": "simpo"}, show="rarely")
    """Target margin of simpo; half of beta when not given."""
    desirable_weight: float = positive(1.0, needs={"loss_type": UNPAIRED_LOSSES}, show="rarely")
    """Weight of good responses in kto and bco; times their number 1 to 4/3 of the same for bad ones is advised."""
    undesirable_weight: float = positive(1.0, needs={"loss_type": UNPAIRED_LOSSES}, show="rarely")
    """Weight of bad responses in kto and bco."""
    label_smoothing: float = at_least(0, 0.0, below=0.5, needs={"loss_type": SMOOTHED}, show="rarely")
    """Assumed share of pairs with flipped labels."""
    rapo: str | None = flag(
        None, check=constant_weight, needs={"loss_type": GAP_LOSSES}, excludes={"f_divergence": ...}, show="rarely"
    )
    """Weight lambda of the rejected side in u = a - lambda b: const:0.5 (any number), ra, app_1 or app_2; else 1."""
    length_alpha: float = at_least(0, 0.0, needs={"loss_type": LENGTH_LOSSES}, show="rarely")
    """Length correction: reward per token that is attributed to length alone (R-DPO)."""
    rpo_alpha: float = at_least(0, 0.0, needs={"loss_type": LOSSES}, show="rarely")
    """Weight of the chosen response's negative log-likelihood per token, added to the loss (RPO)."""
    max_length: int | None = at_least(1, None, show="rarely")
    """Longest prompt with response, in tokens; the rest is truncated."""
    max_prompt_length: int | None = at_least(1, None, show="rarely")
    """Longest prompt, in tokens."""
    truncation_mode: Literal["keep_end", "keep_start"] = flag("keep_end", show="rarely")
    """End of a prompt that truncation to `max_prompt_length` keeps."""

    def _check(self) -> None:
        if self.loss_type == "kto" and self.mini_batch_size * self.devices * self.num_nodes < 2:
            raise ValueError("--loss_type kto compares responses of a step with each other; try --mini_batch_size 8")
        if self.max_length and (self.max_prompt_length or 0) >= self.max_length:
            raise ValueError(
                f"--max_prompt_length {self.max_prompt_length} leaves no room for a response in --max_length "
                f"{self.max_length}; try --max_prompt_length {self.max_length // 2}"
            )


@dataclass(frozen=True, kw_only=True)
class DPOArgs(DPOLossArgs, DataSetsArgs, EvalArgs, RolloutLogArgs, TensorParallelArgs):
    """Direct preference optimisation on preference pairs, or on labelled responses."""


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
    check_args(args, DPOArgs)
    if rows is None:
        check_data_dir(args)
    args.check_start(policy)
    given = given_objects(policy=policy, tokenizer=tokenizer, rows=rows)
    tokenizer = load_tokenizer(args.data_dir if rows is None else None, starting_model(args)[0], tokenizer, args.verify)
    load = load_unpaired if args.loss_type in UNPAIRED_LOSSES else load_pairs
    loaded = [load(args, "train", folder, rows, tokenizer) for folder in sources(args, rows)]
    pairs, notes = ([one for part in parts for one in part] for parts in zip(*loaded))  # or labelled responses
    folders = sources(args, rows) if args.eval_interval else []
    validation = interleave([load(args, "validation", folder, rows, tokenizer)[0] for folder in folders])
    if load is load_unpaired:
        notes += check_labels(args, pairs, args.data_name)
    run = Run(args, "dpo", on_step, given, data=None if rows is None else "given/rows")
    policy = load_start(policy, args, tokenizer)
    check_vocabulary(pairs + validation, vocabulary_size(policy), args.data_name)
    check_positions(pairs + validation, policy, args.data_name)
    enable_packing(policy)
    if args.loss_type == "simpo" and args.beta < 1:
        notes.append(f"--beta {args.beta} is small for simpo, whose rewards are per token; its authors use 2 to 10")
    for note in notes:
        run.print0(note)
    run.mix([len(one) for one, _ in loaded])
    num_steps, baseline = run.num_steps(pairs, args.mini_batch_size), RunningMean()
    mismatches = Mismatches(run, pairs, validation, num_steps) if args.loss_type == "kto" else None
    with run.phase("reference"):
        parts = parts_to_score(run, len(pairs), len(validation), num_steps)
        reference = reference_logps(run, policy, pairs + validation, tokenizer, parts, mismatches)
    logps = by_place(reference, mismatches.end if mismatches else len(pairs) + len(validation))
    scored = with_reference(pairs + validation, logps)
    pairs, validation = scored[: len(pairs)], scored[len(pairs) :]
    if mismatches and logps is not None:
        mismatches.logps = logps
        validation = mismatches.add(validation, -1)
    model = run.setup("policy", policy, args.learning_rate, num_steps)
    held_out = HeldOut(run, policy, validation, tokenizer)
    if run.resumed:
        baseline = RunningMean(**run.resumed["extra"]["baseline"])
    elif args.ref_model is None and args.loss_type not in REFERENCE_FREE:
        compare_start(run, model, pairs, tokenizer.pad_token_id)
    run.keep(policy, tokenizer, lambda: {"reference": reference, "baseline": dict(vars(baseline))})

    def measure() -> Metrics:
        results = evaluate(run, model, validation, tokenizer.pad_token_id, baseline.value)
        held_out.log(run, model)
        return results

    for step in run.steps(num_steps):
        batch = run.global_batch(pairs, step, args.mini_batch_size)
        if mismatches:
            batch = mismatches.add(batch, step)
        shard = run.shard(batch)
        with run.phase("update"):
            metrics = train_step(run, model, shard, tokenizer.pad_token_id, baseline.value)
        baseline.update(*total_reward(metrics, batch))
        run.end_step(metrics, shard, measure if validation else None)
    return run.finish()


@dataclass
class RunningMean:
    """BCO's delta: mean implicit reward over the finished steps, 0 before the first.

    Of labelled responses the mean of that of the good and that of the bad ones, however many there are of each. The
    current step is not included: its mean is known only after all its micro-batches.
    """

    total: float = 0.0
    count: int = 0
    bad_total: float = 0.0
    bad_count: int = 0

    @property
    def value(self) -> float:
        sides = ((self.total, self.count), (self.bad_total, self.bad_count))
        means = [total / count for total, count in sides if count]
        return sum(means) / max(len(means), 1)

    def update(self, total: float, count: int, bad_total: float = 0.0, bad_count: int = 0) -> None:
        """Add the rewards of a step: their sum and their number, those of bad responses apart."""
        self.total += total
        self.count += count
        self.bad_total += bad_total
        self.bad_count += bad_count


def total_reward(metrics: Metrics, batch: list[Row]) -> tuple[float, int] | tuple[float, int, float, int]:
    """Sum and number of a step's implicit rewards: of both sides of pairs; of good, then of bad responses."""
    chosen, rejected = (metrics.get(f"rewards/{side}", 0.0) for side in ("chosen", "rejected"))
    if "label" not in batch[0]:
        return (chosen + rejected) * len(batch), 2 * len(batch)
    good = sum(row["label"] for row in batch)
    bad = len(batch) - good
    return chosen * good, good, rejected * bad, bad


# ------------------------------------------------------------------------------------------------------------ data
def load_stage(
    args: DPOArgs, stage: str, split: str, data_dir: str, given: Given | None, tokenizer: Any
) -> tuple[list[Row], str]:
    """Rows of a split, and where they are from. Raises: UsageError, naming the losses that fit what is there."""
    if given is not None:
        return load_rows(stage, split, data_dir, given, tokenizer), f"the given {split} rows"
    other_stage = "preference" if stage == "unpaired" else "unpaired"
    path, other = (Path(data_dir, f"{name}_{split}.pt") for name in (stage, other_stage))
    if not path.is_file() and other.is_file():
        fitting = LOSSES if stage == "unpaired" else UNPAIRED_LOSSES  # those of the other stage
        raise UsageError(
            f"--loss_type {args.loss_type} learns from {path.name}, but {data_dir} holds {other.name}; "
            f"prepare the data again, or use one of --loss_type {', '.join(fitting)}"
        )
    return load_rows(stage, split, data_dir, None, tokenizer, args.verify), str(path)


def load_unpaired(
    args: DPOArgs, split: str, data_dir: str, given: Given | None = None, tokenizer: Any = None
) -> tuple[list[Row], list[str]]:
    """Labelled responses of a split, truncated to `--max_length`, and a note on how many were."""
    rows, path = load_stage(args, "unpaired", split, data_dir, given, tokenizer)
    truncated = [truncate(row, args) for row in rows]
    shortened = sum(one is not other for one, other in zip(truncated, rows))
    return truncated, [f"{shortened:,} of {len(rows):,} responses of {path} were truncated"] if shortened else []


def check_labels(args: DPOArgs, rows: list[Row], where: str) -> list[str]:
    """Notes on the balance of labelled responses.

    Raises: UsageError when all have one label (or for kto one prompt), for nothing can be compared then.
    """
    good = sum(row["label"] for row in rows)
    bad = len(rows) - good
    if not good or not bad:
        raise UsageError(f"{where}: all {len(rows):,} rows have the label {bool(good)}; add rows of the other label")
    if args.loss_type != "kto":
        return []
    prompts = {tuple(torch.as_tensor(row["input_ids"])[: row["prompt_len"]].tolist()) for row in rows}
    if len(prompts) < 2:
        raise UsageError(f"{where}: all rows have one prompt, but kto compares prompts; use --loss_type bco")
    ratio = args.desirable_weight * good / (args.undesirable_weight * bad)
    if 0.999 < ratio < 1.334:
        return []
    weight = f"{args.undesirable_weight * ratio:.3g}"
    return [f"{good:,} good and {bad:,} bad responses: the paper advises --undesirable_weight {weight} for them"]


def load_pairs(
    args: DPOArgs, split: str, data_dir: str, given: Given | None = None, tokenizer: Any = None
) -> tuple[list[Row], list[str]]:
    """Pairs of a split, truncated to `--max_length`, and notes on how many were truncated or left out.

    Raises: UsageError when a pair lacks what the loss reads, or a prompt leaves no room for a response.
    """
    rows, path = load_stage(args, "preference", split, data_dir, given, tokenizer)
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
    """Truncate the prompt to `max_prompt_length`, then its responses to the rest of `max_length`.

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
    sides = {name: row[name] for name in token_keys(row)}
    if prompt_len == start and all(len(ids) - start <= room for ids in sides.values()):
        return row
    first = start - prompt_len if args.truncation_mode == "keep_end" else 0
    for name, ids in sides.items():
        response = ids[start : start + min(room, len(ids))]
        sides[name] = torch.cat([torch.as_tensor(ids[first : first + prompt_len]), torch.as_tensor(response)])
    return {**row, "prompt_len": prompt_len, **sides}


# -------------------------------------------------------------------------------------------------------- learning
def reference_point(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> float:
    """KTO's beta z0 of the mini-batch whose rows are on all ranks: beta max(0, mean log-ratio of its mismatched rows).

    It estimates the KL to the reference, and is one number for all micro-batches, so that these change no gradient.
    """
    others = [row["mismatch"] for row in rows]
    reference = torch.tensor([other["ref_logps"] for other in others], device=run.device)
    total = run.sum_over_ranks((score_shard(run, model, others, pad_id) - reference).sum())
    return run.args.beta * max(float(total) / run.total(len(rows)), 0.0)


def make_responses(args: DPOArgs, rows: list[Row], logps: Tensor, baseline: float) -> Responses:
    """The inputs of a loss for B labelled responses; logps (B,)."""
    return Responses(
        policy_logps=logps,
        ref_logps=torch.tensor([row["ref_logps"] for row in rows], device=logps.device, dtype=logps.dtype),
        desirable=torch.tensor([row["label"] for row in rows], device=logps.device, dtype=torch.bool),
        beta=args.beta,
        reference_point=baseline,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
    )


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
        divergence=partial(DIVERGENCES[args.f_divergence], alpha=args.f_alpha),
        gamma=args.beta / 2 if args.simpo_gamma is None else args.simpo_gamma,
    )
    if args.rapo is None:
        return pairs
    weight: Tensor | float | None = constant_weight(args.rapo)
    if weight is None:
        scores = column([row["columns"]["rejected_score"] for row in rows]) if args.rapo == "ra" else None
        weight = RAPO[args.rapo](pairs, scores)
    return dataclasses.replace(pairs, rejected_weight=weight)


def train_step(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """One optimiser step on this rank's rows; returns the metrics of the global batch."""
    args = run.args
    count = run.total(len(rows))
    if args.loss_type in RANKED_LOSSES:
        rows = with_slopes(run, model, rows, pad_id)
    if args.loss_type == "kto":
        baseline = reference_point(run, model, rows, pad_id)
    sums = torch.zeros(8, device=run.device)
    micros = run.pad_passes(micro_batch_indices(rows, args.micro_batch_size))
    for i, places in enumerate(micros):
        micro = [rows[j] for j in places]
        batch = make_batch(args, micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            loss, parts = loss_of(args, micro, sequence_logps(model, batch), baseline)
            run.backward(loss / count, places)
        sums += torch.stack(parts).detach()
    metrics = metrics_of(args, (run.sum_over_ranks(sums) / count).tolist(), baseline)
    losses = {f"train/{name}": metrics.pop(name) for name in ("loss", "preference_loss", "nll") if name in metrics}
    return {**losses, "train/grad_norm": run.optimize("policy"), **metrics}


def loss_of(args: DPOArgs, rows: list[Row], logps: Tensor, baseline: float) -> tuple[Tensor, list[Tensor]]:
    """Loss of B rows, a sum, and the eight sums that their metrics are made of."""
    if args.loss_type in UNPAIRED_LOSSES:
        responses = make_responses(args, rows, logps, baseline)
        loss = UNPAIRED_LOSSES[args.loss_type](responses).sum()
        return loss, [loss, *response_sums(responses)]
    pairs = make_pairs(args, rows, logps, baseline)
    ranked = any("slopes" in row for row in rows)
    loss = ranked_loss(rows, logps) if ranked else LOSSES[args.loss_type](pairs).sum()
    nll = chosen_nll(pairs).sum()
    return loss + args.rpo_alpha * nll, [loss, nll, *pair_sums(args, pairs), loss.new_tensor(len(rows))]


def with_slopes(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> list[Row]:
    """This rank's rows with the derivatives of a ranked loss by their two log-probabilities.

    Ranks need all pairs of a step, gradients only a micro-batch at a time: a first pass without gradients finds the
    derivative of the loss by each log-probability, a second (`ranked_loss`) carries it into the weights. Both draw the
    same dropout.
    """
    total = int(run.total(len(rows)))
    here = run.shard(range(total))  # places of this rank's rows in the global batch
    reference = [[row[f"ref_{side}_logps"] for row in rows] for side in ("chosen", "rejected")]
    gathered = torch.zeros(4, total, device=run.device)
    gathered[:2, here] = score_shard(run, model, rows, pad_id, dropout=True).reshape(2, -1)
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


def metrics_of(args: DPOArgs, means: list[float], baseline: float) -> Metrics:
    """Metrics of the global batch from the sums of `loss_of`, divided by its number of rows."""
    if args.loss_type in UNPAIRED_LOSSES:
        return response_metrics(args, means, baseline)
    return pair_metrics(args, means[:-1])


def response_sums(responses: Responses) -> list[Tensor]:
    """Sums over responses: accuracy (at the reference point half right), then by label number, rewards and
    log-probabilities."""
    margins, good = responses.margins, responses.desirable
    sums = [wins(margins, torch.zeros_like(margins)).sum()]
    for label in (good, ~good):
        chosen = label.to(margins.dtype)
        sums += [(chosen * values).sum() for values in (chosen, responses.rewards, responses.policy_logps)]
    return sums


def response_metrics(args: DPOArgs, means: list[float], baseline: float) -> Metrics:
    """Means by metric name; those of a label that no row has are left out."""
    loss, right, *by_label = means
    metrics = {"loss": loss, "rewards/accuracies": right}
    for side, (share, reward, logps) in (("chosen", by_label[:3]), ("rejected", by_label[3:])):
        if share:
            metrics |= {f"rewards/{side}": reward / share, f"logps/{side}": logps / share}
    if by_label[0] and by_label[3]:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics | {"rewards/reference_point": baseline}


def pair_sums(args: DPOArgs, pairs: Pairs) -> list[Tensor]:
    """Sums over pairs: rewards of both sides, accuracy (a tie is half right), log-probabilities of both."""
    chosen, rejected = REWARDS.get(args.loss_type, implicit_rewards)(pairs)
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
    if args.loss_type == "kto":
        baseline = reference_point(run, model, run.shard(rows), pad_id)
    sums = torch.stack(loss_of(args, rows, score_rows(run, model, rows, pad_id), baseline)[1])
    return {f"val/{name}": value for name, value in metrics_of(args, (sums / len(rows)).tolist(), baseline).items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(DPOArgs, argv)))


if __name__ == "__main__":
    main()
