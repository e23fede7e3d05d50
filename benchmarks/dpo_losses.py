"""Our DPO losses compared with TRL's, value and gradient, on random logits; requires TRL.

    python -m benchmarks.peers.install --only trl
    PYTHONPATH=. benchmarks/.venvs/trl/bin/python benchmarks/dpo_losses.py

TRL's own `DPOTrainer._compute_loss` (1.16) is called on a trainer without its constructor, with a model that returns
what the trainer's fused head would make of given logits, so the comparison covers the code that its users train with.
Losses that only we have are listed. Exits with status 1 if a pair differs by more than 1e-7 (TRL keeps EXO's smoothing
in float32; all others agree to 1e-14).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightrlhf.maths.preference import DISCOPOP_TEMPERATURE, LOSSES, Pairs

THEIRS = {  # our name: TRL's
    "sigmoid": "sigmoid",
    "robust": "robust",
    "ipo": "ipo",
    "hinge": "hinge",
    "nca_pair": "nca_pair",
    "sppo_hard": "sppo_hard",
    "exo_pair": "exo_pair",
    "bco_pair": "bco_pair",  # TRL's has no d (1.16); the same as ours before the first step, where d is 0
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "aot": "aot",
    "aot_pair": "aot_unpaired",
    "discopop": "discopop",
}
BETA, SMOOTHING, TOLERANCE = 0.3, 0.1, 1e-7
PAIRS, WIDTH, PROMPT, VOCABULARY = 6, 15, 5, 11


def main() -> None:
    """Print the comparison."""
    worst = 0.0
    print(f"{'ours':10} {'TRL':14} {'loss':>12} {'difference':>12} {'of gradients':>12}")
    for ours, theirs in THEIRS.items():
        for seed in range(5):
            inputs, logits, reference = random_batch(seed)
            ours_loss, ours_slope = with_gradient(logits, partial(our_loss, ours, inputs, reference))
            trl_loss, trl_slope = with_gradient(logits, partial(trl_loss_of, theirs, inputs, reference))
            loss_gap = abs(ours_loss - trl_loss) / max(abs(trl_loss), 1.0)
            slope_gap = float((ours_slope - trl_slope).abs().max() / trl_slope.abs().max())
            worst = max(worst, loss_gap, slope_gap)
        print(f"{ours:10} {theirs:14} {trl_loss:12.6f} {loss_gap:12.1e} {slope_gap:12.1e}")
    print(f"only ours: {', '.join(sorted(set(LOSSES) - set(THEIRS)))}")
    print(f"largest relative difference of {len(THEIRS)} losses: {worst:.1e}")
    sys.exit(worst > TOLERANCE)


def random_batch(seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """TRL's inputs of PAIRS pairs of different lengths, policy logits (2B, T, V), reference log-probabilities (2B,)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT + 1, WIDTH + 1, (2 * PAIRS, 1), generator=generator)
    steps = torch.arange(WIDTH)[None]
    inputs = {
        "input_ids": torch.randint(0, VOCABULARY, (2 * PAIRS, WIDTH), generator=generator),
        "attention_mask": (steps < lengths).long(),
        "completion_mask": ((steps >= PROMPT) & (steps < lengths)).long(),
    }
    logits = torch.randn(2 * PAIRS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64)
    other = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return inputs, logits, sequence_logps(inputs, other)


def sequence_logps(inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Log-probabilities of the responses: (2B, T, V) -> (2B,)."""
    taken = logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return (taken * inputs["completion_mask"][:, 1:]).sum(1)


def our_loss(name: str, inputs: dict[str, Tensor], reference: Tensor, logits: Tensor) -> Tensor:
    chosen, rejected = sequence_logps(inputs, logits).chunk(2)
    ref_chosen, ref_rejected = reference.chunk(2)
    chosen_lengths, rejected_lengths = inputs["completion_mask"].sum(1).chunk(2)
    pairs = Pairs(
        policy_chosen_logps=chosen,
        policy_rejected_logps=rejected,
        ref_chosen_logps=ref_chosen,
        ref_rejected_logps=ref_rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        beta=BETA,
        label_smoothing=smoothing_of(name),
    )
    return LOSSES[name](pairs).sum() / PAIRS


def smoothing_of(name: str) -> float:
    """Label smoothing for losses where both sides support it."""
    return SMOOTHING if name in ("robust", "exo_pair", "aot", "aot_pair") else 0.0


def trl_loss_of(name: str, inputs: dict[str, Tensor], reference: Tensor, logits: Tensor) -> Tensor:
    from accelerate import Accelerator
    from trl import DPOTrainer

    trainer: Any = DPOTrainer.__new__(DPOTrainer)
    ref_chosen, ref_rejected = reference.chunk(2)
    values = {
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True),
        "loss_types": [name],
        "loss_weights": [1.0],
        "beta": BETA,
        "label_smoothing": SMOOTHING,
        "f_divergence_type": "reverse_kl",
        "precompute_ref_logps": True,
        "aux_loss_enabled": False,
        "use_weighting": False,
        "ld_alpha": None,
        "args": SimpleNamespace(discopop_tau=DISCOPOP_TEMPERATURE),
        "_tp_size": 1,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
    }
    for key, value in values.items():
        object.__setattr__(trainer, key, value)
    known = {**inputs, "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    return trainer._compute_loss(lambda labels, **_: fused_head(logits, labels), known, False)


def fused_head(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """What TRL's model makes of logits (2B, T, V): log-probabilities (2B, T-1), 0 at labels of -100, and statistics."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return SimpleNamespace(
        log_probs=taken.masked_fill(labels < 0, 0.0),
        entropy=-(logprobs.exp() * logprobs).sum(-1),
        mean_logits=logits.mean(-1),
        is_top1=logits.argmax(-1) == labels,
    )


def with_gradient(logits: Tensor, loss: Any) -> tuple[float, Tensor]:
    """Value of a loss and its gradient with respect to the logits."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert math.isfinite(float(value.detach()))
    return float(value.detach()), leaf.grad


if __name__ == "__main__":
    main()
