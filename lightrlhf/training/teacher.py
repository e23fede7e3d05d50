"""Teachers: frozen language models that give their distribution where a student acted.

A teacher has the student's tokens. With LoRA it may be adapters on the student's backbone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.batch import Batch, Rollout, inference_batches, response_batch, to_device
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.maths import distillation
from lightrlhf.maths.head import LogitFunction
from lightrlhf.models import lora
from lightrlhf.models.forward import inference
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import base_name, resolve
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.models.sharding import gather_shards
from lightrlhf.models.tokenizer import check_stored_ids
from lightrlhf.training.run import Run

FLAG = "--teacher"
VALUES = ("loss", "kl", "logprob", "teacher_logprob", "teacher_entropy")  # of an action, see `compare`


@dataclass(kw_only=True)
class DistillBatch(Batch):
    """Responses to learn from."""

    logprobs: Tensor | None = None  # (B, T-1) when they were sampled; None of demonstrations
    costs: Tensor | None = None  # (B, T-1) with `--objective sequence`: later KLs less their baseline


class TeacherArgs(Protocol):
    """The flags that `load_teacher` reads."""

    @property
    def teacher(self) -> str | None: ...

    @property
    def privileged_column(self) -> str | None: ...

    @property
    def trust_remote_code(self) -> bool: ...


def load_teacher(
    given: PreTrainedModel | Policy | None, args: TeacherArgs, student: Policy, tokenizer: Tokenizer
) -> Policy:
    """The given teacher, else `--teacher`; without both the policy as it starts, for `--privileged_column`.

    It shares the student's backbone where the student shares it and both have one base, else it is a separate model.
    Raises: UsageError when it cannot be loaded, or its tokenizer gives a token another id than the student's.
    """
    frozen = FrozenArgs(trust_remote_code=args.trust_remote_code)
    if given is not None:
        return as_policy(given, frozen, tokenizer)
    if not args.teacher:
        return student.reference()
    source = resolve(args.teacher, FLAG)
    check_stored_ids(tokenizer, "the data", source)
    is_shared = student.shares and student.base == base_name(source, FLAG) is not None
    if not is_shared or lora.holds_dora(source, FLAG):
        return load_policy(source, frozen, tokenizer, FLAG)
    config = lora.adapter_config(source, FLAG)
    if config is not None and source not in student.loaded:
        adapter = f"start_{len(student.loaded)}"
        student.loaded[source] = adapter, lora.load_adapter(student.model, adapter, source, config)
        lora.configure(student.model, active=student.adapters, trainable=("policy",))
    adapters = () if config is None else (student.loaded[source][0],)
    settings = {"shares": True, "trainable": False, "head_is_plain": student.head_is_plain}
    return Policy(student.model, adapters, student.base, **settings)


def compare(teacher: Policy, batch: DistillBatch, seen: Batch, beta: float) -> LogitFunction:
    """The function of the student's logits that is summed over the actions, with `VALUES` of each action.

    seen: the batch that the teacher reads, with the same actions.
    """
    at = batch.actions
    targets, logits_of_teacher = batch.input_ids[:, 1:][at], teacher.logits_of(seen)  # (N,)
    costs = None if batch.costs is None or batch.logprobs is None else (batch.costs[at], batch.logprobs[at])

    def function(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        own = logits_of_teacher(rows)  # (n, V)
        size = min(own.shape[1], logits.shape[1])  # further rows pad an embedding table
        student, other = logits[:, :size].log_softmax(-1), own[:, :size].log_softmax(-1)
        loss = distillation.divergence(student, other, beta)  # (n,)
        chosen = targets[rows, None]
        logprob = student.gather(1, chosen)[:, 0]
        total = loss.sum()
        if costs is not None:
            later, old = costs[0][rows], costs[1][rows]
            total = total + ((logprob.detach() - old).exp() * later * logprob).sum()
        with torch.no_grad():
            kl = loss if beta == 1 else distillation.kl(student, other)
            values = [loss, kl, logprob, other.gather(1, chosen)[:, 0], -(other.exp() * other).sum(-1)]
            return total, torch.stack(values, 1)

    return function


def seen_by_teacher(args: TeacherArgs, batch: Batch) -> Batch:
    """What the teacher reads: the responses behind the prompts, or behind the words of `--privileged_column`.

    Raises: RunFailure when a prompt has no such words.
    """
    name = args.privileged_column
    if name is None or not isinstance(batch, Rollout):
        return batch.extend(Batch)
    assert batch.tokenizer is not None
    prompts = []
    for number, columns in zip(batch.row.tolist() if batch.row is not None else [], batch.columns):
        if not columns.get(name):
            raise RunFailure(f"--privileged_column {name}: prompt {number} has no such column, or an empty one")
        prompts.append(encode_prompt(batch.tokenizer, columns[name]))
    pad_id = int(batch.tokenizer.pad_token_id)
    seen = response_batch(prompts, batch.response_ids(), pad_id)
    return dataclasses.replace(seen, group=batch.group)


def action_values(run: Run[Any], model: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
    """`VALUES` of each action, without gradients, 0 elsewhere: (B, T-1, 5), on the host as the batch is."""
    seen = seen_by_teacher(run.args, batch)
    module, expert = (cast(Policy, getattr(one, "module", one)) for one in (model, teacher))
    out = torch.zeros(*batch.action_mask.shape, len(VALUES), device=run.device)
    with inference(module), run.autocast(), gather_shards(module):
        for rows in inference_batches(batch.attention_mask.sum(1), run.args.rollout_mini_batch_size, run.device):
            part = batch.extend(DistillBatch, logprobs=None).select(rows).to(run.device)
            function = compare(expert, part, seen.select(rows).to(run.device), run.args.beta)
            _, values = module(**policy_inputs(part), function=function)
            width = part.action_mask.shape[1]
            found = values.new_zeros(*part.action_mask.shape, len(VALUES))
            found[part.actions] = values
            out[to_device(rows, run.device), :width] = found
    return out.cpu()
