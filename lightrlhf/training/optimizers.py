"""Optimisers: AdamW and Adam of torch, fused, or the 8-bit and paged ones of bitsandbytes; learning-rate schedules."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightrlhf.cli.groups import OptimizerArgs


def make_optimizer(args: OptimizerArgs, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimiser of a model's trainable parameters; weight decay applies to matrices only."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"betas": (args.optimizer_beta1, args.optimizer_beta2), "eps": args.optimizer_eps}
    if hasattr(torch.optim, args.optimizer):
        optimizer_class = getattr(torch.optim, args.optimizer)
        options["fused"] = True  # a sixth of the time, on a CPU too
    else:
        optimizer_class = _bitsandbytes_optimizer(args.optimizer)
    return optimizer_class([group for group in groups if group["params"]], lr=learning_rate, **options)


def _bitsandbytes_optimizer(name: str) -> Any:
    import bitsandbytes

    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")  # the flag's help says so
    return getattr(bitsandbytes.optim, name)


# -------------------------------------------------------------------------------------------------------- schedules
def make_schedule(name: str, optimizer: torch.optim.Optimizer, warmup: int, num_updates: int) -> LambdaLR:
    """The schedule of a name of `transformers.get_scheduler`, the same numbers bit by bit.

    Its module imports the trainer, peft and with it bitsandbytes: an eighth of the start of a program.
    """
    if name == "constant":
        return LambdaLR(optimizer, constant)
    return LambdaLR(optimizer, partial(warmed_up, name=name, warmup=warmup, num_updates=num_updates))


def constant(update: int) -> float:
    """The factor of a learning rate that stays the same."""
    return 1.0


def warmed_up(update: int, name: str, warmup: int, num_updates: int) -> float:
    """The factor of a learning rate that rises linearly from 0 in the warm-up, then stays or decays to 0."""
    if update < warmup:
        return update / max(1, warmup)
    if name == "constant_with_warmup":
        return 1.0
    if name == "linear":
        return max(0.0, (num_updates - update) / max(1, num_updates - warmup))
    progress = (update - warmup) / max(1, num_updates - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
