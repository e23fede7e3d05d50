"""Reward modelling: the Bradley-Terry model of pairwise preference (Ziegler et al. 2019, eq. 1; Ouyang et al. 2022).

    L = -log sigmoid(r(x, y_chosen) - r(x, y_rejected)),  summed over pairs, divided once by their global number

`--loss_type` says which scores are compared: `last_token` those at the last token; `average` the means of the scores
from the first token that differs; `per_sample` the scores token by token from there on, each pair's mean counting once
(as DeepSpeed-Chat does). Whatever trained it, a reward model is read at its last token.

With `--loss_type pair` the model reads two responses at once and learns which is better (Dong et al. 2024, 2405.07863,
section 3.2): s(x, y, y') is the logit of "the first is better", and both orders are trained,

    L = 1/2 [-log sigmoid s(x, y_chosen, y_rejected) - log sigmoid(-s(x, y_rejected, y_chosen))]

`lightrlhf.annotate` holds tournaments by such a model; PPO, which needs a score of one response, refuses it.

Left out: ranked lists of more than two answers, margins and regression on ratings.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import DataArgs, EvalArgs, StartArgs, TrainArgs, check_data_dir, check_positive
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import micro_batches, preference_batch
from lightrlhf.data.splits import Row, check_vocabulary, load_split, longest_text
from lightrlhf.data.tokens import pair_rows
from lightrlhf.maths.ops import masked_mean, preference_loss
from lightrlhf.models.loading import load_scalar, separate_pad_token
from lightrlhf.models.names import starting_model
from lightrlhf.models.probes import check_positions, share_prefixes
from lightrlhf.models.roles import count_parameters, last_token, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import STATISTICS
from lightrlhf.training.run import Metrics, Run


@dataclass(frozen=True, kw_only=True)
class RMArgs(TrainArgs, DataArgs, EvalArgs, StartArgs):
    """Reward modelling on preference pairs."""

    experiment_name: str = "rlhf-reward-modelling"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    lr_warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    loss_type: Literal["per_sample", "last_token", "average", "pair"] = "per_sample"
    """Which scores of a pair are compared: token by token, the last ones, or their means; or read both responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        self.check_eval()
        check_positive(self, "learning_rate")


def rm_loss(scores: Tensor, input_ids: Tensor, attention_mask: Tensor, loss_type: str) -> Tensor:
    """Sum over pairs of the Bradley-Terry loss, a scalar.

    scores, input_ids, attention_mask: (2B, T), right-padded, the B chosen rows first. A pair of equal texts is compared
    at its last token, so that its loss is log 2.
    """
    last = attention_mask.sum(1, keepdim=True) - 1  # (2B, 1)
    steps = torch.arange(scores.shape[1], device=scores.device)[None]  # (1, T)
    held = scores.gather(1, torch.minimum(steps, last))  # (2B, T), behind its end a row keeps its last score
    chosen, rejected = held.chunk(2)  # (B, T)
    if loss_type == "pair":  # rows are both orders of two responses; their scores are logits by themselves
        nothing = torch.zeros_like(chosen[:, -1])
        return 0.5 * (preference_loss(chosen[:, -1], nothing) + preference_loss(nothing, rejected[:, -1])).sum()
    if loss_type == "last_token":
        return preference_loss(chosen[:, -1], rejected[:, -1]).sum()
    (chosen_ids, rejected_ids), (chosen_last, rejected_last) = input_ids.chunk(2), last.chunk(2)
    in_one = torch.maximum(chosen_last, rejected_last) >= steps
    in_both = torch.minimum(chosen_last, rejected_last) >= steps
    differs = in_one & ~(in_both & (chosen_ids == rejected_ids))
    first = torch.where(differs.any(1), differs.long().argmax(1), chosen_last[:, 0])[:, None]  # (B, 1)
    if loss_type == "average":
        means = [
            masked_mean(side, (steps >= torch.minimum(first, end)) & (steps <= end), 1)
            for side, end in ((chosen, chosen_last), (rejected, rejected_last))
        ]
        return preference_loss(*means).sum()
    return masked_mean(preference_loss(chosen, rejected), (steps >= first) & in_one, 1).sum()


