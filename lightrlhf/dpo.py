"""Direct preference optimisation (DPO, Rafailov et al. 2023) and the losses of its relatives, one function each.

A policy is its own reward model: r(y) = beta (log pi(y|x) - log pi_ref(y|x)) + c(x). With a and b these log-ratios of
the chosen and the rejected response,

    L = -log sigmoid(beta (a - b)),  summed over pairs, divided once by their global number                      (eq. 7)

`LOSSES` holds this and twenty others, to be called on `Pairs`. `--f_divergence` takes another divergence than the KL;
`--rapo` weighs the rejected side, u = a - lambda b (the RAPO code of Online-RLHF); `--length_alpha` corrects for length
(R-DPO); `--rpo_alpha` adds the likelihood of the chosen response (RPO). `lightrlhf.kto` learns from single responses
that are labelled good or bad.

The reference's log-probabilities are computed once, before training, by the policy itself as it was loaded (or by
`--ref_model`), so no second model is in memory. SimPO, ORPO and CPO have no reference.

Left out: the reference as a mixture of policies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import above, at_least, flag
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, RolloutLogArgs, TensorParallelArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import micro_batches, preference_batch, to_device
from lightrlhf.data.flat import Rows, chained
from lightrlhf.data.rows import Given, Splits, load_rows
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.held_out import HeldOut
from lightrlhf.maths import preference, ranking
from lightrlhf.maths.ops import wins
from lightrlhf.maths.preference import LOSSES, RANKED_LOSSES, REFERENCE_FREE, SOFT_LABEL_LOSSES, Pairs
from lightrlhf.models.given import load_start
from lightrlhf.models.roles import Policy
from lightrlhf.training import direct_alignment
from lightrlhf.training import reference as scoring
from lightrlhf.training.means import RunningMean
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import Start, begin, check_texts


@dataclass(frozen=True, kw_only=True)
class DPOLossArgs(direct_alignment.PreferenceArgs):
    """Direct preference optimisation."""

    experiment_name: str = "rlhf-dpo"
    """Folder below `log_dir` for the runs of one algorithm."""
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
    ] = "sigmoid"
    """Loss of a pair; howto/algorithms/dpo.md has the formulas."""
    f_divergence: Literal["reverse_kl", "alpha", "js", "forward_kl"] = flag(
        "reverse_kl", needs={"loss_type": preference.LENGTH_LOSSES}, show="rarely"
    )
    """Divergence that constrains the policy to the reference."""
    f_alpha: float = above(0, 0.5, below=1, needs={"f_divergence": "alpha"}, show="rarely")
    """Alpha of `--f_divergence alpha`: near 0 the reverse KL, near 1 the forward KL."""
    simpo_gamma: float | None = at_least(0, None, needs={"loss_type": "simpo"}, show="rarely")
    """Target margin of simpo. Default: beta / 2."""
    label_smoothing: float = at_least(0, 0.0, below=0.5, needs={"loss_type": preference.SMOOTHED}, show="rarely")
    """Assumed fraction of pairs with flipped labels."""
    rapo: str | None = flag(
        None,
        check=preference.constant_weight,
        needs={"loss_type": preference.GAP_LOSSES},
        excludes={"f_divergence": ...},
        show="rarely",
    )
    """Weight lambda of the rejected side in u = a - lambda b: const:0.5 (any number), ra, app_1 or app_2; else 1."""
    length_alpha: float = at_least(0, 0.0, needs={"loss_type": preference.LENGTH_LOSSES}, show="rarely")
    """Length correction: reward per token attributed to length (R-DPO)."""
    rpo_alpha: float = at_least(0, 0.0, show="rarely")
    """Weight of the chosen response's negative log-likelihood per token, added to the loss (RPO)."""


@dataclass(frozen=True, kw_only=True)
class DPOArgs(DPOLossArgs, DataSetsArgs, EvalArgs, RolloutLogArgs, TensorParallelArgs):
    """Direct preference optimisation on preference pairs."""


