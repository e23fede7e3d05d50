"""REFUEL: regression on relative futures, for multi-turn RLHF (Gao et al. 2024, 2410.04612).

Two replies y, y' to one prefix of a dialogue, at its turn h, were each continued to a later turn by the policy itself
and a user. R and R' are the scores there; their difference is an unbiased difference of Q values, so no critic is
needed. With S the log-probability of turn h's tokens alone, at the sampling temperature, the policy learns by least
squares

    L = ([S(y) - S_old(y)] - [S(y') - S_old(y')] - eta (R - R'))^2,  averaged over pairs

With one turn this is REBEL (Gao et al. 2024, 2404.16767). This program learns from a folder of pairs, `refuel_*.pt`.
`lightrlhf.iterative_refuel` makes such pairs and learns from them in iterations (the paper's setting one),
`lightrlhf.online_refuel` makes them while it trains (setting two).

Left out: training all turns of a dialogue at once, which would bias the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import positive
from lightrlhf.cli.groups import DataArgs, EvalArgs, SamplingArgs, StartArgs, TrainArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import dialogue_pair_batch, micro_batch_indices, number_rows, to_device
from lightrlhf.data.flat import chained
from lightrlhf.data.rows import Given, Splits, load_rows
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import generate
from lightrlhf.models.given import load_start
from lightrlhf.models.loading import find_device
from lightrlhf.models.roles import Policy
from lightrlhf.models.sharding import gather_shards
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.training import reference as scoring
from lightrlhf.training.rollout_log import log_samples, rollout_row
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import Start, begin, check_texts

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class RegressionArgs(TrainArgs, DataArgs, StartArgs, SamplingArgs):
    """REFUEL's loss."""

    loss_type: Literal["refuel", "dpo"] = "refuel"
    """Regress on the score difference (refuel), or learn only which side scores higher (multi-turn dpo)."""
    eta: float = positive(1.0)
    """Scale of the score difference: how far the policy moves per unit of score."""
    beta: float = positive(0.1)
    """Temperature of the implicit reward of `--loss_type dpo`."""
    temperature: float = 0.8
    """Divides the logits, for sampling and for every log-probability of the samples."""
    learning_rate: float = positive(3e-7)
    """Peak learning rate."""
    optimizer_eps: float = 1e-8
    """Term added to the optimiser's denominator."""
    lr_warmup_ratio: float | None = 0.1
    """Fraction of all steps for a linear warm-up from 0."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""

    def _check(self) -> None:
        find_device(self.accelerator)


@dataclass(frozen=True, kw_only=True)
class RefuelArgs(RegressionArgs, EvalArgs):
    """Multi-turn RLHF by regression on relative futures, from pairs of dialogues."""

    experiment_name: str = "rlhf-refuel"
    """Folder below `log_dir` for the runs of one algorithm."""


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
    """[S - S_old] - [S' - S'_old]: (2B,) -> (B,), the policy's implicit difference of scores, times eta."""
    return first_minus_second(logps - old_logps)


def first_minus_second(values: Tensor) -> Tensor:
    """First side minus second side: (2B,) -> (B,)."""
    first, second = values.chunk(2)
    return first - second


# ---------------------------------------------------------------------------------------------------------- program
class Pairs(NamedTuple):
    """N pairs to learn from; row 0 of a (2, N) tensor is of the chosen sides."""

    rows: Sequence[Row]  # ids and action masks of both sides
    rewards: Tensor  # (2, N)
    old_logps: Tensor  # (2, N) S_old

    def select(self, index: Sequence[int]) -> Pairs:
        """Some of the pairs."""
        return Pairs([self.rows[i] for i in index], self.rewards[:, index], self.old_logps[:, index])

    def draw(self, numbers: Sequence[int]) -> Pairs:
        """The pairs of these numbers in the data, which their rows hold from now on."""
        return self.select(numbers)._replace(rows=number_rows(self.rows, numbers))


def train(
    args: RefuelArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by REFUEL on pairs; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; rows: prepared ones, see
    `data.rows`; on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "tokenizer": tokenizer, "rows": rows}
    run, start = begin(args, RefuelArgs, "refuel", load_pairs, load_start, check_texts, given, on_step)
    pad_id = start.tokenizer.pad_token_id
    num_steps = run.order.num_steps(start.rows, args.mini_batch_size)
    old = score_old(run, start, num_steps)  # S_old
    pairs, validation = make_pairs(run, start, old)
    model = run.setup("policy", start.policy, args.learning_rate, num_steps)
    run.keep(start.policy, start.tokenizer, lambda: {"reference": old.state})

    def measure() -> Metrics:
        split, shown = ("validation", validation) if validation.rows else ("train", pairs)
        log_replies(run, start.policy, shown.rows[:2], start.tokenizer, split)
        return validate(run, model, validation, pad_id) if validation.rows else {}

    for step in run.steps(num_steps):
        mine = pairs.draw(run.ranks.shard(run.order.draw(len(pairs.rows), step, args.mini_batch_size)))
        with run.phase("update"):
            metrics = train_step(run, model, mine, pad_id)
        run.end_step(metrics, mine.rows, measure)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ data
def load_pairs(args: RefuelArgs, given: Given | None, tokenizer: Tokenizer) -> Splits[Row]:
    """Pairs of dialogues, of the validation split where there is one."""
    rows = load_rows("refuel", "train", args.data_dir, given, tokenizer, args.verify)
    has_validation = given is not None or (Path(args.data_dir) / "refuel_validation.pt").is_file()
    if not (args.eval_interval and has_validation):
        return Splits([rows], chained([]))
    return Splits([rows], load_rows("refuel", "validation", args.data_dir, given, tokenizer, args.verify))


