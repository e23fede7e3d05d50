"""What an optimiser step changed, its learning rate, and whether the reference was left alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrlhf.checks.step import UNITS, Missing, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict

CLOSE = 1e-3  # relative, of sums over a model in float32
ADAMS = ("Adam", "AdamW")  # whose first step moves a weight by its learning rate
EPSILON = 1e-8  # of Adam
LARGE_GRADIENT = 1e3 * EPSILON  # so that Adam moves a weight by its rate


def check_update(step: Step) -> Verdict:
    """Each parameter that has a gradient and is to be trained changed, and nothing else did."""
    step.need("trainable", "optimised", "grad_norm", "learning_rate", "change")
    names, config = step.config.get("parameters") or [], step.config
    trainable, optimised, size = step.mask("trainable"), step.mask("optimised"), step.get("grad_norm")
    rate, change = step.get("learning_rate").nan_to_num(0.0), step.get("change")
    has = size > 0
    moves = has & optimised & (rate > 0)
    is_half = UNITS.get(str(config.get("dtype")), 0.0) > UNITS["float32"]
    stale = ("the optimiser was made before the model was changed", "parameters of another copy of the model")
    wrapped = ("requires_grad set after the adapter was added", "get_peft_model called twice")
    shut = [name for name in config.get("adapters") or [] if name]
    beside = torch.tensor([bool(shut) and not any(one in name for one in shut) for name in names]) & trainable
    lost = "updates lost to rounding" if is_half else "parameters did not change"
    why = ("weights in half precision", "a learning rate below their rounding") if is_half else stale
    faults: list[tuple[str, Tensor, tuple[str, ...]]] = [
        ("gradients are not finite", trainable & ~size.isfinite(), ("overflow", "log of 0")),
        ("base weights trained beside the adapter", beside, wrapped),
        ("trained parameters are not in the optimiser", trainable & ~optimised, stale),
        ("frozen parameters changed", ~trainable & (change > 0), ("written to by hand", "merged adapters")),
        (lost, moves & (change == 0) & (is_half | _is_seen(step, rate)), why),
        ("parameters without a gradient changed", (size < 0) & (change > 0), ("written to by hand",)),
    ]
    for fault, where, causes in faults:
        if bool(where.any()):
            return _wrong(fault, where, names, causes)
    if config.get("foreign_parameters"):
        many = f"{config['foreign_parameters']} parameters of the optimiser are not the model's"
        return Verdict("update", WRONG, "the optimiser has other parameters", many, stale, "optimizer")
    if config.get("is_tied") is False:
        many = "tie_word_embeddings is set, and the output layer has other weights"
        return Verdict("update", WRONG, "tied weights came apart", many, ("a head that was replaced",), "lm_head")
    if not bool((has & trainable).any()):
        raise Missing("a gradient that is not 0")
    return _sizes(step, names, moves, change, is_half)


def _decay(step: Step) -> Tensor:
    decay = step.arrays.get("weight_decay")
    return torch.zeros(1) if decay is None else decay.nan_to_num(0.0)


def _is_seen(step: Step, rate: Tensor) -> Tensor:
    """Where an update is larger than the rounding of the weights: not at the small rates of a warm-up."""
    if "grad_max" not in step or "weight_max" not in step:
        return torch.ones_like(rate, dtype=torch.bool)
    top, is_adam = step.get("grad_max").clamp(min=0.0), step.config.get("optimizer") in ADAMS
    size = rate * (top / (top + EPSILON) if is_adam else top.clamp(max=1.0))
    return size > 4 * UNITS["float32"] * step.get("weight_max").nan_to_num(0.0)


def _wrong(fault: str, where: Tensor, names: list[str], causes: tuple[str, ...]) -> Verdict:
    first = int(where.nonzero()[0])
    name = names[first] if first < len(names) else f"parameter {first}"
    return Verdict("update", WRONG, fault, f"{int(where.sum())} of {len(where)}, first {name}", causes, "optimizer")


def _sizes(step: Step, names: list[str], moves: Tensor, change: Tensor, is_half: bool) -> Verdict:
    """The norm of clipped gradients, and the size of Adam's first step."""
    config, size = step.config, step.get("grad_norm")
    total = float(size[moves].square().sum().sqrt())
    limit = config.get("max_grad_norm")
    evidence = f"{int((change > 0).sum())} of {len(change)} parameters changed, gradient norm {total:.4g}"
    if limit and total > limit * (1 + CLOSE):
        return Verdict(
            "update", WRONG, "gradients not clipped", f"norm {total:.4g}, max_grad_norm {limit}", (), "max_grad_norm"
        )
    if config.get("is_first") and config.get("optimizer") in ADAMS and not is_half and "grad_max" in step:
        rate, top = step.get("learning_rate").nan_to_num(0.0), step.get("weight_max")
        rounding = UNITS["float32"] * top
        most = rate * (1 + _decay(step) * top) * (1 + CLOSE) + 2 * rounding
        far = moves & (change > most)
        near = (
            moves
            & (step.get("grad_max") > LARGE_GRADIENT)
            & (change < rate * (1 - _decay(step) * top) * 0.9 - rounding)
        )
        for fault, where in (
            ("update larger than the learning rate", far),
            ("update smaller than the learning rate", near),
        ):
            if bool(where.any()):
                return _wrong(fault, where, names, ("two steps in one", "a learning rate that was changed"))
    return Verdict("update", RIGHT, evidence=evidence)