def train(args: RMArgs) -> Path:
    """Reward modelling; returns the experiment dir."""
    check_data_dir(args)
    args.check_start()
    pairs = load_split(args.data_dir, "preference", "train")
    validation = load_split(args.data_dir, "preference", "validation")
    run = Run(args, "rm")
    source, flag = starting_model(args)
    tokenizer = load_tokenizer(args.data_dir, source)
    reward_model = load_scalar(source, args, tokenizer, args.seed, flag)
    if args.loss_type == "pair":
        pairs, validation = pair_rows(tokenizer, pairs), pair_rows(tokenizer, validation)
        reward_model.model.config.compares_pairs = True
    check_vocabulary(pairs, vocabulary_size(reward_model), args.data_dir)
    check_positions(pairs + validation, reward_model, args.data_dir)
    share_prefixes(reward_model, longest_text(pairs + validation))
    separate_pad_token(reward_model, tokenizer)
    run.print0("{:,} parameters, {:,} trainable; {:,} pairs".format(*count_parameters(reward_model), len(pairs)))

    num_steps, results = run.num_steps(len(pairs), args.mini_batch_size), {}
    model = run.setup("reward", reward_model, args.learning_rate, num_steps)
    for step in run.steps(num_steps):
        started = time.perf_counter()
        rows = run.shard(run.global_batch(pairs, step, args.mini_batch_size))
        with run.phase("update"):
            metrics = train_step(run, model, rows, tokenizer.pad_token_id)
        run.step += 1
        if run.due(args.log_interval, num_steps):
            run.log({**metrics, "train/lr": run.learning_rate("reward"), **run.speed(rows, started)})
        save_now = run.due(args.save_interval, num_steps)
        if save_now or run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results, statistics = evaluate(run, model, validation, tokenizer.pad_token_id)
            run.log(results)
        if save_now:
            run.save(reward_model, tokenizer, files={STATISTICS: json.dumps(statistics)})
    return run.finish(results)


def pair_sums(scores: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over pairs of the chosen score, the rejected score and being right (a tie is half right)."""
    chosen, rejected = last_token(scores, attention_mask).chunk(2)  # (B,) each
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    return chosen.sum(), rejected.sum(), right.sum()


def reward_metrics(chosen: float, rejected: float, accuracy: float) -> Metrics:
    """The metrics of preference learning by their names in this library."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": accuracy,
    }


def train_step(run: Run[RMArgs], model: nn.Module, rows: list[Row], pad_id: int) -> Metrics:
    """One optimiser step on this rank's pairs; returns the metrics of the global batch."""
    args = run.args
    count = run.total(len(rows))
    sums = torch.zeros(4, device=run.device)
    micros = run.pad_passes(micro_batches(rows, args.micro_batch_size))
    for i, micro in enumerate(micros):
        batch = preference_batch(micro, pad_id).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            scores = model(batch.input_ids, batch.attention_mask, batch.paired)  # (2B, T)
            loss = rm_loss(scores, batch.input_ids, batch.attention_mask, args.loss_type)
            run.backward(loss / count)
        sums += torch.stack([loss.detach(), *pair_sums(scores.detach(), batch.attention_mask)])
    loss, *rewards = (run.sum_over_ranks(sums) / count).tolist()
    return {"train/loss": loss, "train/grad_norm": run.optimize("reward"), **reward_metrics(*rewards)}


@torch.no_grad()
def evaluate(run: Run[RMArgs], model: nn.Module, rows: list[Row], pad_id: int) -> tuple[Metrics, Metrics]:
    """Metrics of (the first `--eval_iters` micro-batches of) a split, and mean and deviation of all its scores."""
    args = run.args
    model.eval()
    limit = args.eval_iters * args.micro_batch_size * run.world_size if args.eval_iters else None
    sums = torch.zeros(7, device=run.device, dtype=torch.float64)
    for micro in run.pad_passes(micro_batches(run.shard(rows[:limit]), args.micro_batch_size)):
        batch = preference_batch(micro, pad_id).to(run.device)
        scores = model(batch.input_ids, batch.attention_mask, batch.paired)  # (2B, T)
        loss = rm_loss(scores, batch.input_ids, batch.attention_mask, args.loss_type)
        ends = last_token(scores, batch.attention_mask)  # (2B,)
        parts = [loss, *pair_sums(scores, batch.attention_mask), ends.sum(), ends.pow(2).sum()]
        sums += torch.stack([*parts, torch.tensor(float(len(micro)), device=run.device)]).double()
    model.train()
    *totals, count = run.sum_over_ranks(sums).tolist()
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