def make_pairs(run: Run[RefuelArgs], start: Start[Policy, Row], old: scoring.Scored) -> tuple[Pairs, Pairs]:
    """The pairs of training and of validation, with what the loss reads."""
    assert old.logps is not None
    number, logps = len(start.rows), old.logps.float()  # (2, N)
    trained = Pairs(start.rows, rewards_of(run, start.rows), logps[:, :number])
    return trained, Pairs(start.held_out, rewards_of(run, start.held_out), logps[:, number:])


def rewards_of(run: Run[Any], rows: Sequence[Row]) -> Tensor:
    """The stored rewards of both sides of N rows: (2, N)."""
    return torch.stack([chained([rows]).column(f"{side}_reward") for side in SIDES]).float()


# ----------------------------------------------------------------------------------------------- log-probabilities
def score_rows(run: Run[Any], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Tensor:
    """S of both sides of N rows, dropout off, computed on all ranks: (2, N) on each."""
    return scoring.score_rows(run, model, rows, partial(dialogue_pair_batch, pad_id=pad_id), 2, run.args.temperature)


def score_old(run: Run[RefuelArgs], start: Start[Policy, Row], num_steps: int) -> scoring.Scored:
    """S_old of the pairs that steps and evaluations read, validation last, under the policy that is trained."""
    rows = chained([start.rows, start.held_out])
    parts = scoring.parts_to_score(run, len(start.rows), len(start.held_out), num_steps)
    digest = scoring.fingerprint(start.policy, rows, (run.args.temperature,))

    def score(model: nn.Module, part: Sequence[Row]) -> Tensor:
        return score_rows(run, model, part, start.tokenizer.pad_token_id)

    return scoring.score_before_training(run, start.policy, rows, parts, score, digest, "old log-probabilities")


# --------------------------------------------------------------------------------------------------------- learning
def train_step(run: Run[Any], model: nn.Module, pairs: Pairs, pad_id: int) -> Metrics:
    """One optimiser step on the pairs of all ranks, `pairs` being this rank's; returns their metrics, NaN of none."""
    sums = torch.zeros(6, device=run.device)
    total = run.ranks.total(len(pairs.rows))
    micros = run.ranks.pad_passes(micro_batch_indices(pairs.rows, run.args.micro_batch_size) or [[]])
    for i, index in enumerate(micros):
        micro = pairs.select(index)
        batch = dialogue_pair_batch(micro.rows, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            logps = scoring.sequence_logps(model, batch, run.args.temperature)  # (2b,)
            losses, micro_sums = pair_losses(run.args, logps, micro)
            run.backward(losses.sum() / max(total, 1.0), batch.on_host.row)
        sums += micro_sums
    metrics = mean_metrics("train/", (run.ranks.sum(sums) / total).tolist())
    return {**metrics, "train/grad_norm": run.optimize("policy")}


def pair_losses(args: RegressionArgs, logps: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Losses (B,) of pairs and, detached, the sums (6,) of `mean_metrics`; logps (2B,), chosen sides first."""
    rewards, old = (to_device(x.reshape(-1).to(logps.dtype), logps.device) for x in (pairs.rewards, pairs.old_logps))
    if args.loss_type == "refuel":
        losses = refuel_loss(logps, old, rewards, args.eta)
    else:
        losses = pairwise_loss(logps, old, rewards, args.beta)
    future, target = log_ratio_gap(logps, old).detach(), args.eta * first_minus_second(rewards)
    aligned = (future * target > 0).float()
    chosen, rejected = (logps - old).detach().chunk(2)
    return losses, torch.stack([x.sum() for x in (losses.detach(), future, target, aligned, chosen, rejected)])


def mean_metrics(prefix: str, means: Sequence[float]) -> Metrics:
    """Means over pairs by name."""
    names = ("loss", "future", "target", "sign_align", "chosen_ratio", "rejected_ratio")
    return {f"{prefix}{name}": mean for name, mean in zip(names, means, strict=True)}


def validate(run: Run[RefuelArgs], model: nn.Module, pairs: Pairs, pad_id: int) -> Metrics:
    """The metrics of `train_step` on (the first `--eval_iters` micro-batches of) the validation pairs."""
    pairs = pairs.select(run.order.eval_rows(range(len(pairs.rows)), run.args.micro_batch_size))
    _, sums = pair_losses(run.args, score_rows(run, model, pairs.rows, pad_id).reshape(-1), pairs)
    return mean_metrics("val/", (sums / len(pairs.rows)).tolist())


def log_replies(run: Run[Any], policy: Policy, rows: Sequence[Row], tokenizer: Tokenizer, split: str) -> None:
    """Keep a new reply to the prefix of each row, beside the pair's; the noise is always the same."""
    samples, ends = [], end_ids(tokenizer, policy.model)
    with gather_shards(policy):  # once, for ranks may have different numbers of rows
        for group, pair in enumerate(rows):
            sides = {side: torch.as_tensor(pair[f"{side}_input_ids"]).tolist() for side in SIDES}
            start = int(torch.as_tensor(pair["chosen_action_mask"]).long().argmax()) + 1
            prefix = sides["chosen"][:start]
            noise = torch.rand(1, run.args.max_new_tokens, generator=run.ranks.generator(-1))
            new = generate(policy, [prefix], run.args, ends, noise, 1, tokenizer)
            replies = {f"{side}_reply": decode(tokenizer, ids[start:]) for side, ids in sides.items()}
            cut = new.truncated[0]
            row = rollout_row(
                tokenizer, prefix, new.responses[0], group=group, score=None, truncated=cut, columns=replies
            )
            samples.append(row)
    log_samples(run, samples, split)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(RefuelArgs, argv)))


if __name__ == "__main__":
    main()