def check_rate(step: Step) -> Verdict:
    """The learning rate is the schedule's, and not 0."""
    step.need("learning_rate", "optimised", "update", "updates", "scheduler", "peak_learning_rate")
    config, optimised = step.config, step.mask("optimised")
    if not bool(optimised.any()):
        raise Missing("a parameter in the optimiser")
    rates = step.get("learning_rate")[optimised]
    number, most, warm, peak = (
        config["update"],
        config["updates"],
        config.get("warmup") or 0,
        config["peak_learning_rate"],
    )
    if warm >= most > 1:
        many = f"{warm} updates of warm-up, {most} in all"
        return Verdict("rate", WRONG, "warm-up longer than the run", many, (), "warmup_steps")
    share = _share(str(config["scheduler"]), number - 1, most, warm)
    text = f"update {number} of {most}: {float(rates.max()):.4g}"
    if share is None and number <= warm + 1:
        raise Missing(f"a known schedule, not {config['scheduler']}")
    if bool((rates == 0).all()) and (share is None or share > 0):
        causes = ("the scheduler was not stepped", "a learning rate of 0", "a group with another rate")
        return Verdict("rate", WRONG, "learning rate of 0", text, causes, "learning_rate")
    if share is None:
        raise Missing(f"a known schedule, not {config['scheduler']}")
    expected = peak * share
    if not bool(((rates - expected).abs() <= CLOSE * peak).any()):
        causes = (
            "the scheduler is stepped more or less than once an update",
            "another number of updates",
            "lr of a group",
        )
        return Verdict(
            "rate",
            WRONG,
            "learning rate is not the schedule's",
            f"{text}, expected {expected:.4g}",
            causes,
            "lr_scheduler_type",
        )
    return Verdict("rate", RIGHT, evidence=text)


def _share(kind: str, done: int, most: int, warm: int) -> float | None:
    """The share of the peak after `done` updates, by transformers' schedules."""
    if kind == "constant":
        return 1.0
    if kind in ("linear", "cosine", "constant_with_warmup") and done < warm:
        return done / max(1, warm)
    progress = (done - warm) / max(1, most - warm)
    shares = {"linear": max(0.0, 1 - progress), "constant_with_warmup": 1.0}
    shares["cosine"] = max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
    return shares.get(kind)


def check_reference(step: Step) -> Verdict:
    """The reference stays as it was."""
    step.need("reference")
    kind = step.config["reference"]
    if kind == "none":
        raise Missing("a model for the reference; adapters that are switched off need none")
    if kind == "policy":
        many = "its weights are those that are trained"
        return Verdict("reference", WRONG, "the reference is the policy", many, ("one model given twice",), "ref_model")
    if kind == "moved":
        causes = ("trained along", "one model given twice", "synchronised though sync_ref_model is off")
        return Verdict(
            "reference", WRONG, "the reference moved", "its weights changed since the start", causes, "ref_model"
        )
    return Verdict("reference", RIGHT, evidence="its weights are as at the start")
