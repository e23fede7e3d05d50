"""Reward modelling: the Bradley-Terry model of pairwise preference (Ziegler et al. 2019, eq. 1; Ouyang et al. 2022).

    L = -log sigmoid(r(x, y_chosen) - r(x, y_rejected)),  summed over pairs, divided once by their global number

`--loss_type` selects the scores to compare: `last_token` those at the last token; `average` the means of the scores
from the first token that differs; `per_sample` the scores token by token from there on, each pair's mean counting once
(as DeepSpeed-Chat does). Any reward model scores a response at its last token.

With `--loss_type pair` the model reads two responses at once and predicts which is better (Dong et al. 2024,
2405.07863, section 3.2): s(x, y, y') is the logit of "the first is better", and both orders are trained,

    L = 1/2 [-log sigmoid s(x, y_chosen, y_rejected) - log sigmoid(-s(x, y_rejected, y_chosen))]

`lightrlhf.annotate` compares all responses of a prompt by such a model; PPO, which needs a score of one response,
refuses it.

Left out: ranked lists of more than two answers, margins and regression on ratings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import positive
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, FrozenArgs, StartArgs, TensorParallelArgs, TrainArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import micro_batch_indices, micro_batches, preference_batch
from lightrlhf.data.rows import Given, Splits, chained, interleave, load_sets
from lightrlhf.data.splits import NoValidation, Row
from lightrlhf.data.tokens import pair_rows
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.maths.ops import masked_mean, preference_loss, wins
from lightrlhf.models.forward import inference
from lightrlhf.models.given import as_policy, critic_from
from lightrlhf.models.loading import load_scalar, separate_pad_token
from lightrlhf.models.names import starting_model
from lightrlhf.models.roles import Policy, ScalarModel, scalar_inputs
from lightrlhf.models.roles import last_token as end_scores
from lightrlhf.models.tokenizer import check_stored_ids
from lightrlhf.rewards.loading import STATISTICS
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_texts

MOST_FOR_STATISTICS = 256  # training pairs whose scores are standardised by, where no validation pairs are given


@dataclass(frozen=True, kw_only=True)
class RMArgs(TrainArgs, DataSetsArgs, EvalArgs, StartArgs, TensorParallelArgs):
    """Train a reward model on preference pairs."""

    experiment_name: str = "rlhf-reward-modelling"
    """Folder below `log_dir` for the runs of one algorithm."""
    learning_rate: float = positive(1e-4)
    """Peak learning rate."""
    lr_warmup_ratio: float | None = 0.03
    """Fraction of all steps for a linear warm-up from 0."""
    loss_type: Literal["per_sample", "last_token", "average", "pair"] = "last_token"
    """Scores to compare: at each token, at the last, their mean, or one score of both responses read together."""


# ---------------------------------------------------------------------------------------------------------- losses
def per_sample(scores: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of the Bradley-Terry losses of a pair's tokens from where its texts part to the longer one's end.

    scores, input_ids, attention_mask: (2B, T), right-padded, the B chosen rows first; returns (B,), as the others do. A
    shorter text keeps its last score; a pair of equal texts is compared at its last token, so that its loss is log 2.
    """
    chosen, rejected = held_scores(scores, attention_mask).chunk(2)  # (B, T)
    first, ends = where_texts_part(input_ids, attention_mask)
    steps = torch.arange(scores.shape[1], device=scores.device)[None]  # (1, T)
    return masked_mean(preference_loss(chosen, rejected), (steps >= first) & (steps <= ends.amax(0)), 1)


