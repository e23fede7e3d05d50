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

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import (
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
from lightrlhf.data.splits import Row, check_vocabulary, load_split, longest_text
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
)
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, share_prefixes
from lightrlhf.models.roles import Policy, count_parameters, policy_inputs, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.run import Metrics, Run

SCORING_TOLERANCE = 1e-2  # nats per token


@dataclass(frozen=True, kw_only=True)
class DPOLossArgs(TrainArgs, DataArgs, StartArgs):
    """Direct preference optimisation."""

    experiment_name: str = "rlhf-dpo"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    ref_model: str | None = None
    """Experiment dir, checkpoint or folder of another reference; the policy as it starts when not given."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
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
    ] = "sigmoid"
    """Loss of a pair; the page on DPO has the formulas."""
    beta: float = 0.1
    """How strongly the policy is held at the reference: the temperature of the implicit reward."""
    label_smoothing: float = 0.0
    """Share of pairs believed to be labelled the wrong way round."""
    margin_scale: float = 1.0
    """Factor on the pairs' annotated margins, for the losses that read them."""
    rapo: Literal["const", "ra", "app_1", "app_2"] | None = None
    """How the rejected side's weight lambda in u = a - lambda b is chosen; lambda is 1 when not given."""
    rapo_lambda: float = 0.5
    """The weight lambda of `--rapo const`."""
    length_alpha: float = 0.0
    """Reward per token of length that is explained away, so that length itself is not learned (R-DPO)."""
    rpo_alpha: float = 0.0
    """Weight of the chosen response's negative log-likelihood per token, added to the loss (RPO)."""
    max_length: int | None = None
    """Longest prompt with response, in tokens; what is behind is cut off."""
    max_prompt_length: int | None = None
    """Longest prompt, in tokens."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """Which end of a prompt is kept that is longer than `max_prompt_length`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        check_positive(self, "learning_rate", "beta", "margin_scale")
        for name in ("length_alpha", "rpo_alpha", "rapo_lambda"):
            check_at_least(self, name, 0)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label_smoothing {self.label_smoothing} must lie in [0, 0.5)")
        for flag, fitting in (("label_smoothing", SMOOTHED), ("rapo", GAP_LOSSES), ("length_alpha", LENGTH_LOSSES)):
            if getattr(self, flag) and self.loss_type not in fitting:
                raise ValueError(
                    f"--{flag} {getattr(self, flag)} has no place in --loss_type {self.loss_type}; "
                    f"it works with {', '.join(sorted(fitting))}"
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
def train(args: DPOArgs) -> Path:
    """DPO; returns the experiment dir."""
    check_data_dir(args)
    args.check_start()
    pairs, notes = load_pairs(args, "train")
    validation = load_pairs(args, "validation")[0] if args.eval_interval else []
    run = Run(args, "dpo")
    source, flag = starting_model(args)
    tokenizer = load_tokenizer(args.data_dir, source)
    policy = load_policy(source, args, tokenizer, flag)
    check_vocabulary(pairs + validation, vocabulary_size(policy), args.data_dir)
    check_positions(pairs + validation, policy, args.data_dir)
    share_prefixes(policy, longest_text(pairs + validation))
    for note in notes:
        run.print0(note)
    run.print0("{:,} parameters, {:,} trainable; {:,} pairs".format(*count_parameters(policy), len(pairs)))
    with run.phase("reference"):
        reference = reference_logps(run, policy, pairs + validation, tokenizer)
    rows = with_reference(pairs + validation, reference["logps"])
    pairs, validation = rows[: len(pairs)], rows[len(pairs) :]

    num_steps, results, baseline = run.num_steps(len(pairs), args.mini_batch_size), {}, RunningMean()
    model = run.setup("policy", policy, args.learning_rate, num_steps)
    if run.resumed:
        baseline = RunningMean(**run.resumed["extra"]["baseline"])
    elif args.ref_model is None:
        check_start(run, model, pairs, tokenizer.pad_token_id)
    for step in run.steps(num_steps):
        started = time.perf_counter()
        batch = run.global_batch(pairs, step, args.mini_batch_size)
        with run.phase("update"):
            metrics = train_step(run, model, batch, tokenizer.pad_token_id, baseline.value)
        baseline.update(metrics["rewards/chosen"] + metrics["rewards/rejected"], len(batch))
        run.step += 1
        if run.due(args.log_interval, num_steps):
            run.log({**metrics, "train/lr": run.learning_rate("policy"), **run.speed(run.shard(batch), started)})
        if validation and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = evaluate(run, model, validation, tokenizer.pad_token_id, baseline.value)
            run.log(results)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer, extra={"reference": reference, "baseline": vars(baseline)})
    return run.finish(results)


