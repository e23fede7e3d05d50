"""Learning from responses that are labelled good or bad: KTO (Ethayarajh et al. 2024) and BCO (Jung et al. 2024).

With r = beta (log pi(y|x) - log pi_ref(y|x)) the implicit reward of a response and s the sigmoid,

    L = (1/N) [sum over good responses of lambda_D s(z0 - r) + sum over bad ones of lambda_U s(r - z0)]     (KTO, eq. 8)
    L = (1/N) [-sum over good ones of lambda_D log s(r - d) - sum over bad ones of lambda_U log s(d - r)]          (BCO)

z0 estimates beta times the KL to the reference, from each step's prompts with the responses to other prompts; d is the
middle between the mean rewards of good and of bad responses over all previous steps.

The reference's log-probabilities are computed once, before training, as `lightrlhf.dpo` does. KTO also needs them of
each step's mismatched prompts and responses: the order of the data follows from the seed, so these are known before
training, too, and computed then for all steps.

Left out: BCO's weights by the density of prompts, KTO on pairs taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import positive
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, RolloutLogArgs, TensorParallelArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import micro_batches, mismatched_rows, to_device, unpaired_batch
from lightrlhf.data.flat import Rows, chained
from lightrlhf.data.rows import Given, Splits, load_rows
from lightrlhf.data.splits import Row, longest_text
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.held_out import HeldOut
from lightrlhf.maths.ops import wins
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES, Responses
from lightrlhf.models.given import load_start
from lightrlhf.models.roles import Policy
from lightrlhf.training import direct_alignment
from lightrlhf.training import reference as scoring
from lightrlhf.training.means import RunningMean
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import Start, begin, check_texts


@dataclass(frozen=True, kw_only=True)
class KTOArgs(direct_alignment.PreferenceArgs, DataSetsArgs, EvalArgs, RolloutLogArgs, TensorParallelArgs):
    """Learn from responses that are labelled good or bad."""

    experiment_name: str = "rlhf-kto"
    """Folder below `log_dir` for the runs of one algorithm."""
    loss_type: Literal["kto", "bco"] = "kto"
    """Loss of a labelled response; howto/algorithms/kto.md has the formulas."""
    desirable_weight: float = positive(1.0, show="rarely")
    """Weight of good responses; the paper advises 1 to 4/3 for (weight x number of good) / (weight x number of bad)."""
    undesirable_weight: float = positive(1.0, show="rarely")
    """Weight of bad responses."""

    def _check(self) -> None:
        if self.loss_type == "kto" and self.mini_batch_size * self.devices * self.num_nodes < 2:
            raise ValueError("--loss_type kto compares the responses within a step; try --mini_batch_size 8")


# --------------------------------------------------------------------------------------------------------- program
def train(
    args: KTOArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by KTO or BCO; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; rows: see `data.rows`;
    on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "tokenizer": tokenizer, "rows": rows}
    run, start = begin(args, KTOArgs, "kto", load_responses, load_start, check_texts, given, on_step)
    pad_id = start.tokenizer.pad_token_id
    num_steps = run.order.num_steps(start.rows, args.mini_batch_size)
    mismatches = Mismatches(run, start, num_steps) if args.loss_type == "kto" else None
    reference = score_reference(run, start, num_steps, mismatches)
    scored = scoring.with_reference(chained([start.rows, start.held_out]), reference.logps)
    responses, validation = scored[: len(start.rows)], scored[len(start.rows) :]
    if mismatches:
        mismatches.logps = reference.logps
        validation = mismatches.add(validation, -1)
    model = run.setup("policy", start.policy, args.learning_rate, num_steps)
    if not run.resumed and args.ref_model is None:
        first = responses[: max(args.micro_batch_size, run.ranks.world_size)]
        direct_alignment.check_reference(first, score_rows(run, model, first, pad_id))
    good, bad = (RunningMean(**start.resumed.get(label, {})) for label in ("good", "bad"))  # of implicit rewards
    answers = HeldOut(run, start.policy, validation, start.tokenizer)
    state = {"reference": reference.state}
    run.keep(start.policy, start.tokenizer, lambda: state | {"good": dict(vars(good)), "bad": dict(vars(bad))})

    def measure() -> Metrics:
        answers.log(run, model)
        return evaluate(run, model, validation, pad_id, middle(good, bad))

    for step in run.steps(num_steps):
        batch = run.order.global_batch(responses, step, args.mini_batch_size)
        mine = run.ranks.shard(mismatches.add(batch, step) if mismatches else batch)
        with run.phase("update"):
            metrics = train_step(run, model, mine, pad_id, middle(good, bad))
        num_good = sum(row["label"] for row in batch)
        good.update(metrics.get("rewards/chosen", 0.0) * num_good, num_good)
        bad.update(metrics.get("rewards/rejected", 0.0) * (len(batch) - num_good), len(batch) - num_good)
        run.end_step(metrics, mine, measure if validation else None)
    return run.finish()


def middle(good: RunningMean, bad: RunningMean) -> float:
    """BCO's d: mean of the good responses' mean reward and the bad ones', as far as there are any."""
    means = [mean.value for mean in (good, bad) if mean.count]
    return sum(means) / max(len(means), 1)