def last_token(scores: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Bradley-Terry loss of the scores at the last tokens (Ouyang et al. 2022, eq. 1)."""
    return preference_loss(*held_scores(scores, attention_mask)[:, -1].chunk(2))


def average(scores: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Bradley-Terry loss of each text's mean score from where the two part."""
    first, ends = where_texts_part(input_ids, attention_mask)
    steps = torch.arange(scores.shape[1], device=scores.device)[None]  # (1, T)
    means = [
        masked_mean(side, (steps >= torch.minimum(first, end)) & (steps <= end), 1)
        for side, end in zip(held_scores(scores, attention_mask).chunk(2), ends)
    ]
    return preference_loss(*means)


def pair(scores: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of both orders' losses of a model that reads two responses; its scores are logits (Dong et al. 2024)."""
    chosen, rejected = held_scores(scores, attention_mask)[:, -1].chunk(2)  # (B,)
    zero = torch.zeros_like(chosen)
    return 0.5 * (preference_loss(chosen, zero) + preference_loss(zero, rejected))


LOSSES = {f.__name__: f for f in (per_sample, last_token, average, pair)}


def held_scores(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores (2B, T) in which each row keeps its last score in its padding."""
    last = attention_mask.sum(1, keepdim=True) - 1  # (2B, 1)
    steps = torch.arange(scores.shape[1], device=scores.device)[None]  # (1, T)
    return scores.gather(1, torch.minimum(steps, last))


def where_texts_part(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First position at which the two texts of each pair differ, (B, 1), and the last of each text, (2, B, 1)."""
    last = attention_mask.sum(1, keepdim=True) - 1  # (2B, 1)
    steps = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, T)
    (chosen_ids, rejected_ids), (chosen_last, rejected_last) = input_ids.chunk(2), last.chunk(2)
    in_one = torch.maximum(chosen_last, rejected_last) >= steps
    in_both = torch.minimum(chosen_last, rejected_last) >= steps
    differs = in_one & ~(in_both & (chosen_ids == rejected_ids))
    first = torch.where(differs.any(1), differs.long().argmax(1), chosen_last[:, 0])[:, None]  # (B, 1)
    return first, torch.stack([chosen_last, rejected_last])


# --------------------------------------------------------------------------------------------------------- program
def train(
    args: RMArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train a reward model; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers to start from; rows: see `data.rows`; on_step: called
    with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "tokenizer": tokenizer, "rows": rows}
    run, start = begin(args, RMArgs, "rm", load_comparisons, load_reward_model, check_texts, given, on_step)
    separate_pad_token(start.policy, start.tokenizer)
    pad_id = start.tokenizer.pad_token_id
    num_steps = run.order.num_steps(start.rows, args.mini_batch_size)
    model = run.setup("reward", start.policy, args.learning_rate, num_steps)

    @functools.lru_cache(1)
    def measure(step: int) -> tuple[Metrics, Metrics]:
        """Metrics and statistics of validation after a step; every checkpoint has the statistics."""
        return evaluate(run, model, start.held_out, pad_id)

    run.keep(start.policy, start.tokenizer, files=lambda: {STATISTICS: json.dumps(measure(run.step)[1])})
    for step in run.steps(num_steps):
        batch = run.ranks.shard(run.order.global_batch(start.rows, step, args.mini_batch_size))
        with run.phase("update"):
            metrics = train_step(run, model, batch, pad_id)
        run.end_step(metrics, batch, lambda: measure(run.step)[0], at_saves=True)
    return run.finish()


# ----------------------------------------------------------------------------------------------- data and the model
def load_comparisons(args: RMArgs, given: Given | None, tokenizer: Tokenizer) -> Splits[Row]:
    """Preference pairs of both splits; for `--loss_type pair` as texts that hold both responses.

    A reward model is saved with statistics of its scores, so there are validation pairs in any case.
    """
    sets = load_sets("preference", "train", args, given, tokenizer)
    validation = interleave([])
    notes: list[str] = []
    try:
        validation = interleave(load_sets("preference", "validation", args, given, tokenizer))
    except NoValidation:
        if args.eval_interval:
            raise
    if not validation:
        validation = chained(sets)[:MOST_FOR_STATISTICS]
        notes = [f"no validation pairs: using the first {len(validation)} training pairs instead"]
    if args.loss_type == "pair":
        return Splits([pair_rows(tokenizer, one) for one in sets], pair_rows(tokenizer, validation), notes)
    return Splits(sets, validation, notes)


def load_reward_model(policy: PreTrainedModel | Policy | None, args: RMArgs, tokenizer: Tokenizer) -> ScalarModel:
    """A model with a new scalar head, on the given policy or the one that flags name."""
    if args.resume_from:
        check_stored_ids(tokenizer, args.data_dir, args.resume_from)
    if policy is None:
        source, flag = starting_model(args)
        reward_model = load_scalar(source, args, tokenizer, args.seed, flag)
    else:
        reward_model = critic_from(as_policy(policy, FrozenArgs(), tokenizer), args, args.seed)
    if args.loss_type == "pair":
        config: Any = reward_model.model.config
        config.compares_pairs = True
    return reward_model


# --------------------------------------------------------------------------------------------------------- learning
def pair_sums(scores: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over pairs of the chosen score, the rejected score and being right (a tie is half right)."""
    chosen, rejected = end_scores(scores, attention_mask).chunk(2)  # (B,) each
    return chosen.sum(), rejected.sum(), wins(chosen, rejected).sum()


def reward_metrics(chosen: float, rejected: float, accuracy: float) -> Metrics:
    """The metrics of preference learning by their names in this library."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": accuracy,
    }


def train_step(run: Run[RMArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Metrics:
    """One optimiser step on this rank's pairs; returns the metrics of the global batch."""
    args = run.args
    count = run.ranks.total(len(rows))
    sums = torch.zeros(4, device=run.device)
    micros = run.ranks.pad_passes(micro_batches(rows, args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = preference_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            scores = model(**scalar_inputs(batch))  # (2B, T)
            loss = LOSSES[args.loss_type](scores, batch.input_ids, batch.attention_mask).sum()
            run.backward(loss / count, batch.on_host.row)
        sums += torch.stack([loss.detach(), *pair_sums(scores.detach(), batch.attention_mask)])
    loss, *rewards = (run.ranks.sum(sums) / count).tolist()
    return {"train/loss": loss, "train/grad_norm": run.optimize("reward"), **reward_metrics(*rewards)}


def evaluate(run: Run[RMArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> tuple[Metrics, Metrics]:
    """Metrics of (the first `--eval_iters` micro-batches of) a split, and mean and deviation of all its scores."""
    args = run.args
    rows = run.ranks.shard(run.order.eval_rows(rows, args.micro_batch_size))
    parts: list[Tensor] = []  # (6,) of each micro-batch
    with inference(model):
        for index in run.ranks.pad_passes(micro_batch_indices(rows, args.micro_batch_size)):
            batch = preference_batch([rows[i] for i in index], pad_id).to(run.device)
            scores = model(**scalar_inputs(batch))  # (2B, T)
            loss = LOSSES[args.loss_type](scores, batch.input_ids, batch.attention_mask).sum()
            ends = end_scores(scores, batch.attention_mask)  # (2B,)
            terms = [loss, *pair_sums(scores, batch.attention_mask), ends.sum(), ends.pow(2).sum()]
            parts.append(torch.stack(terms))
    sums = [sum(values) for values in zip(*torch.stack(parts).tolist())] if parts else [0.0] * 6
    *totals, count = run.ranks.sum(torch.tensor([*sums, float(len(rows))], dtype=torch.float64)).tolist()
    loss, chosen, rejected, right, total, squares = (value / count for value in totals)
    mean, metrics = total / 2, reward_metrics(chosen, rejected, right)
    statistics = {"mean": mean, "std": max(squares / 2 - mean * mean, 0.0) ** 0.5}
    return {"val/loss": loss, **{f"val/{name}": value for name, value in metrics.items()}}, statistics


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(RMArgs, argv)))


if __name__ == "__main__":
    main()
