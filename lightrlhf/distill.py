"""On-policy distillation: the student samples, a teacher gives its distribution (Agarwal et al. 2024, 2306.13649).

With p the student, q the teacher and D a divergence of their distributions of the next token, a step minimises over the
N sampled tokens of all ranks

    position   sum_t D(p(. | y_<t), q(. | y_<t)) / N, the prefixes y_<t held fixed
    sequence   sum_t [KL_t + log p(y_t) (sum_{u>t} KL_u - b_t)] / N, the gradient of KL(p(y) || q(y)) of whole responses

over the whole vocabulary; `--beta` chooses D: 1 the reverse KL(p || q), 0 the forward KL(q || p), between them the
generalised Jensen-Shannon divergence. b_t is the mean of the other responses to the prompt at their t-th token. The
first objective forgets that a token changes the prefixes behind it, the second does not, and has more variance.

`--student_share`: the share of the steps on the student's own responses; the others are on the data's. With
`--privileged_column` the teacher reads other words than the prompt, such as the prompt with a hint or a demonstration;
without `--teacher` it is then the policy as it starts (Shenfeld et al. 2026, 2601.19897).

`--estimator`: what is known of q, all of it, its likeliest tokens, or the sampled ones; see `teachers/lesson.py`.

Left out: k1 and k3 as a loss, k2 and k3 as a reward, whose gradients belong to other objectives; sampling at another
temperature, which would be on-policy for another policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrlhf.cli import groups as flags
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, between, positive
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, Rollout, finetune_batch
from lightrlhf.data.flat import View
from lightrlhf.data.rows import Given, load_splits
from lightrlhf.data.splits import Row
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.generation.rollout_metrics import row_means
from lightrlhf.generation.rollout_sampler import RolloutSampler
from lightrlhf.models.given import load_start
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.teachers.drift import Drift
from lightrlhf.teachers.lesson import VALUES, Lesson, TaughtBatch, action_values, make_teacher, present, teach
from lightrlhf.training.rollout_log import append_rollouts, log_samples, num_due, rollout_rows, writing_rollouts
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_prompts


@dataclass(frozen=True, kw_only=True)
class DistillArgs(
    flags.FrozenModelsArgs,
    flags.DataSetsArgs,
    flags.EvalArgs,
    flags.StartArgs,
    flags.TeacherArgs,
    flags.AheadServerArgs,
    flags.RolloutLogArgs,
    flags.TensorParallelArgs,
):
    """On-policy distillation of a teacher."""

    experiment_name: str = "rlhf-distillation"
    """Folder below `log_dir` for the runs of one algorithm."""
    student_share: float = between(0, 1, 1.0)
    """Share of the steps on the student's own responses; the others are on the demonstrations of `--data_dir`."""
    num_generations: int = at_least(1, 1)
    """Responses per prompt (K); with `--objective sequence` each other's baseline."""
    rollout_size: int = at_least(1, 32)
    """Prompts per rollout and device."""
    rollout_mini_batch_size: int = at_least(1, 32, show="rarely")
    """Slots of the generation engine, and the most rows per scoring pass."""
    mini_batch_size: int = 32
    """Responses per optimiser step and device."""
    learning_rate: float = positive(1e-5)
    """Peak learning rate; with LoRA take about ten times the rate of full tuning."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""

    def _check(self) -> None:
        for name, value, words in (("objective", "sequence", "position"), ("estimator", "k1", "exact or top_k")):
            if getattr(self, name) == value and self.student_share != 1:
                raise ValueError(
                    f"--student_share {self.student_share} with --{name} {value}, whose gradient is of the student's "
                    f"own responses; leave it at 1, or use --{name} {words}"
                )
        is_held_fixed = self.objective == "position" and self.estimator != "k1"
        for name, useless in (("sampling_correction", "token_mask"), ("sampling_bound", self.sampling_bound)):
            given, usual = getattr(self, name), vars(flags.RolloutServerArgs)[name]
            if is_held_fixed and self.sampling_correction.startswith("token") and given == useless != usual:
                raise ValueError(
                    f"--{name} {given}: a divergence at a position does not depend on its token, so that weights of "
                    "tokens change nothing; give --sampling_correction sequence_mask, or --objective sequence"
                )
        responses = self.rollout_size * self.num_generations
        if self.mini_batch_size > responses:
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must not exceed the responses of a rollout, --rollout_size "
                f"{self.rollout_size} times --num_generations {self.num_generations}; try {responses}"
            )

    def _check_given(self, given: Mapping[str, object]) -> None:
        for name in ("privileged_column", "teacher_column"):
            if getattr(self, name) and self.student_share != 1:
                raise UsageError(
                    f"--student_share {self.student_share} with --{name}: demonstrations have no such column; "
                    "leave it at 1"
                )

    @property
    def compares_responses(self) -> bool:
        """Whether a response has others to be compared with."""
        return self.num_generations > 1

    def samples(self, step: int) -> bool:
        """Whether a step, counted from 0, is on the student's own responses."""
        return math.ceil((step + 1) * self.student_share) > math.ceil(step * self.student_share)