# --------------------------------------------------------------------------------------------------------- program
def train(
    args: DPOArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by DPO; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; rows: see `data.rows`;
    on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "tokenizer": tokenizer, "rows": rows}
    run, start = begin(args, DPOArgs, "dpo", load_pairs, load_start, check_texts, given, on_step)
    pad_id = start.tokenizer.pad_token_id
    num_steps = run.order.num_steps(start.rows, args.mini_batch_size)
    reference = score_reference(run, start, num_steps)
    scored = scoring.with_reference(chained([start.rows, start.held_out]), reference.logps)  # log pi_ref of both sides
    pairs, validation = scored[: len(start.rows)], scored[len(start.rows) :]
    model = run.setup("policy", start.policy, args.learning_rate, num_steps)
    if not run.resumed and args.ref_model is None and reference.logps is not None:  # the policy is the reference yet
        first = pairs[: max(args.micro_batch_size, run.ranks.world_size)]
        direct_alignment.check_reference(first, score_rows(run, model, first, pad_id))
    baseline = RunningMean(**start.resumed.get("baseline", {}))  # of implicit rewards: the delta of bco_pair
    answers = HeldOut(run, start.policy, validation, start.tokenizer)
    run.keep(start.policy, start.tokenizer, lambda: {"reference": reference.state, "baseline": dict(vars(baseline))})

    def measure() -> Metrics:
        answers.log(run, model)
        return evaluate(run, model, validation, pad_id, baseline.value)

    for step in run.steps(num_steps):
        batch = run.order.global_batch(pairs, step, args.mini_batch_size)
        mine = run.ranks.shard(batch)
        with run.phase("update"):
            metrics = train_step(run, model, mine, pad_id, baseline.value)
        baseline.update((metrics["rewards/chosen"] + metrics["rewards/rejected"]) * len(batch), 2 * len(batch))
        run.end_step(metrics, mine, measure if validation else None)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ data
def load_pairs(args: DPOArgs, given: Given | None, tokenizer: Tokenizer) -> Splits[Row]:
    """Pairs of both splits, truncated to `--max_length`, and notes on how many were truncated or left out."""

    def read(split: str, folder: str) -> tuple[Rows, list[str]]:
        where = direct_alignment.source_of("preference", split, folder, given, "unpaired", "kto")
        return fit_pairs(args, load_rows("preference", split, folder, given, tokenizer, args.verify), where)

    splits = direct_alignment.read_splits(read, args, given)
    if args.loss_type == "simpo" and args.beta < 1:
        splits.notes.append(
            f"--beta {args.beta} is small for simpo, whose rewards are per token; its authors use 2 to 10"
        )
    return splits


def fit_pairs(args: DPOArgs, rows: Rows, where: str) -> tuple[Rows, list[str]]:
    """The pairs that differ within `--max_length`, truncated to it, and notes on how many were truncated or left out.

    Raises: UsageError when a pair lacks a column of the loss, or a prompt leaves no room for a response.
    """
    if not rows:
        return rows, []
    if args.loss_type in SOFT_LABEL_LOSSES:
        check_column(rows, "margin", f"--loss_type {args.loss_type}", where)
    if args.rapo == "ra":
        check_column(rows, "rejected_score", "--rapo ra", where)
    truncated, room = direct_alignment.truncated(rows, args)
    sides = [rows.column(name) for name in rows.texts]
    places = rows.column("differ_at") - rows.column("prompt_len")  # in the responses
    different = (places < room) & (rows.column("differ_at") < torch.maximum(*sides))  # (N,)
    if not different.any():
        raise UsageError(f"{where}: no pair differs within --max_length {args.max_length}; raise it")
    shortened = direct_alignment.number_shortened(rows, truncated)
    lost = len(rows) - int(different.sum())
    notes = [f"{shortened:,} of {len(rows):,} pairs of {where} were truncated"] if shortened else []
    notes += [f"{lost:,} pairs of {where} have two equal responses and are left out"] if lost else []
    return truncated.select(different.nonzero()[:, 0]) if lost else truncated, notes


def check_column(rows: Rows, name: str, flag: str, where: str) -> None:
    """Raises: UsageError naming the first row without a finite number in this column."""
    if rows.facts().columns.get(name) == len(rows):
        return
    for index, row in enumerate(rows):
        value = row.get("columns", {}).get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(
                f"{flag} needs a number in the column {name}, but row {index} of {where} has {value}; "
                "add it to the pairs, or use --loss_type sigmoid without --rapo ra"
            )


# --------------------------------------------------------------------------------------------- log-probabilities
def score_rows(run: Run[DPOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Tensor:
    """Log-probabilities of N pairs, dropout off, computed on all ranks: (2, N) on each, the chosen ones first."""
    return scoring.score_rows(run, model, rows, partial(preference_batch, pad_id=pad_id))


def score_reference(run: Run[DPOArgs], start: Start[Policy, Row], num_steps: int) -> scoring.Scored:
    """Log-probabilities under the reference of the pairs that steps and evaluations read, validation last."""
    if run.args.loss_type in REFERENCE_FREE:
        return scoring.Scored({"fingerprint": None, "places": [], "logps": []}, None)
    rows, model = chained([start.rows, start.held_out]), direct_alignment.load_reference(run, start)
    parts = scoring.parts_to_score(run, len(start.rows), len(start.held_out), num_steps)

    def score(model: nn.Module, part: Sequence[Row]) -> Tensor:
        return score_rows(run, model, part, start.tokenizer.pad_token_id)

    return scoring.score_before_training(run, model, rows, parts, score, scoring.fingerprint(model, rows))


# -------------------------------------------------------------------------------------------------------- learning
def make_pairs(args: DPOArgs, rows: Sequence[Row], logps: Tensor, baseline: float = 0.0) -> Pairs:
    """The inputs of a loss for B rows; logps (2B,), the chosen ones first."""

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=logps.dtype), logps.device)  # (B,)

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
        divergence=partial(preference.DIVERGENCES[args.f_divergence], alpha=args.f_alpha),
        gamma=args.beta / 2 if args.simpo_gamma is None else args.simpo_gamma,
    )
    if args.rapo is None:
        return pairs
    weight: Tensor | float | None = preference.constant_weight(args.rapo)
    if weight is None:
        scores = column([row["columns"]["rejected_score"] for row in rows]) if args.rapo == "ra" else None
        weight = preference.RAPO[args.rapo](pairs, scores)
    return dataclasses.replace(pairs, rejected_weight=weight)


