"""Supervised fine-tuning: cross-entropy on demonstrations (InstructGPT, Ouyang et al. 2022, step 1).

    L = -sum_t log pi(y_t | x, y_<t) / N,  N the counted tokens of the whole mini-batch over all ranks

The response alone counts, with `--use_targets False` the whole text; never padding. With label smoothing e each
token's loss is (1-e) of the above plus e times the mean of -log pi over the vocabulary (Szegedy et al. 2016, sec. 7).

Left out: curricula and multi-epoch shuffling buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least, positive
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, ModelArgs, RolloutLogArgs, TensorParallelArgs, TrainArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Index, finetune_batch, micro_batch_indices, micro_batches
from lightrlhf.data.rows import Given, load_splits
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.held_out import HeldOut
from lightrlhf.models.forward import inference
from lightrlhf.models.given import load_start
from lightrlhf.models.roles import TokenStats, policy_inputs
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_texts


@dataclass(frozen=True, kw_only=True)
class SFTArgs(TrainArgs, DataSetsArgs, EvalArgs, ModelArgs, RolloutLogArgs, TensorParallelArgs):
    """Supervised fine-tuning on demonstrations."""

    experiment_name: str = "rlhf-supervised-finetuning"
    """Folder below `log_dir` for the runs of one algorithm."""
    learning_rate: float = positive(1e-4)
    """Peak learning rate."""
    lr_warmup_ratio: float | None = 0.03
    """Fraction of all steps for a linear warm-up from 0."""
    use_targets: bool = True
    """Compute the loss on the response only, otherwise on the whole text."""
    label_smoothing: float = at_least(0, 0.0, below=1, show="rarely")
    """Label smoothing: probability mass spread evenly over the vocabulary."""


def sft_loss(stats: TokenStats, actions: Index, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross-entropies of the actions, a scalar; divide by their number over all micro-batches and ranks.

    actions: their mask (B, T-1), or their rows and columns (`Batch.actions`).
    """
    loss = -stats.logprobs[actions].sum()
    if stats.mean_logprobs is not None:
        loss = (1 - label_smoothing) * loss - label_smoothing * stats.mean_logprobs[actions].sum()
    return loss


def train(
    args: SFTArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    rows: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by cross-entropy; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; rows: see `data.rows`;
    on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given, load = {"policy": policy, "tokenizer": tokenizer, "rows": rows}, partial(load_splits, "finetune")
    run, start = begin(args, SFTArgs, "sft", load, load_start, check_texts, given, on_step)
    pad_id = start.tokenizer.pad_token_id
    num_steps = run.order.num_steps(start.rows, args.mini_batch_size)
    model = run.setup("policy", start.policy, args.learning_rate, num_steps)
    answers = HeldOut(run, start.policy, start.held_out, start.tokenizer)
    run.keep(start.policy, start.tokenizer)

    def measure() -> Metrics:
        loss = evaluate(run, model, start.held_out, pad_id)
        answers.log(run, model)
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 50))}

    for step in run.steps(num_steps):
        batch = run.ranks.shard(run.order.global_batch(start.rows, step, args.mini_batch_size))
        with run.phase("update"):
            metrics = train_step(run, model, batch, pad_id)
        run.end_step(metrics, batch, measure if start.held_out else None)
    return run.finish()


def train_step(run: Run[SFTArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> Metrics:
    """One optimiser step on this rank's rows; returns the metrics of the global batch."""
    args = run.args
    micros = run.ranks.pad_passes(micro_batches(rows, args.micro_batch_size))
    batches = [finetune_batch(micro, pad_id, args.use_targets).to(run.device) for micro in micros]
    count = max(run.ranks.total(sum(batch.num_actions for batch in batches)), 1.0)
    losses: list[Tensor] = []
    for i, batch in enumerate(batches):
        with run.accumulate(model, enabled=i + 1 < len(batches)):
            stats = model(**policy_inputs(batch), with_mean=args.label_smoothing > 0)
            loss = sft_loss(stats, batch.actions, args.label_smoothing)
            run.backward(loss / count, batch.on_host.row)
        losses.append(loss.detach())
    total = sum(torch.stack(losses).tolist()) if losses else 0.0
    return {"train/loss": run.ranks.total(total) / count, "train/grad_norm": run.optimize("policy")}


def evaluate(run: Run[SFTArgs], model: nn.Module, rows: Sequence[Row], pad_id: int) -> float:
    """Mean cross-entropy per counted token of (the first `--eval_iters` micro-batches of) a split."""
    args = run.args
    rows = run.ranks.shard(run.order.eval_rows(rows, args.micro_batch_size))
    losses: list[Tensor] = []
    count = 0
    with inference(model):
        for index in run.ranks.pad_passes(micro_batch_indices(rows, args.micro_batch_size)):
            batch = finetune_batch([rows[i] for i in index], pad_id, args.use_targets).to(run.device)
            losses.append(sft_loss(model(**policy_inputs(batch)), batch.actions))
            count += batch.num_actions
    total = sum(torch.stack(losses).tolist()) if losses else 0.0
    return run.ranks.total(total) / max(run.ranks.total(count), 1)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(SFTArgs, argv)))


if __name__ == "__main__":
    main()
