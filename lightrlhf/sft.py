"""Supervised fine-tuning: cross-entropy on demonstrations (InstructGPT, Ouyang et al. 2022, step 1).

    L = -sum_t log pi(y_t | x, y_<t) / N,  N the counted tokens of the whole mini-batch over all ranks

`--use_targets True` counts the response alone, otherwise the whole text; never padding. With label smoothing e each
token's loss is (1-e) of the above plus e times the mean of -log pi over the vocabulary (Szegedy et al. 2016, sec. 7).

Left out: data mixtures, curricula and multi-epoch shuffling buffers.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import DataArgs, EvalArgs, ModelArgs, TrainArgs, check_data_dir, check_positive
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, finetune_batch, micro_batches, pack
from lightrlhf.data.splits import Row, check_vocabulary, load_split, longest_text
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import check_packing, check_positions
from lightrlhf.models.roles import TokenStats, count_parameters, policy_inputs, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.run import Run


@dataclass(frozen=True, kw_only=True)
class SFTArgs(TrainArgs, DataArgs, EvalArgs, ModelArgs):
    """Supervised fine-tuning on demonstrations."""

    experiment_name: str = "rlhf-supervised-finetuning"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    lr_warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    use_targets: bool = False
    """Count the loss on the response alone; otherwise on the whole text."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    packing: bool = False
    """Lay several examples end to end in each row, none of them seeing another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        self.check_eval()
        check_positive(self, "learning_rate")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label_smoothing {self.label_smoothing} must lie in [0, 1)")


def sft_loss(stats: TokenStats, action_mask: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross-entropies of the actions, a scalar; divide by their number over all micro-batches and ranks."""
    loss = -stats.logprobs[action_mask].sum()
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * stats.mean_logprobs[action_mask].sum()
    return loss


def train(args: SFTArgs) -> Path:
    """Supervised fine-tuning; returns the experiment dir."""
    check_data_dir(args)
    if args.model_name is None:
        raise UsageError("--model_name is needed: a hub name, a folder, an experiment dir, or tiny")
    examples = load_split(args.data_dir, "finetune", "train")
    validation = load_split(args.data_dir, "finetune", "validation") if args.eval_interval else []
    run = Run(args, "sft")
    tokenizer = load_tokenizer(args.data_dir, args.model_name)
    policy = load_policy(args.model_name, args, tokenizer)
    check_vocabulary(examples, vocabulary_size(policy), args.data_dir)
    check_positions(examples + validation, policy, args.data_dir)
    if args.packing:
        check_packing(policy, args.model_name, longest=longest_text(examples + validation))
    run.print0("{:,} parameters, {:,} trainable; {:,} examples".format(*count_parameters(policy), len(examples)))

    num_steps, results = run.num_steps(len(examples), args.mini_batch_size), {}
    model = run.setup("policy", policy, args.learning_rate, num_steps)
    for step in run.steps(num_steps):
        started = time.perf_counter()
        rows = run.shard(run.global_batch(examples, step, args.mini_batch_size))
        with run.phase("update"):
            loss, norm = train_step(run, model, rows, tokenizer.pad_token_id)
        run.step += 1
        if run.due(args.log_interval, num_steps):
            metrics = {"train/loss": loss, "train/grad_norm": norm, "train/lr": run.learning_rate("policy")}
            run.log(metrics | run.speed(rows, started))
        if validation and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                loss = evaluate(run, model, validation, tokenizer.pad_token_id)
            results = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 50))}
            run.log(results)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer)
    return run.finish(results)


def train_step(run: Run[SFTArgs], model: nn.Module, rows: list[Row], pad_id: int) -> tuple[float, float]:
    """One optimiser step on this rank's rows; returns the global mean loss and the gradient norm."""
    args = run.args
    micros = run.pad_passes(micro_batches(rows, args.micro_batch_size))
    batches = [layout(args, micro, pad_id).to(run.device) for micro in micros]
    count = max(run.total(sum(batch.num_actions for batch in batches)), 1.0)
    total = 0.0
    for i, batch in enumerate(batches):
        with run.accumulate(model, enabled=i + 1 < len(batches)):
            stats = model(**policy_inputs(batch), with_mean=args.label_smoothing > 0)
            loss = sft_loss(stats, batch.action_mask, args.label_smoothing)
            run.backward(loss / count)
        total += float(loss.detach())
    return run.total(total) / count, run.optimize("policy")


def layout(args: SFTArgs, rows: list[Row], pad_id: int) -> Batch:
    """A padded batch, or the same rows packed into fewer ones."""
    batch = finetune_batch(rows, pad_id, args.use_targets)
    return pack(batch, batch.input_ids.shape[1], pad_id) if args.packing else batch


@torch.no_grad()
def evaluate(run: Run[SFTArgs], model: nn.Module, rows: list[Row], pad_id: int) -> float:
    """Mean cross-entropy per counted token of (the first `--eval_iters` micro-batches of) a split."""
    args = run.args
    model.eval()
    limit = args.eval_iters * args.micro_batch_size * run.world_size if args.eval_iters else None
    total, count = 0.0, 0
    for micro in run.pad_passes(micro_batches(run.shard(rows[:limit]), args.micro_batch_size)):
        batch = layout(args, micro, pad_id).to(run.device)
        total += float(sft_loss(model(**policy_inputs(batch)), batch.action_mask))
        count += batch.num_actions
    model.train()
    return run.total(total) / max(run.total(count), 1)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(SFTArgs, argv)))


if __name__ == "__main__":
    main()
