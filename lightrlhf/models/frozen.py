"""Frozen weights held in bfloat16 (`--base_dtype bfloat16`), as most models are published: half the memory.

Only the storage changes. Matrices of linear layers and embeddings stay in bfloat16; one at a time is cast to float32
for its product (under autocast to float16, to that), in the backward pass again, so that no copy outlives its layer;
under autocast to bfloat16 it is used as it is. Norms, biases and adapters are float32. A run is therefore, bit by bit,
the run whose base had been rounded to bfloat16 beforehand.

Left out: float16, whose range ends at 65,504; layers of another kind (GPT-2's, experts, scaled embeddings), which are
cast back to float32; training such weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.complete import HEADS

HELD = torch.bfloat16


class _Product(torch.autograd.Function):
    """x W' + b with W in bfloat16, for x and b of another dtype: (..., in) -> (..., out); the gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        return (grad.flatten(0, -2) @ weight.to(grad.dtype)).view(*grad.shape[:-1], -1), None, None


class HeldLinear(nn.Linear):
    """A frozen linear layer whose matrix is held in bfloat16."""

    compute_dtype = torch.float32  # of adapters on the layer: peft reads it

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
            bias = None if bias is None else bias.to(input.dtype)
        if input.dtype == HELD:
            return F.linear(input, self.weight, bias)
        if torch.is_grad_enabled() and (self.weight.requires_grad or getattr(self.bias, "requires_grad", False)):
            raise RuntimeError("weights held in bfloat16 are frozen; they have no gradient")
        return _Product.apply(input, self.weight, bias)


class HeldEmbedding(nn.Embedding):
    """A frozen embedding that is held in bfloat16; its outputs are float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


KINDS: dict[type, type] = {nn.Linear: HeldLinear, nn.Embedding: HeldEmbedding}


def hold(model: PreTrainedModel) -> None:
    """Round a model to bfloat16, all but its scalar head, and hold its matrices of `KINDS` so.

    All else is held in float32. Adapters come later.
    """
    heads = [getattr(model, name, None) for name in HEADS]
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds = {type(owner) for owner in owners[id(parameter)]}  # a tied head shares its matrix
            fits = name == "weight" and kinds <= KINDS.keys() | KINDS.values() and module not in heads
            if module not in heads:
                parameter.data = parameter.data.to(HELD)
            parameter.data = parameter.data.to(HELD if fits else torch.float32)
            if fits:
                module.__class__ = KINDS.get(type(module), type(module))
    model.__dict__["held_dtype"] = HELD


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds in float32 again: loading in bfloat16 has rounded Gemma's scale."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        fresh = type(model)(model.config)
    stored = model.state_dict()
    for name, buffer in fresh.named_buffers():
        parent, _, last = name.rpartition(".")
        if name not in stored and buffer.is_floating_point():
            model.get_submodule(parent).register_buffer(last, buffer, persistent=False)


def release(model: PreTrainedModel) -> None:
    """Hold all of a model in float32 again, so that adapters can be merged without rounding."""
    for module in model.modules():
        for kind, held in KINDS.items():
            if type(module) is held:
                module.__class__ = kind
    model.float()
    del model.held_dtype


def released_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model on the CPU, held in float32: next to the model itself it might not fit on its device."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().cpu().float(), requires_grad=False)
        for parameter in model.parameters()
    }
    released = copy.deepcopy(model, memo).cpu()
    release(released)
    return released


def is_held(model: nn.Module) -> bool:
    """Whether a model's frozen weights are held in bfloat16."""
    return hasattr(model, "held_dtype")


def activation_dtype(model: PreTrainedModel) -> torch.dtype:
    """Dtype of a model's hidden states without autocast."""
    return torch.float32 if is_held(model) else model.dtype