def train_step(run: Run[DPOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """One optimiser step on this rank's pairs; returns the metrics of the global batch."""
    args = run.args
    count = run.ranks.total(len(rows))
    if args.loss_type in RANKED_LOSSES:
        rows = with_slopes(run, model, rows, pad_id)
    sums = torch.zeros(7, device=run.device)
    micros = run.ranks.pad_passes(micro_batches(rows, args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = preference_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            loss, parts = loss_of(args, micro, scoring.sequence_logps(model, batch), baseline)
            run.backward(loss / count, batch.on_host.row)
        sums += torch.stack(parts).detach()
    metrics = pair_metrics(args, (run.ranks.sum(sums) / count).tolist())
    losses = {f"train/{name}": metrics.pop(name) for name in ("loss", "preference_loss", "nll")}
    return {**losses, "train/grad_norm": run.optimize("policy"), **metrics}


def loss_of(args: DPOArgs, rows: Sequence[Row], logps: Tensor, baseline: float) -> tuple[Tensor, list[Tensor]]:
    """Loss of B pairs, a sum, and the seven sums of `pair_metrics`; logps (2B,), the chosen ones first."""
    pairs = make_pairs(args, rows, logps, baseline)
    if any("slopes" in row for row in rows):
        slopes = to_device(torch.tensor([row["slopes"] for row in rows]), logps.device).T.reshape(-1)  # (2B,)
        loss = ranking.ranked_loss(sum(row["loss"] for row in rows), slopes, logps)
    else:
        loss = LOSSES[args.loss_type](pairs).sum()
    nll = preference.chosen_nll(pairs).sum()
    return loss + args.rpo_alpha * nll, [loss, nll, *pair_sums(args, pairs)]


def with_slopes(run: Run[DPOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> list[Row]:
    """This rank's pairs with their part of a ranked loss and its derivatives by their two log-probabilities.

    They come from a first pass over the pairs of all ranks, which draws the dropout of the second.
    """
    total = int(run.ranks.total(len(rows)))
    here = run.ranks.shard(range(total))  # indices of this rank's rows in the global batch
    reference = [[row[f"ref_{side}_logps"] for row in rows] for side in ("chosen", "rejected")]
    gathered = torch.zeros(4, total, device=run.device)
    gathered[:2, here] = scoring.score_shard(run, model, rows, partial(preference_batch, pad_id=pad_id), dropout=True)
    gathered[2:, here] = torch.tensor(reference, device=run.device)
    logps, ref_logps = run.ranks.sum(gathered).chunk(2)  # (2, N) each
    args = run.args

    def loss(logps: Tensor) -> Tensor:
        pairs = Pairs(
            policy_chosen_logps=logps[0],
            policy_rejected_logps=logps[1],
            ref_chosen_logps=ref_logps[0],
            ref_rejected_logps=ref_logps[1],
            beta=args.beta,
            label_smoothing=args.label_smoothing,
        )
        return LOSSES[args.loss_type](pairs)

    value, slopes = ranking.loss_slopes(loss, logps)
    mine = slopes.T[here].tolist()
    return [{**row, "slopes": pair, "loss": value / total} for row, pair in zip(rows, mine)]


def pair_sums(args: DPOArgs, pairs: Pairs) -> list[Tensor]:
    """Sums over pairs: rewards of both sides, accuracy (a tie is half right), log-probabilities of both."""
    chosen, rejected = preference.REWARDS.get(args.loss_type, preference.implicit_rewards)(pairs)
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
def evaluate(run: Run[DPOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """Metrics of (the first `--eval_iters` micro-batches of) a split; a ranked loss ranks all of it together."""
    rows = run.order.eval_rows(rows, run.args.micro_batch_size)
    logps = score_rows(run, model, rows, pad_id).reshape(-1)  # (2N,)
    sums = torch.stack(loss_of(run.args, rows, logps, baseline)[1])
    return {f"val/{name}": value for name, value in pair_metrics(run.args, (sums / len(rows)).tolist()).items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(DPOArgs, argv)))


if __name__ == "__main__":
    main()
