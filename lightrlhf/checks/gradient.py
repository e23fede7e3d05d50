"""The gradient of one step, and the change that an optimiser made of it, by weights before and after.

The derivative of the loss by each log-probability is recorded, or the formula of the settings gives it; the model gives
the rest. Adam's first step moves each number by the learning rate against the sign of its gradient, whatever its size.

Left out: steps whose rows are not all there, and signs and sizes of Adam's later steps and of other optimisers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.checks import weights as passes
from lightrlhf.checks.gaps import OTHER_KERNELS
from lightrlhf.checks.losses import slopes_of
from lightrlhf.checks.step import Missing, Step
from lightrlhf.checks.updates import ADAMS, LARGE_GRADIENT
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.checks.weights import Weights
from lightrlhf.data.types import PreTrainedModel

LEAST_ERROR = 1e-4  # relative, of a norm that sums many roundings
Gradient = dict[str, Tensor]  # by name of the trainable parameter


class Recomputed(NamedTuple):
    """The gradient of a step, and the relative error of its norm."""

    gradient: Gradient
    norm: float
    error: float


def recompute(step: Step, weights: Weights) -> Recomputed:
    """The gradient of all rows in float64, and what float32 makes of its norm. Raises: Missing."""
    if float(step.config.get("passes") or 1) > 1 and "micro_batch" not in step:
        raise Missing("all rows of the step, for passes is above 1")
    slopes = slopes_of(step)
    gradient = gradient_of(step, weights.model, slopes)
    norm, error = norm_of(gradient), LEAST_ERROR
    if weights.dtype == torch.float64:
        with passes.in_dtype(weights.model, torch.float32) as model:
            error += OTHER_KERNELS * abs(norm_of(gradient_of(step, model, slopes)) / max(norm, 1e-30) - 1)
    return Recomputed(gradient, norm, error)


def gradient_of(step: Step, model: PreTrainedModel, slopes: Tensor) -> Gradient:
    """The gradient by adapters, or without them by all weights: rows one by one, summed."""
    trainable = {name: one for name, one in model.named_parameters() if ".lora_" in name}
    trainable = trainable or dict(model.named_parameters())
    temperature = float(step.config.get("temperature") or 1.0)
    model.requires_grad_(False)
    try:
        for one in trainable.values():
            one.requires_grad_(True)
        for text in passes.texts_of(step, model.config.get_text_config().vocab_size):
            logits = passes.logits_of(model, text.ids, text.places)
            logprobs = (logits / temperature).log_softmax(-1)[range(len(text.places)), passes.targets([text])]
            (logprobs * slopes[text.number, text.columns].to(logprobs.dtype)).sum().backward()
        return {name: one.grad.clone() for name, one in trainable.items() if one.grad is not None}
    finally:
        model.zero_grad()
        model.requires_grad_(False)


def norm_of(gradient: Gradient) -> float:
    """The norm of all parts."""
    return float(sum(float(one.double().square().sum()) for one in gradient.values()) ** 0.5)


def check_norm(step: Step, made: Recomputed) -> Verdict:
    """The recorded norm of the gradient."""
    step.need("total_grad_norm")
    found, norm = float(step.get("total_grad_norm").sum()), made.norm
    error = made.error + step.unit
    evidence = f"total_grad_norm {found:.6g}, recomputed {norm:.6g}, to {error:.1g} of it"

    def fits(value: float) -> bool:
        return abs(found - value) <= error * max(abs(value), 1e-12)

    if fits(norm):
        return Verdict("gradient", RIGHT, evidence=evidence)
    limit = step.config.get("max_grad_norm")
    if limit and norm > limit and fits(limit):
        return Verdict("gradient", RIGHT, evidence=f"the norm after clipping to {limit:.4g}; {evidence}")
    without = {
        "embeddings left out": ("embed", "wte"),
        "output layer left out": ("lm_head",),
        "norms left out": ("norm", "ln_"),
        "biases left out": (".bias",),
    }
    values = {
        fault: norm_of({k: v for k, v in made.gradient.items() if not any(one in k for one in names)})
        for fault, names in without.items()
    }
    values = {fault: value for fault, value in values.items() if value != norm}
    values |= {"norm squared": norm**2, "gradient of 0": 0.0}
    values["sum of the norms of parameters"] = sum(norm_of({"": one}) for one in made.gradient.values())
    values["largest number of the gradient"] = max(float(one.abs().max()) for one in made.gradient.values())
    count = float(step.whole("micro_batch").max() + 1) if "micro_batch" in step else 1.0
    for number in {count, float(len(step.get("input_ids")))} - {1.0}:
        values |= {
            f"{number:.0f} times the gradient": norm * number,
            f"gradient divided by {number:.0f}": norm / number,
        }
    values |= {f"loss scale of {2**power} not taken out": norm * 2**power for power in range(8, 25)}
    fit = [one for one, value in values.items() if fits(value)]
    if fit:
        return Verdict("gradient", WRONG, fit[0], evidence, tuple(fit) if len(fit) > 1 else (), "total_grad_norm")
    causes = ("other rows in the step", "dropout in the pass", "parameters frozen", "another loss")
    shown = f"{evidence}; {found / max(norm, 1e-30):.6g} times"
    return Verdict("gradient", WRONG, "norm of another gradient", shown, causes, "total_grad_norm")


# ---------------------------------------------------------------------------------------------------------- the change
def check_update(step: Step, before: Weights, after: Weights, gradient: Gradient | None) -> Verdict:
    """What an optimiser step changed. Raises: Missing where the two are not of one shape."""
    first, second = (dict(one.model.named_parameters()) for one in (before, after))
    if {name: one.shape for name, one in first.items()} != {name: one.shape for name, one in second.items()}:
        raise Missing("weights before and after of the same names and shapes")
    changes = {name: (second[name] - one).detach() for name, one in first.items()}
    changed = {name for name, one in changes.items() if bool(one.any())}
    evidence = f"{len(changed)} of {len(changes)} tensors differ between {before.name} and {after.name}"
    if not changed:
        why = (
            "a learning rate of 0 at the start of a warm-up",
            "parameters that the optimiser lacks",
            "gradients of 0",
        )
        return Verdict("weights", WRONG, "weights did not change", evidence, why, "learning_rate")
    if gradient is None:
        return Verdict("weights", RIGHT, evidence=f"{evidence}; without the gradient no more is known")
    moved = {name for name, one in gradient.items() if bool(one.any())}
    if left := sorted(moved - changed):
        if set(left) == moved:
            evidence = f"{evidence}, none of those with a gradient"
        names = f"{left[0]} and {len(left) - 1} more" if len(left) > 1 else left[0]
        if lost := _lost_in_rounding(first, changes, moved):
            return Verdict("weights", WRONG, "step lost in rounding", f"{lost}; {evidence}", _ROUNDED, "dtype")
        why = ("the optimiser was made before they were", "frozen", "filtered by name")
        return Verdict("weights", WRONG, "parameters left out of the update", f"{names}; {evidence}", why, "optimizer")
    if beyond := sorted(changed - moved):
        why = ("weight decay of frozen weights", "an adapter merged in between", "a buffer of another version")
        many = f"{beyond[0]} and {len(beyond) - 1} more; {evidence}" if len(beyond) > 1 else f"{beyond[0]}; {evidence}"
        return Verdict("weights", WRONG, "changed without a gradient", many, why, "weight_decay")
    if lost := _lost_in_rounding(first, changes, moved):
        return Verdict("weights", WRONG, "step lost in rounding", f"{lost}; {evidence}", _ROUNDED, "dtype")
    return (
        _first_step(step, first, changes, gradient, evidence) if step else Verdict("weights", RIGHT, evidence=evidence)
    )


_ROUNDED = ("weights in bfloat16 without a copy in float32", "a learning rate below their rounding")


def _lost_in_rounding(before: dict[str, torch.nn.Parameter], changes: Gradient, moved: set[str]) -> str:
    """How many numbers of weights in bfloat16 did not change, if most did not; else empty."""
    if any(bool((before[name] != before[name].bfloat16()).any()) for name in moved):
        return ""
    same = sum(int((changes[name] == 0).sum()) for name in moved)
    count = sum(changes[name].numel() for name in moved)
    return f"{same} of {count} numbers are as before" if same > count / 2 else ""


def _first_step(
    step: Step, before: dict[str, torch.nn.Parameter], changes: Gradient, gradient: Gradient, evidence: str
) -> Verdict:
    """Signs and size of the first step of Adam, of numbers whose gradient is far above what Adam adds to it."""
    config = step.config
    if config.get("optimizer") not in ADAMS or not config.get("is_first") or "learning_rate" not in step:
        known = "AdamW, is_first and learning_rate"
        return Verdict("weights", RIGHT, evidence=f"{evidence}; for its size optimizer {known} are needed")
    rate = float(step.get("learning_rate").nan_to_num(0.0).max())
    decay = float(step.get("weight_decay").nan_to_num(0.0).max()) if "weight_decay" in step else 0.0
    limit, norm = config.get("max_grad_norm"), norm_of(gradient)
    scale = min(1.0, float(limit) / norm) if limit and norm else 1.0
    against, sizes, roundings = [], [], []
    for name, one in gradient.items():
        is_large = scale * one.abs() > LARGE_GRADIENT
        step_of = changes[name][is_large] + rate * decay * before[name][is_large].detach()
        against.append((step_of * one[is_large] < 0).double())
        sizes.append(step_of.abs())
        roundings.append(before[name][is_large].detach().abs() * 2.0**-23)
    share, count = (torch.cat(against).mean().item(), sum(map(len, against))) if any(map(len, against)) else (1.0, 0)
    if not count:
        return Verdict("weights", RIGHT, evidence=f"{evidence}; gradients are too small to tell the size of the step")
    found, error = float(torch.cat(sizes).median()), float(torch.cat(roundings).median())
    evidence = f"{evidence}; {share:.4f} of {count} numbers moved against the gradient, by {found:.4g} in the median"
    if share < 0.5:
        return Verdict("weights", WRONG, "update along the gradient", evidence, ("sign of the loss",), "loss")
    if share < 0.99:
        why = ("gradients of an earlier step were kept", "another loss", "state of the optimiser from before")
        return Verdict("weights", WRONG, "update of another gradient", evidence, why, "zero_grad")
    if abs(found - rate) > 0.01 * rate + error:
        why = ("a schedule that is a step ahead or behind", "a warm-up", "groups with other rates")
        fault = f"learning rate {found:.3g}, not {rate:.3g}"
        return Verdict("weights", WRONG, fault, evidence, why, "learning_rate")
    return Verdict("weights", RIGHT, evidence=evidence)
