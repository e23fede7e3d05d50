"""Lessons: the judgement of a teacher on a batch of responses, by the student's logits or a cost of a token.

Three estimators, by the known part of the teacher's distribution:

    exact    all of it, computed here beside the student's, some rows of logits at a time
    top_k    the likeliest tokens and the mass of all others, as servers give it: the divergence of these buckets
    k1       the probability of the sampled tokens alone: a policy gradient
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TeacherArgs
from lightrlhf.data.batch import Batch, Rollout, inference_batches, to_device
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.maths import distillation, groups
from lightrlhf.maths.head import LogitFunction
from lightrlhf.maths.sampling_gap import importance_weights
from lightrlhf.models.forward import inference
from lightrlhf.models.offload import on_device
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.models.sharding import gather_shards
from lightrlhf.teachers.teacher import (
    FLAG,
    AverageTeacher,
    ForeignTeacher,
    Teachers,
    TeacherServer,
    Told,
    add_siblings,
    load_teacher,
    seen_by_teacher,
    tell,
)
from lightrlhf.training.run import Metrics, Run

VALUES = ("loss", "kl", "logprob", "teacher_logprob", "teacher_entropy")  # of an action, see `Judged`
TERMS = {"teacher/loss": "loss", "teacher/kl": "kl", "teacher/logprob": "teacher_logprob"}
TERMS |= {"teacher/entropy": "teacher_entropy"}  # metrics of a teacher beside a reward


@dataclass(kw_only=True)
class TaughtBatch(Batch):
    """Responses that a teacher judges."""

    logprobs: Tensor | None = None  # (B, T-1) when they were sampled; None of demonstrations
    place: Tensor | None = None  # (B,) int64 the row's number in the lesson; None outside of one


class Judged(NamedTuple):
    """Of some actions, (n,) each."""

    loss: Tensor  # the divergence by `--beta`, with a gradient unless it is k1
    kl: Tensor  # the reverse KL
    logprob: Tensor  # the student's of its token, with a gradient
    teacher_logprob: Tensor
    entropy: Tensor  # the teacher's; 0 where it is not known


Judge = Callable[[Tensor, slice], Judged]  # of the student's logits (n, V) at a slice of the actions


@dataclass
class Lesson:
    """The judgement of a teacher on a batch, whose rows are found by their `place`."""

    run: Run[Any]
    teacher: nn.Module
    seen: Batch  # what the teacher reads, with the same actions
    told: Told | None = None  # by the teacher; None where it computes its distribution when it is asked
    weights: Tensor | None = None  # (B,) of the rows; None is 1
    costs: Tensor | None = None  # (B, T-1) factors of the gradient of an action's log-probability, without a baseline's
    corrections: Tensor | None = None  # (B, T-1) weights of these factors, between sampler and trainer; None is 1

    def function(self, micro: TaughtBatch) -> LogitFunction:
        """The function of the student's logits that is summed over the actions of some rows, and their `VALUES`."""
        place, at = micro.on_host.place, micro.actions
        assert place is not None
        judge, moves = self.judge(micro, place), self.run.args.estimator == "k1"
        costs = self._columns(self.costs, place, micro)[at] if self.costs is not None else None
        corrections = None if self.corrections is None else self._columns(self.corrections, place, micro)[at]
        old = micro.logprobs[at] if micro.logprobs is not None else None
        weights = None if self.weights is None else to_device(self.weights[place], self.run.device)[at[0]]  # (N,)

        def function(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            found = judge(logits, rows)
            weight = 1.0 if weights is None else weights[rows]
            total = (found.loss if weights is None else weight * found.loss).sum()
            if costs is not None and old is not None:
                change = found.logprob.detach() - old[rows]
                cost = costs[rows] + change if moves else costs[rows]  # k1 of the position itself is of the weights now
                ratio = change.exp() if corrections is None else corrections[rows] * change.exp()
                total = total + (weight * ratio * cost * found.logprob).sum()
            with torch.no_grad():
                return total, torch.stack(found, 1)

        return function

    def counts(self) -> Metrics:
        """Shares of the responses of all ranks that a teacher with another tokenizer judges oddly or not at all."""
        if self.told is None or self.told.readable is None:
            return {}
        odd = torch.tensor([self.told.noncanonical, int((~self.told.readable).sum()), len(self.seen)])
        noncanonical, unreadable, count = self.run.ranks.sum(odd.double()).tolist()
        return {"teacher/noncanonical": noncanonical / max(count, 1), "teacher/unreadable": unreadable / max(count, 1)}

    def judge(self, micro: TaughtBatch, place: Tensor) -> Judge:
        """What is known of the actions of some rows, by `--estimator`."""
        targets, beta, device = micro.input_ids[:, 1:][micro.actions], self.run.args.beta, self.run.device
        seen = self.seen.select(place).to(device)
        if self.told is None:
            with self.run.autocast():
                return judge_exactly(cast(Policy, self.teacher).logits_of(seen), targets, beta)
        told, at = self.told, seen.actions
        logprobs = self._columns(told.logprobs, place, seen)[at]  # (N,)
        if told.ids is None or told.top is None:
            return judge_samples(logprobs, targets)
        ids, top = (self._columns(values, place, seen)[at] for values in (told.ids, told.top))  # (N, k) each
        return judge_top(ids, top, logprobs, targets, beta)

    def _columns(self, values: Tensor, place: Tensor, micro: Batch) -> Tensor:
        """Some rows of values (B, T-1, ...) on the device, as wide as a micro-batch of them."""
        return to_device(values[place, : micro.action_mask.shape[1]], self.run.device)


def judge_exactly(logits_of_teacher: Callable[[slice], Tensor], targets: Tensor, beta: float) -> Judge:
    """By the teacher's whole distribution; targets: (N,) the sampled tokens."""

    def judge(logits: Tensor, rows: slice) -> Judged:
        own, chosen = logits_of_teacher(rows).to(logits.device), targets[rows, None]
        size = min(own.shape[1], logits.shape[1])  # further rows pad an embedding table
        student, other = logits[:, :size].log_softmax(-1), own[:, :size].log_softmax(-1)
        loss = distillation.divergence(student, other, beta)  # (n,)
        logprob, teacher_logprob = (values.gather(1, chosen)[:, 0] for values in (student, other))
        with torch.no_grad():
            reverse = loss if beta == 1 else distillation.kl(student, other)
            return Judged(loss, reverse, logprob, teacher_logprob, -(other.exp() * other).sum(-1))

    return judge


def judge_top(ids: Tensor, top: Tensor, logprobs: Tensor, targets: Tensor, beta: float) -> Judge:
    """By the teacher's k likeliest tokens, (N, k) both, with all others as one bucket; logprobs: (N,) of `targets`."""

    def judge(logits: Tensor, rows: slice) -> Judged:
        student, other = logits.log_softmax(-1), distillation.with_tail(top[rows])
        ours = distillation.in_buckets(student, ids[rows])
        loss = distillation.divergence(ours, other, beta)
        with torch.no_grad():
            reverse = loss if beta == 1 else distillation.kl(ours, other)
            entropy = -(other.exp() * other).sum(-1)
        return Judged(loss, reverse, student.gather(1, targets[rows, None])[:, 0], logprobs[rows], entropy)

    return judge


def judge_samples(logprobs: Tensor, targets: Tensor) -> Judge:
    """By the teacher's log-probabilities (N,) of the sampled tokens alone: k1, without a gradient."""

    def judge(logits: Tensor, rows: slice) -> Judged:
        logprob = logits.log_softmax(-1).gather(1, targets[rows, None])[:, 0]
        k1 = logprob.detach() - logprobs[rows]
        return Judged(k1, k1, logprob, logprobs[rows], torch.zeros_like(k1))

    return judge


# ------------------------------------------------------------------------------------------------------- of a run
def make_teacher(given: PreTrainedModel | Policy | None, run: Run[Any], student: Policy, tokenizer: Tokenizer) -> Any:
    """The teacher of a run, frozen, by its flags; None where it has none. Raises: as `load_teacher`."""
    args: TeacherArgs = run.args
    if not args.has_teacher:
        return None
    if args.teacher_server:
        return TeacherServer(args.teacher_server, run)
    if len(args.teacher_models) > 1:
        one_each = [load_teacher(None, args, student, tokenizer, name) for name in args.teacher_models.values()]
        if not all(isinstance(one, Policy) for one in one_each):
            raise UsageError(f"{FLAG}: several teachers need the student's tokenizer")
        return frozen(run, Teachers(one_each))
    teacher = load_teacher(given, args, student, tokenizer, next(iter(args.teacher_models.values()), None))
    if args.text_return == "to_go" and not isinstance(teacher, ForeignTeacher):
        raise UsageError("--text_return to_go: the teacher has the student's tokenizer; leave it out")
    if not isinstance(teacher, AverageTeacher):
        return frozen(run, teacher)
    teacher = teacher.requires_grad_(False).eval().to(run.device)  # its weights move, so `run.freeze` is not for them
    run.checkpoints.others.append(teacher.state)
    if run.resumed:
        teacher.restore([value.to(run.device) for value in run.resumed["extra"]["teacher"]])
    return teacher


def frozen(run: Run[Any], teacher: nn.Module) -> nn.Module:
    """A teacher whose policies are frozen as a reference is."""
    for policy in [part for part in teacher.modules() if isinstance(part, Policy)]:
        run.freeze(policy)
    return teacher


# ------------------------------------------------------------------------------------------------------ of a batch
def read(run: Run[Any], teacher: nn.Module, batch: Batch) -> Lesson:
    """The lesson on a batch, without costs."""
    seen = seen_by_teacher(run.args, batch)
    return Lesson(run, teacher, seen, None if run.args.estimator == "exact" else tell(run, teacher, seen, batch))


def teach(
    run: Run[Any],
    model: nn.Module,
    teacher: nn.Module,
    batch: Batch,
    taught: TaughtBatch,
    across: bool = False,
    scores: Tensor | None = None,
) -> Lesson:
    """The lesson on a batch; `taught`, its rows as the update takes them, get their place in it.

    across: the baseline of a response is the mean of the step's other responses, not of the prompt's alone; scores:
    (B,), for `--sibling_score`.
    """
    args, weights, taught.place = run.args, None, torch.arange(len(batch))
    if scores is not None and args.sibling_score is not None:
        assert isinstance(batch, Rollout)
        batch, weights = add_siblings(args, batch, scores)
    if isinstance(batch, Rollout):
        batch = batch.masked(taught.action_mask.any(1))  # without responses that the update leaves out
    if isinstance(teacher, AverageTeacher):
        teacher.follow()
    lesson = read(run, teacher, batch)
    lesson.weights = weights
    if isinstance(batch, Rollout):
        correct(lesson, batch)
    if args.objective == "position" and args.estimator != "k1":
        return lesson
    assert isinstance(batch, Rollout)
    mask, group = batch.action_mask, (torch.zeros_like(batch.group), 1) if across else (batch.group, batch.num_groups)
    if args.estimator == "k1":
        assert lesson.told is not None
        kl = torch.zeros_like(batch.logprobs)  # (B, T-1)
        kl[mask] = batch.logprobs[mask] - lesson.told.logprobs[lesson.seen.action_mask]
    else:
        kl = values_of(lesson, model, batch)[..., VALUES.index("kl")]
    if lesson.told is not None and lesson.told.readable is not None:  # of whole responses
        is_judged = lesson.told.readable & mask.any(1)  # (B,)
        if (to_go := lesson.told.to_go) is not None:
            to_go, mask = torch.where(mask, to_go, 0.0), mask & is_judged[:, None]
            mean = distillation.other_rows_mean(to_go, mask, *group, args.max_new_tokens, run.ranks.sum)
            lesson.costs = (to_go - mean) * mask
            return lesson
        total = torch.where(is_judged, kl.sum(1), torch.nan)  # (B,)
        moments = groups.group_moments(total, *group, run.ranks.sum)
        lesson.costs = groups.group_advantages(total, moments, groups.leave_one_out)[:, None] * mask
        return lesson
    later = distillation.later_sum(kl, mask) if args.objective == "sequence" else torch.zeros_like(kl)
    lesson.costs = later + kl if args.estimator == "k1" else later
    if args.objective == "sequence":
        longest = args.max_new_tokens
        lesson.costs = lesson.costs - distillation.other_rows_mean(lesson.costs, mask, *group, longest, run.ranks.sum)
    return lesson


def correct(lesson: Lesson, rollout: Rollout) -> None:
    """Weigh by `--sampling_correction` what servers sampled: whole responses by sequence kinds.

    By token kinds the gradients of log-probabilities alone: a divergence at a position does not depend on its token.
    """
    args, mask = lesson.run.args, rollout.action_mask
    found = importance_weights(rollout.sampling_gap, mask, args.sampling_correction, args.sampling_bound)
    if found is None or args.sampling_correction.startswith("token"):
        lesson.corrections = found
    else:
        of_row = found.amax(1)  # (B,), the same at all actions
        lesson.weights = of_row if lesson.weights is None else lesson.weights * of_row


def present(lesson: Lesson | None) -> AbstractContextManager[None]:
    """Context manager: the teacher is on the device where it computes its distribution beside the student's."""
    return on_device(lesson.teacher) if lesson and lesson.told is None else nullcontext()


class Term:
    """The divergence of a mini-batch from a teacher, as a term of another loss."""

    total: Tensor  # () of the micro-batch that was read last; times `coeff`, divided by `count` it is the loss

    def __init__(self, lesson: Lesson, minibatch: Batch) -> None:
        ranks, self.coeff = lesson.run.ranks, float(lesson.run.args.teacher_coeff)
        self.lesson, self.ranks, self.count = lesson, ranks, max(ranks.total(minibatch.num_actions), 1.0)
        self.sums = torch.zeros(len(VALUES), device=ranks.device)

    def read(self, model: nn.Module, micro: TaughtBatch, **options: Any) -> Any:
        """`TokenStats` of the actions of a micro-batch, whose divergence is `total` from now on."""
        stats, self.total, values = model(**policy_inputs(micro), **options, function=self.lesson.function(micro))
        self.sums += values.sum(0)
        return stats

    def metrics(self) -> Metrics:
        """Means over the actions of all ranks."""
        means = dict(zip(VALUES, (self.ranks.sum(self.sums) / self.count).tolist()))
        if self.lesson.run.args.estimator == "k1":
            means.pop("teacher_entropy")  # it is not known
        return {name: means[value] for name, value in TERMS.items() if value in means} | self.lesson.counts()


def action_values(run: Run[Any], model: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
    """`VALUES` of each action, without gradients, 0 elsewhere: (B, T-1, 5), on the host as the batch is."""
    return values_of(read(run, teacher, batch), model, batch)


def values_of(lesson: Lesson, model: nn.Module, batch: Batch) -> Tensor:
    """`action_values` of a lesson on the batch."""
    run, module = lesson.run, cast(Policy, getattr(model, "module", model))
    out = torch.zeros(*batch.action_mask.shape, len(VALUES), device=run.device)
    taught = batch.extend(TaughtBatch, logprobs=None, place=torch.arange(len(batch)))
    with present(lesson), inference(module), run.autocast(), gather_shards(module):
        for rows in inference_batches(batch.attention_mask.sum(1), run.args.rollout_mini_batch_size, run.device):
            part = taught.select(rows).to(run.device)
            _, values = module(**policy_inputs(part), function=lesson.function(part), with_stats=False)
            width = part.action_mask.shape[1]
            found = values.new_zeros(*part.action_mask.shape, len(VALUES))
            found[part.actions] = values
            out[to_device(rows, run.device), :width] = found
    return out.cpu()
