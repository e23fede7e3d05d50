"""Optimisers: AdamW and Adam of torch, fused, or the 8-bit and paged ones of bitsandbytes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

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