@dataclass
class RunningMean:
    """Mean implicit reward of both sides over the steps so far, 0 before the first.

    The current step is not in it: its mean would be known only after all its micro-batches.
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
def load_pairs(args: DPOArgs, split: str) -> tuple[list[Row], list[str]]:
    """Pairs of a split, cut to the lengths asked for, and what is to be said about the cutting.

    Raises: UsageError when a pair lacks what the loss reads, or a prompt leaves no room for a response.
    """
    path = f"{args.data_dir}/preference_{split}.pt"
    rows = load_split(args.data_dir, "preference", split)
    if args.loss_type in SOFT_LABEL_LOSSES:
        check_column(rows, "margin", f"--loss_type {args.loss_type}", path)
    if args.rapo == "ra":
        check_column(rows, "rejected_score", "--rapo ra", path)
    cut = [truncate(row, args) for row in rows]
    kept = [row for row in cut if list(row["chosen_input_ids"]) != list(row["rejected_input_ids"])]
    if not kept:
        raise UsageError(f"{path}: no pair differs within --max_length {args.max_length}; allow more")
    shortened, lost = sum(one is not other for one, other in zip(cut, rows)), len(rows) - len(kept)
    notes = [f"{shortened:,} of {len(rows):,} pairs of {path} were cut to length"] if shortened else []
    notes += [f"{lost:,} pairs of {path} have two equal responses and are left out"] if lost else []
    return kept, notes


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
    """The prompt cut to `max_prompt_length` at one end, then both responses to what `max_length` leaves.

    A response that was cut has no end token, and none is put there. The row itself when nothing is too long.
    """
    start = row["prompt_len"]
    kept = min(start, args.max_prompt_length or start)
    room = (args.max_length or math.inf) - kept
    if room < 1:
        raise UsageError(
            f"--max_length {args.max_length} leaves no room behind a prompt of {kept} tokens; "
            f"give --max_prompt_length {args.max_length // 2 or 1} too"
        )
    sides = {name: row[name] for name in ("chosen_input_ids", "rejected_input_ids")}
    if kept == start and all(len(ids) - start <= room for ids in sides.values()):
        return row
    first = start - kept if args.truncation_mode == "keep_end" else 0
    for name, ids in sides.items():
        response = ids[start : start + min(room, len(ids))]
        sides[name] = torch.cat([torch.as_tensor(ids[first : first + kept]), torch.as_tensor(response)])
    return {**row, "prompt_len": kept, **sides}


# ------------------------------------------------------------------------------------------------------- reference
def reference_logps(run: Run[DPOArgs], policy: Policy, rows: list[Row], tokenizer: Any) -> dict[str, Any]:
    """Log-probabilities of all chosen, then all rejected responses under the reference, with a hash of both.

    A resumed run takes those of its checkpoint where the hash of the reference's weights and of the data is the same.
    To be called before `run.setup`, which on resuming gives the policy what it has learned.
    """
    reference = policy
    if run.args.ref_model is not None:
        load_tokenizer(run.args.data_dir, run.args.ref_model)  # refuses a model with other tokens
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
    digest = hashlib.sha256()
    for name, tensor in reference.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for row in rows:
        sides = [torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected")]
        digest.update(repr((row["prompt_len"], sides)).encode())
    return digest.hexdigest()


def with_reference(rows: list[Row], logps: list[float]) -> list[Row]:
    """The rows, each with the two log-probabilities under the reference."""
    halves = zip(rows, logps[: len(rows)], logps[len(rows) :], strict=True)
    return [{**row, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected} for row, chosen, rejected in halves]


def check_start(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> None:
    """Raises: RunFailure when the policy does not start at the reference (they are the same weights)."""
    rows = rows[: max(run.args.micro_batch_size, run.world_size)]
    pairs = make_pairs(run.args, rows, score_pairs(run, model, rows, pad_id))
    gap = float((pairs.chosen_ratio / pairs.chosen_lengths).abs().max())
    if not gap < SCORING_TOLERANCE:
        raise RunFailure(f"before the first update the policy is {gap} nats per token away from the reference")


# -------------------------------------------------------------------------------------------------------- learning
def sequence_logps(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each whole response: (2B,), the chosen ones first."""
    return model(**policy_inputs(batch)).logprobs.sum(1)