# ------------------------------------------------------------------------------------------------------------ data
def load_responses(args: KTOArgs, given: Given | None, tokenizer: Tokenizer) -> Splits[Row]:
    """Labelled responses of both splits, truncated to `--max_length`, with notes on that and on their balance."""

    def read(split: str, folder: str) -> tuple[Rows, list[str]]:
        where = direct_alignment.source_of("unpaired", split, folder, given, "preference", "dpo")
        rows = load_rows("unpaired", split, folder, given, tokenizer, args.verify)
        if not rows:
            return rows, []
        truncated, _ = direct_alignment.truncated(rows, args)
        shortened = direct_alignment.number_shortened(rows, truncated)
        return truncated, [f"{shortened:,} of {len(rows):,} responses of {where} were truncated"] if shortened else []

    splits = direct_alignment.read_splits(read, args, given)
    splits.notes += check_labels(args, chained(splits.sets))
    return splits


def check_labels(args: KTOArgs, rows: Rows) -> list[str]:
    """Notes on the balance of labelled responses.

    Raises: UsageError when all have one label (or for kto one prompt), for nothing can be compared then.
    """
    good = int(rows.column("label").sum())
    bad = len(rows) - good
    if not good or not bad:
        raise UsageError(
            f"{args.data_name}: all {len(rows):,} rows have the label {bool(good)}; add rows of the other label"
        )
    if args.loss_type != "kto":
        return []
    prompts = (row["input_ids"][: row["prompt_len"]] for row in rows)
    first = next(prompts)
    if all(torch.equal(first, prompt) for prompt in prompts):
        raise UsageError(f"{args.data_name}: all rows have one prompt, but kto compares prompts; use --loss_type bco")
    ratio = args.desirable_weight * good / (args.undesirable_weight * bad)
    if 0.999 < ratio < 1.334:
        return []
    weight = f"{args.undesirable_weight * ratio:.3g}"
    return [f"{good:,} good and {bad:,} bad responses: the paper advises --undesirable_weight {weight} for them"]


# ---------------------------------------------------------------------------------------------- log-probabilities
class Mismatches:
    """KTO's mismatched prompts and responses of the validation rows, and of each step.

    They follow from the order of the data, so the reference scores them before training, and a resumed run has the
    same. Their indices follow the data's: first validation, then the steps, with a whole batch each.
    No mismatched text is longer than the longest of the data.
    """

    def __init__(self, run: Run[KTOArgs], start: Start[Policy, Row], num_steps: int) -> None:
        self.run, self.rows, self.validation = run, start.rows, start.held_out
        self.data = chained([self.rows, self.validation])
        self.blocks = scoring.blocks(run, num_steps, of_dry_run=run.dry is not None)
        self.width = longest_text(self.data)
        args = run.args
        self.size = args.mini_batch_size * run.ranks.world_size
        self.key = (len(self.rows), args.seed, self.size, *args.data_weights)
        self.logps: Tensor | None = None  # (1, N) over all indices, once scored
        self._last: tuple[int, list[Row]] = -2, []  # a step and its mismatched rows

    def __len__(self) -> int:
        return self._start(self.blocks[-1].stop)

    def __getitem__(self, place: int) -> Row:
        """The row at an index: one of the data, or a mismatched one."""
        if place < self._start(-1):
            return self.data[place]
        step, number = divmod(place - self._start(0), self.size)
        if place < self._start(0):
            step, number = -1, place - self._start(-1)
        if self._last[0] != step:  # indices come in order
            self._last = step, self._mismatch(self.validation if step < 0 else self._batch(step))
        return self._last[1][number]

    def parts(self) -> list[Tensor]:
        """Indices of all mismatched rows, in parts."""
        parts = scoring.in_parts(self.run, range(self._start(-1), self._start(0)))
        for steps in self.blocks:
            ends = [(self._start(step), self._start(step) + len(self._batch(step))) for step in steps]
            parts.append(torch.tensor([place for first, end in ends for place in range(first, end)]))
        return parts

    def add(self, batch: Sequence[Row], step: int) -> list[Row]:
        """Rows of a step, or of validation (-1), with their `mismatch` and its log-probability under the reference."""
        assert self.logps is not None
        values = self.logps[0, self._start(step) : self._start(step) + len(batch)].tolist()
        columns = zip(batch, self._mismatch(batch), values, strict=True)
        return [{**row, "mismatch": {**other, "ref_logps": logp}} for row, other, logp in columns]

    def _start(self, step: int) -> int:
        first = len(self.data)
        return first if step < 0 else first + len(self.validation) + step * self.size

    def _batch(self, step: int) -> list[Row]:
        return self.run.order.global_batch(self.rows, step, self.run.args.mini_batch_size)

    def _mismatch(self, batch: Sequence[Row]) -> list[Row]:
        return mismatched_rows(batch, self.rows, self.width)