def train(
    args: DistillArgs,
    *,
    policy: PreTrainedModel | Policy | None = None,
    teacher: PreTrainedModel | Policy | None = None,
    tokenizer: Tokenizer | None = None,
    prompts: Given | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Distil a teacher into the policy; returns the experiment dir. Objects given here replace what flags would load.

    policy, teacher: causal language models of transformers, the first trained in place; prompts: see `data.rows`;
    on_step: called with (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "teacher": teacher, "tokenizer": tokenizer, "prompts": prompts}
    load = partial(load_splits, "prompts")
    run, start = begin(args, DistillArgs, "distill", load, load_student, check_prompts, given, on_step)
    demonstrations = load_demonstrations(args, start.tokenizer)
    expert = make_teacher(teacher, run, start.policy, start.tokenizer)
    num_steps = run.order.num_steps(start.rows, args.rollout_size)
    per_rollout = math.ceil(args.rollout_size * args.num_generations / args.mini_batch_size)  # updates
    model = run.setup("policy", start.policy, args.learning_rate, num_steps * per_rollout)
    sampler = RolloutSampler(run, model, None, start, responses=args.num_generations)
    run.keep(start.policy, start.tokenizer)
    measure = partial(evaluate, run, sampler, model, expert, start.held_out) if start.held_out else None
    drift = Drift(run)

    for step in run.steps(num_steps):
        batch: Batch
        if args.samples(step):
            with run.phase("rollout"):
                batch = sampler.sample(step)  # K responses to each prompt, (B, T)
            log_first(run, model, expert, batch)
        else:
            batch = draw_demonstrations(run, demonstrations, step, start.tokenizer.pad_token_id)
        with run.phase("update"):
            metrics = update(run, model, expert, batch)
        run.end_step(metrics | drift.watch(metrics), batch, measure)
    return run.finish()


def load_student(given: PreTrainedModel | Policy | None, args: DistillArgs, tokenizer: Tokenizer) -> Policy:
    """The policy that is trained; with LoRA a teacher may share its backbone."""
    return load_start(given, args, tokenizer, shares=args.strategy not in ("fsdp", "deepspeed"))


def load_demonstrations(args: DistillArgs, tokenizer: Tokenizer) -> Sequence[Row]:
    """Demonstrations for the steps that are not on the student's own responses; none where all are."""
    if args.student_share == 1:
        return []
    return View(load_splits("finetune", args, None, tokenizer).sets)


def draw_demonstrations(run: Run[DistillArgs], rows: Sequence[Row], step: int, pad_id: int) -> Batch:
    """This rank's demonstrations of a step, as many as responses would be."""
    args = run.args
    drawn = run.ranks.shard(run.order.global_batch(rows, step, args.rollout_size * args.num_generations))
    return finetune_batch(drawn, pad_id, use_targets=True)


# ------------------------------------------------------------------------------------------------------- the update
def update(run: Run[DistillArgs], model: nn.Module, teacher: nn.Module, batch: Batch) -> Metrics:
    """All optimiser steps on a batch of responses, in its order; the mean of each metric over them."""
    args = run.args
    learned = batch.extend(TaughtBatch)
    lesson = teach(run, model, teacher, batch, learned)
    num_rows = math.ceil(run.ranks.total(len(batch)) / run.ranks.world_size)
    parts = torch.arange(len(batch)).tensor_split(math.ceil(num_rows / args.mini_batch_size))
    with present(lesson):
        metrics = [update_minibatch(run, model, lesson, learned.select(rows)) for rows in parts]
    means = {name: sum(row[name] for row in metrics) / len(metrics) for name in metrics[0]}
    return means | lesson.counts() | (length_metrics(run, batch) if isinstance(batch, Rollout) else {})


def update_minibatch(run: Run[DistillArgs], model: nn.Module, lesson: Lesson, minibatch: TaughtBatch) -> Metrics:
    """One optimiser step; the gradient does not depend on how micro-batches are cut."""
    args, count = run.args, max(run.ranks.total(minibatch.num_actions), 1.0)
    micros = run.ranks.pad_passes(minibatch.by_group(args.micro_batch_size))
    sums = torch.zeros(len(VALUES), device=run.device)
    for i, rows in enumerate(micros):
        micro = minibatch.select(rows).to(run.device)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            function = lesson.function(micro)
            total, values = model(**policy_inputs(micro), function=function, with_stats=False)  # (), (N, 5)
            run.backward(total / count, micro.on_host.row)
        sums += values.sum(0)
    loss, kl, logprob, teacher_logprob, entropy = (run.ranks.sum(sums) / count).tolist()
    metrics = {"train/loss": loss, "objective/kl": kl, "objective/entropy": -logprob}
    metrics |= {"teacher/logprob": teacher_logprob}
    if args.estimator != "k1":  # then it is not known
        metrics |= {"teacher/entropy": entropy, "teacher/surprise": -teacher_logprob - entropy}
    return metrics | {"policy/grad_norm": run.optimize("policy")}


# ------------------------------------------------------------------------------------------ metrics and evaluation
def log_first(run: Run[DistillArgs], model: nn.Module, teacher: nn.Module, rollout: Rollout) -> None:
    """Log the first samples of a step where metrics are logged: their scores are minus the KL of the response, their
    advantages minus the KL of each token."""
    if number := num_due(run):
        with writing_rollouts(run):  # all ranks run the models, for each may hold a part of the weights
            part = rollout.select(rollout.group.argsort(stable=True)[:number])
            kl = action_values(run, model, teacher, part)[..., VALUES.index("kl")]  # (b, T-1)
            if run.ranks.is_first:
                append_rollouts(run, rollout_rows(part, len(part), -kl.sum(1), advantages=-kl))


def length_metrics(run: Run[DistillArgs], rollout: Rollout) -> Metrics:
    """Lengths of the responses of all ranks, and how much of them is repetition."""
    columns = [rollout.lengths(), rollout.truncated.float(), repetition(rollout)]
    means = row_means(run, columns, torch.ones_like(rollout.truncated))
    names = ("completions/mean_length", "completions/truncated_ratio", "completions/repetition")
    return dict(zip(names, means))


def repetition(rollout: Rollout, length: int = 4) -> Tensor:
    """Share of the runs of four tokens of each response that it has more than once: (B,), 0 of shorter ones."""
    shares = []
    for ids in rollout.response_ids():
        runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
        shares.append(1 - len(set(runs)) / len(runs) if runs else 0.0)
    return torch.tensor(shares, device=rollout.input_ids.device)


@torch.no_grad()
def evaluate(
    run: Run[DistillArgs], sampler: RolloutSampler, model: nn.Module, teacher: nn.Module, rows: Sequence[Row]
) -> Metrics:
    """KL and length of one response to each held-out prompt, with the same noise each time; keeps the first ones."""
    rollout = sampler.sample_held_out(rows)
    kl = action_values(run, model, teacher, rollout)[..., VALUES.index("kl")].sum(1)  # (B,) of each response
    actions = rollout.action_mask.sum(1)
    columns = [kl, actions, rollout.truncated.float(), repetition(rollout)]
    total, length, truncated, repeated = row_means(run, columns, torch.ones_like(rollout.truncated))
    if run.ranks.is_first and run.args.log_rollouts:
        log_samples(run, rollout_rows(rollout, run.args.log_rollouts, -kl))
    metrics = {"val/kl": total / max(length, 1e-9), "val/kl_of_response": total, "val/mean_length": length}
    return metrics | {"val/truncated_ratio": truncated, "val/repetition": repeated}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(DistillArgs, argv)))


if __name__ == "__main__":
    main()