@torch.no_grad()
def score_pairs(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> Tensor:
    """Log-probabilities of N pairs, dropout off, the work split over ranks: (2N,) on each, the chosen ones first."""
    was_training = model.training
    model.eval()
    logps = torch.zeros(2, len(rows), device=run.device)
    numbered = [{**row, "index": index} for index, row in enumerate(rows)]
    for micro in run.pad_passes(micro_batches(run.shard(numbered), run.args.micro_batch_size)):
        with run.autocast():
            scores = sequence_logps(model, preference_batch(micro, pad_id).to(run.device))  # (2B,)
        logps[:, [row["index"] for row in micro]] = scores.float().reshape(2, -1)
    model.train(was_training)
    return run.sum_over_ranks(logps).reshape(-1)


def make_pairs(args: DPOArgs, rows: list[Row], logps: Tensor, baseline: float = 0.0) -> Pairs:
    """What a loss needs of B rows; logps (2B,), the chosen ones first."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logps.device, dtype=logps.dtype)  # (B,)

    chosen, rejected = logps.chunk(2)
    known = {
        "ref_chosen_logps": column([row["ref_chosen_logps"] for row in rows]),
        "ref_rejected_logps": column([row["ref_rejected_logps"] for row in rows]),
        "chosen_lengths": column([len(row["chosen_input_ids"]) - row["prompt_len"] for row in rows]),
        "rejected_lengths": column([len(row["rejected_input_ids"]) - row["prompt_len"] for row in rows]),
    }
    if args.loss_type in SOFT_LABEL_LOSSES:
        known["margins"] = args.margin_scale * column([row["columns"]["margin"] for row in rows])
    if args.rapo:
        known["rejected_weight"] = RAPO[args.rapo](
            constant=args.rapo_lambda,
            beta=args.beta,
            rejected_ratio=rejected - known["ref_rejected_logps"],
            ref_rejected_logps=known["ref_rejected_logps"],
            rejected_scores=column([row["columns"]["rejected_score"] for row in rows]) if args.rapo == "ra" else None,
        )
    return Pairs(
        policy_chosen_logps=chosen,
        policy_rejected_logps=rejected,
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        length_alpha=args.length_alpha,
        baseline=baseline,
        **known,
    )


def train_step(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int, baseline: float = 0.0) -> Metrics:
    """One optimiser step on the pairs of all ranks; returns their metrics."""
    args = run.args
    if args.loss_type in RANKED_LOSSES:
        rows = with_slopes(run, model, rows, pad_id)
    sums = torch.zeros(7, device=run.device)
    micros = run.pad_passes(micro_batches(run.shard(rows), args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = preference_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            logps = sequence_logps(model, batch)  # (2B,)
            pairs = make_pairs(args, micro, logps, baseline)
            ranked = args.loss_type in RANKED_LOSSES
            loss = ranked_loss(micro, logps) if ranked else LOSSES[args.loss_type](pairs).sum()
            nll = chosen_nll(pairs).sum()
            run.backward((loss + args.rpo_alpha * nll) / len(rows))
        sums += torch.stack([loss, nll, *pair_sums(pairs)]).detach()
    metrics = pair_metrics(args, (run.sum_over_ranks(sums) / len(rows)).tolist())
    losses = {f"train/{name}": metrics.pop(name) for name in ("loss", "preference_loss", "nll")}
    return {**losses, "train/grad_norm": run.optimize("policy"), **metrics}


def with_slopes(run: Run[DPOArgs], model: nn.Module, rows: list[Row], pad_id: int) -> list[Row]:
    """The rows of a whole step, each with the derivatives of a ranked loss by its two log-probabilities.

    Ranks need all pairs of the step, gradients only some at a time: a first pass without gradients finds how the loss
    changes with each log-probability, a second (`ranked_loss`) carries that into the weights.
    """
    logps = score_pairs(run, model, rows, pad_id).requires_grad_()  # (2N,)
    loss = LOSSES[run.args.loss_type](make_pairs(run.args, rows, logps)).sum()
    slopes = torch.autograd.grad(loss, logps)[0].reshape(2, -1).T.tolist()
    return [{**row, "slopes": pair, "loss": float(loss.detach()) / len(rows)} for row, pair in zip(rows, slopes)]


def ranked_loss(rows: list[Row], logps: Tensor) -> Tensor:
    """These rows' part of a ranked loss: its value, and by `slopes` its gradient."""
    slopes = torch.tensor([row["slopes"] for row in rows], device=logps.device).T.reshape(-1)  # (2B,)
    return sum(row["loss"] for row in rows) + (slopes * (logps - logps.detach())).sum()


def pair_sums(pairs: Pairs) -> list[Tensor]:
    """Sums over pairs: implicit rewards of both sides, being right (a tie is half right), log-probabilities of both."""
    chosen, rejected = pairs.beta * pairs.chosen_ratio, pairs.beta * pairs.rejected_ratio
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    return [x.sum() for x in (chosen, rejected, right, pairs.policy_chosen_logps, pairs.policy_rejected_logps)]


def pair_metrics(args: DPOArgs, means: list[float]) -> Metrics:
    """Means over pairs by their names."""
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
    rows = rows[: args.eval_iters * args.micro_batch_size * run.world_size if args.eval_iters else None]
    pairs = make_pairs(args, rows, score_pairs(run, model, rows, pad_id), baseline)
    sums = torch.stack([LOSSES[args.loss_type](pairs).sum(), chosen_nll(pairs).sum(), *pair_sums(pairs)])
    return {f"val/{name}": value for name, value in pair_metrics(args, (sums / len(rows)).tolist()).items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(DPOArgs, argv)))


if __name__ == "__main__":
    main()