def score_rows(run: Run[KTOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Tensor:
    """Log-probabilities of N responses, dropout off, computed on all ranks: (1, N) on each."""
    return scoring.score_rows(run, model, rows, partial(unpaired_batch, pad_id=pad_id), sides=1)


def score_reference(
    run: Run[KTOArgs], start: Start[Policy, Row], num_steps: int, mismatches: Mismatches | None
) -> scoring.Scored:
    """Log-probabilities under the reference of what steps and evaluations read: responses, then mismatched ones."""
    rows, model = chained([start.rows, start.held_out]), direct_alignment.load_reference(run, start)
    parts = scoring.parts_to_score(run, len(start.rows), len(start.held_out), num_steps)
    if mismatches:
        parts += mismatches.parts()
    digest = scoring.fingerprint(model, rows, mismatches.key if mismatches else ())

    def score(model: nn.Module, part: Sequence[Row]) -> Tensor:
        return score_rows(run, model, part, start.tokenizer.pad_token_id)

    return scoring.score_before_training(run, model, mismatches or rows, parts, score, digest)


def reference_point(run: Run[KTOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> float:
    """KTO's beta z0 of the mini-batch whose rows are on all ranks: beta max(0, mean log-ratio of its mismatched rows).

    It estimates the KL to the reference, and is one number for all micro-batches, so that these change no gradient.
    """
    others = [row["mismatch"] for row in rows]
    reference = to_device(torch.tensor([other["ref_logps"] for other in others]), run.device)
    logps = scoring.score_shard(run, model, others, partial(unpaired_batch, pad_id=pad_id), sides=1)[0]
    total = run.ranks.sum((logps - reference).sum())
    return run.args.beta * max(float(total) / run.ranks.total(len(rows)), 0.0)


# -------------------------------------------------------------------------------------------------------- learning
def make_responses(args: KTOArgs, rows: Sequence[Row], logps: Tensor, point: float) -> Responses:
    """The inputs of a loss for B labelled responses; logps (B,); point: KTO's beta z0, BCO's d."""
    return Responses(
        policy_logps=logps,
        ref_logps=to_device(torch.tensor([row["ref_logps"] for row in rows], dtype=logps.dtype), logps.device),
        desirable=to_device(torch.tensor([row["label"] for row in rows], dtype=torch.bool), logps.device),
        beta=args.beta,
        reference_point=point,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
    )


def train_step(run: Run[KTOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int, delta: float = 0.0) -> Metrics:
    """One optimiser step on this rank's responses; returns the metrics of the global batch. delta: BCO's d."""
    args = run.args
    count = run.ranks.total(len(rows))
    point = reference_point(run, model, rows, pad_id) if args.loss_type == "kto" else delta
    sums = torch.zeros(8, device=run.device)
    micros = run.ranks.pad_passes(micro_batches(rows, args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = unpaired_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            responses = make_responses(args, micro, scoring.sequence_logps(model, batch), point)
            loss = UNPAIRED_LOSSES[args.loss_type](responses).sum()
            run.backward(loss / count, batch.on_host.row)
        sums += torch.stack([loss, *response_sums(responses)]).detach()
    loss, *means = (run.ranks.sum(sums) / count).tolist()
    return {"train/loss": loss, "train/grad_norm": run.optimize("policy"), **response_metrics(means, point)}


def response_sums(responses: Responses) -> list[Tensor]:
    """Sums over responses: accuracy (at the reference point half right), then by label number, rewards and
    log-probabilities."""
    margins, good = responses.margins, responses.desirable
    sums = [wins(margins, torch.zeros_like(margins)).sum()]
    for label in (good, ~good):
        chosen = label.to(margins.dtype)
        sums += [(chosen * values).sum() for values in (chosen, responses.rewards, responses.policy_logps)]
    return sums


def response_metrics(means: Sequence[float], point: float) -> Metrics:
    """Means by metric name; a label that no row has is left out."""
    right, *by_label = means
    metrics = {"rewards/accuracies": right}
    for side, (share, reward, logps) in (("chosen", by_label[:3]), ("rejected", by_label[3:])):
        if share:
            metrics |= {f"rewards/{side}": reward / share, f"logps/{side}": logps / share}
    if by_label[0] and by_label[3]:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics | {"rewards/reference_point": point}


@torch.no_grad()
def evaluate(run: Run[KTOArgs], model: nn.Module, rows: Sequence[Row], pad_id: int, delta: float = 0.0) -> Metrics:
    """Metrics of (the first `--eval_iters` micro-batches of) a split; delta: BCO's d."""
    args = run.args
    rows = run.order.eval_rows(rows, args.micro_batch_size)
    point = reference_point(run, model, run.ranks.shard(rows), pad_id) if args.loss_type == "kto" else delta
    responses = make_responses(args, rows, score_rows(run, model, rows, pad_id)[0], point)
    sums = torch.stack([UNPAIRED_LOSSES[args.loss_type](responses).sum(), *response_sums(responses)])
    loss, *means = (sums / len(rows)).tolist()
    found = {"loss": loss, **response_metrics(means, point)}
    return {f"val/{name}": value for name, value in found.items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(KTOArgs, argv)))


if __name__ == "__main__":
    main()
