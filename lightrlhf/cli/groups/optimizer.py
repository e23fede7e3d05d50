"""Flags of the optimiser and of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightrlhf.cli.fields import Args, at_least, between, flag, positive

OF_BITSANDBYTES = ("AdamW8bit", "PagedAdamW32bit")


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs(Args):
    """Optimiser and schedule."""

    optimizer: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW32bit"] = flag(
        "AdamW",
        packages=dict.fromkeys(OF_BITSANDBYTES, "bitsandbytes"),
        when=OF_BITSANDBYTES,
        excludes={"strategy": ("fsdp", "deepspeed")},
        show="rarely",
    )
    """Optimiser class of `torch.optim`, or of bitsandbytes: 8-bit state, or state paged out of the GPU's memory."""
    optimizer_beta1: float = at_least(0, 0.9, below=1, show="rarely")
    """Decay of the first moment."""
    optimizer_beta2: float = at_least(0, 0.95, below=1, show="rarely")
    """Decay of the second moment."""
    optimizer_eps: float = positive(1e-6, show="rarely")
    """Term added to the optimiser's denominator."""
    weight_decay: float = at_least(0, 0.0, show="rarely")
    """Decoupled weight decay, not applied to biases and norms."""
    gradient_clip_val: float = at_least(0, 1.0, show="rarely")
    """Clip the global gradient norm to this; 0 disables clipping."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = flag("cosine", show="rarely")
    """Learning-rate schedule (transformers.get_scheduler)."""
    lr_warmup_ratio: float | None = between(0, 1, None, drops="lr_warmup_steps", show="rarely")
    """Fraction of all steps for a linear warm-up from 0."""
    lr_warmup_steps: int | None = at_least(0, None, show="rarely")
    """Warm-up steps, instead of `lr_warmup_ratio`."""

    def _check(self) -> None:
        if self.lr_warmup_steps is not None:
            object.__setattr__(self, "lr_warmup_ratio", None)
