"""The loss from its inputs, in float64: what one change of the formula explains the recorded number.

A recorded loss alone says little at the first pass, where all clips agree and advantages of mean 0 sum to 0; its
derivative by each log-probability, `loss_slopes`, tells the weights of tokens and rows apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.checks.fitting import ROUNDINGS, Formula, Known, judge
from lightrlhf.checks.pairs import pair_totals
from lightrlhf.checks.step import UNITS, Missing, Step
from lightrlhf.checks.verdicts import WRONG, Verdict
from lightrlhf.maths import ops, policy_losses

UNEXPLAINED = 0.02  # share of a gradient; rounding leaves less
Total = Callable[[Tensor], Tensor]  # log-probabilities (B, T), or their sums (B,), to the loss


def check_loss(step: Step) -> Verdict:
    """The loss of the method that the settings name."""
    step.need("method")
    if "loss" not in step and "loss_slopes" not in step:
        raise Missing("loss, loss_slopes")
    right, faults = totals_of(step)
    names = "loss_type, aggregation, kl_coeff"
    verdicts = []
    new = step.get("new_logprobs")
    if (odd := other_targets(step)) is not None:
        return odd
    jumps = at_bounds(step, new)
    for field in ("loss_slopes", "loss"):
        if field in step:
            found = step.get(field).sum() if field == "loss" else step.get(field)
            if field == "loss_slopes" and found.shape != new.shape:
                raise Missing("loss_slopes of the shape of new_logprobs")
            if field == "loss_slopes":
                jumps, found = jumps | found.isnan(), found.nan_to_num(0.0)
            meant, wrong = (
                {name: _formula(step, field, total, new, jumps) for name, total in totals.items()}
                for totals in (right, faults)
            )
            wrong |= scaled(found, meant) if field == "loss_slopes" else {}
            verdicts.append(judge("loss", found, Known(meant, wrong), [*meant], names))
    first = next((one for one in verdicts if one.says == WRONG), verdicts[0])
    given = ", ".join(one for one in ("loss", "loss_slopes") if one in step)
    return first if first.says == WRONG else first._replace(evidence=f"{first.evidence} ({given})")


def totals_of(step: Step) -> tuple[dict[str, Total], dict[str, Total]]:
    """What the method means, and its faults, by name. Raises: Missing."""
    step.need("method")
    known = {"grpo": policy_totals, "ppo": policy_totals, "sft": sft_totals, "dpo": pair_totals}
    if step.config["method"] not in known:
        raise Missing(f"a known method, not {step.config['method']}: {', '.join(known)}")
    if step.config.get("entropy_coeff"):
        raise Missing("entropy_coeff 0: the entropy bonus is not recomputed")
    return known[step.config["method"]](step)


def slopes_of(step: Step) -> Tensor:
    """The derivative of the loss by each log-probability, as recorded or by the method's formula. Raises: Missing."""
    if "loss_slopes" in step and step.get("loss_slopes").ndim == 2:
        if bool(step.get("loss_slopes").isnan().any()):
            raise Missing("loss_slopes of every token")
        return step.get("loss_slopes")
    at = step.of_tokens("new_logprobs").clone().requires_grad_()
    right = totals_of(step)[0]
    if len(right) > 1:
        raise Missing("loss_slopes: rows without a trained token may count, or not")
    (slopes,) = torch.autograd.grad(next(iter(right.values()))(at), at)
    return slopes


def scaled(found: Tensor, meant: dict[str, Formula]) -> dict[str, Formula]:
    """The meant weights of tokens times the one number that fits best."""
    made = {}
    for values, error in meant.values():
        if float(values.abs().sum()):
            scale = float((found * values).sum() / values.square().sum())
            made[f"scaled by {scale:.4g}"] = Formula(values * scale, error * abs(scale))
    return made


def at_bounds(step: Step, new: Tensor) -> Tensor:
    """Where the ratio is at a bound of its range to rounding, so that the slope of the clip may be either: bool."""
    if step.config.get("loss_type") != "clip" or "old_logprobs" not in step:
        return torch.zeros_like(new, dtype=torch.bool)
    mask, old = step.mask(), step.of_tokens("old_logprobs")
    ratio = torch.where(mask, new - old, 0.0)  # (B, T), its logarithm
    error = ROUNDINGS * step.unit * (1 + new.abs() + old.abs())
    if step.config.get("importance_sampling_level") == "sequence":
        ratio, error = (policy_losses.sequence_log_ratio(one, mask) for one in (ratio, error))
    bounds = torch.tensor([1 - float(step.config["clip_low"]), 1 + float(step.config["clip_high"])]).double().log()
    return mask & ((ratio[..., None] - bounds).abs() <= error[..., None]).any(-1)


def other_targets(step: Step) -> Verdict | None:
    """A fault where the gradient of the loss is not along log-probabilities of the trained tokens."""
    if "unexplained" not in step or not bool((step.get("unexplained") > UNEXPLAINED).any()):
        return None
    rest = step.get("unexplained")
    row, token = divmod(int(rest.argmax()), rest.shape[1])
    evidence = f"row {row} token {token}: {float(rest.max()):.0%} of the gradient is along no log-probability of it"
    names = {0: "labels not shifted", 2: "labels shifted twice"}
    fit = [names[one] for one in step.config.get("slope_targets") or [] if one in names]
    causes = ("labels of other tokens", "another term in the loss")
    return Verdict("loss", WRONG, fit[0] if fit else "loss of other tokens", evidence, () if fit else causes, "labels")


def _formula(step: Step, field: str, total: Total, new: Tensor, jumps: Tensor) -> Formula:
    """The value or the slopes of a loss, and how far rounding of its inputs moves them, to first order."""
    at = new.clone().requires_grad_()
    value = total(at)
    (slopes,) = torch.autograd.grad(value, at) if value.requires_grad else (torch.zeros_like(new),)
    digits = step.config.get("slope_digits")
    unit = max(step.unit, 0.5 * 10.0 ** (1 - digits)) if digits and field == "loss_slopes" else step.unit
    if digits and field == "loss":  # of logits in half precision, and new_logprobs of its hidden states
        unit = max(unit, UNITS.get(str(step.config.get("dtype")), 0.0))
    moved = ROUNDINGS * unit * (1 + new.abs())  # of each log-probability
    if field == "loss_slopes":
        error = moved * (slopes.abs() + slopes.abs().max())
        return Formula(slopes, error.masked_fill(jumps, torch.inf))
    count = float((slopes != 0).sum().clamp(min=1))
    size = count**0.5 * (
        float((slopes.abs() * moved).sum()) + ROUNDINGS * step.unit * max(1.0, float(value.detach().abs()))
    )
    return Formula(value.detach(), torch.tensor(size).double())


# ----------------------------------------------------------------------------------------------------- policy losses
class Way(NamedTuple):
    """Ingredients of a policy loss; a fault changes one of them."""

    advantages: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    old: Tensor
    ref: Tensor | None
    loss: str
    low: float
    high: float
    is_sequence: bool
    weights: Tensor  # (B, T), 0 off the mask
    kl_coeff: float
    kl: Callable[[Tensor, Tensor, Tensor], Tensor] | None  # of new, ref and log-ratio
    token_loss: policy_losses.TokenLoss | None = None  # in place of a named one


def total_of(way: Way, new: Tensor) -> Tensor:
    """The scalar loss of new log-probabilities."""
    difference = torch.where(way.mask, new - way.old, 0.0)
    ratio = policy_losses.sequence_log_ratio(difference, way.mask) if way.is_sequence else difference
    loss = way.token_loss or policy_losses.make_loss(way.loss, way.low, way.high, None)
    losses = loss(new, ratio, way.advantages, way.mask)
    if way.kl_coeff and way.ref is not None and way.kl is not None:
        losses = losses + way.kl_coeff * way.kl(new, way.ref, difference)
    return torch.where(way.mask, way.weights * losses, 0.0).sum()


def _unclipped(new: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -ratio.exp() * advantages


def _pessimist(new: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    rho = ratio.exp()
    return -torch.maximum(rho * advantages, rho.clamp(1 - low, 1 + high) * advantages)


def _always_clipped(new: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return -ratio.exp().clamp(1 - low, 1 + high) * advantages


def _is_estimator(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda new, ref, ratio: ops.KL_ESTIMATORS[name](new, ref)


KLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{name: _is_estimator(name) for name in ops.KL_ESTIMATORS},
    "k2 weighted": policy_losses.kl_loss,
    "k3 weighted": lambda new, ref, ratio: ratio.exp() * ops.kl_k3(new, ref),
    "k3 reversed": lambda new, ref, ratio: ops.kl_k3(ref, new),
    "k3 reversed, weighted": lambda new, ref, ratio: ratio.exp() * ops.kl_k3(ref, new),
}


def policy_totals(step: Step) -> tuple[dict[str, Total], dict[str, Total]]:
    """The expected loss by its name, and it with one fault each."""
    step.need("new_logprobs", "advantages", "loss_mask", "loss_type", "aggregation")
    config, mask = step.config, step.mask()
    kind, kl_coeff = config["loss_type"], float(config.get("kl_coeff") or 0.0)
    in_loss = kl_coeff if config.get("kl_placement", "loss") == "loss" else 0.0
    if in_loss:
        step.need("ref_logprobs", "kl_estimator")
    if kind not in policy_losses.LOSSES or config["aggregation"] not in policy_losses.AGGREGATIONS:
        raise Missing(f"a known loss_type and aggregation, not {kind} and {config['aggregation']}")
    if kind in ("clip", "cispo"):
        step.need("clip_low", "clip_high")
    if "old_logprobs" not in step and not config.get("first_pass"):
        raise Missing("old_logprobs, or first_pass")
    new = step.of_tokens("new_logprobs")
    way = Way(
        torch.where(mask, step.of_tokens("advantages"), 0.0),
        mask,
        torch.where(mask, step.of_tokens("old_logprobs") if "old_logprobs" in step else new, 0.0),
        step.of_tokens("ref_logprobs") if "ref_logprobs" in step else None,
        kind,
        float(config.get("clip_low") or 0.0),
        float(config.get("clip_high") or 0.0),
        config.get("importance_sampling_level") == "sequence",
        weights_of(step, mask, config["aggregation"]),
        in_loss,
        KLS.get(str(config.get("kl_estimator"))),
    )
    ways = {"sign of advantages": way._replace(advantages=-way.advantages)}
    ways |= clip_faults(way) | kl_faults(way, kl_coeff or 0.04) | weight_faults(step, way)
    if "group" in step or len(mask) > 1:
        ways["advantages of other rows"] = way._replace(advantages=way.advantages.roll(1, 0))
    ways["mask one late"] = way._replace(weights=way.weights.roll(1, 1), mask=mask.roll(1, 1))
    return with_empty_rows(step, f"{kind}, {config['aggregation']}", way, ways)


def with_empty_rows(step: Step, name: str, way: Way, ways: dict[str, Way]) -> tuple[dict[str, Total], dict[str, Total]]:
    """What is meant and its faults; rows without a trained token may count in a mean over rows, as in TRL, or not."""
    rows = way.mask.any(1)
    number = step.whole("episode") if "episode" in step else torch.arange(len(rows))  # (B,)
    share = len(number[rows].unique()) / len(number.unique())
    meant = {name: way}
    if share < 1 and step.config["aggregation"] in ("sequence", "sum", "constant"):
        both = {"": 1.0, ", empty rows counted": share}
        meant = {name + end: way._replace(weights=way.weights * scale) for end, scale in both.items()}
        ways = {n + end: w._replace(weights=w.weights * scale) for end, scale in both.items() for n, w in ways.items()}

    def totals(part: dict[str, Way]) -> dict[str, Total]:
        return {name: partial(total_of, one) for name, one in part.items()}

    return totals(meant), totals(ways)


def weights_of(step: Step, mask: Tensor, aggregation: str) -> Tensor:
    """Weights of tokens, (B, T), in float64; `token` divides by `num_items` where it is given."""
    passes = float(step.config.get("passes") or 1)
    if aggregation == "token" and step.config.get("num_items"):
        return mask.double() / float(step.config["num_items"])
    if aggregation == "constant":
        step.need("max_new_tokens")
    if aggregation == "prompt":
        step.need("group")
    group = step.whole("group") if "group" in step else torch.zeros(len(mask), dtype=torch.int64)
    counted = mask, group, int(group.max()) + 1, aggregation, int(step.config.get("max_new_tokens") or 1)
    episode = step.whole("episode") if "episode" in step else None
    return policy_losses.token_weights(*counted, episode=episode).double() / passes


def clip_faults(way: Way) -> dict[str, Way]:
    """Other losses and other uses of the range."""
    low, high = way.low, way.high
    faults = {f"loss {name}": way._replace(loss=name) for name in policy_losses.LOSSES if name != way.loss}
    faults["no clipping"] = way._replace(token_loss=_unclipped)
    faults["max in place of min"] = way._replace(token_loss=partial(_pessimist, low=low, high=high))
    faults["no upper clipping"], faults["no lower clipping"] = way._replace(high=1e30), way._replace(low=1e30)
    faults["always clipped"] = way._replace(token_loss=partial(_always_clipped, low=low, high=high))
    faults["ratio of sequences" if not way.is_sequence else "ratio of tokens"] = way._replace(
        is_sequence=not way.is_sequence
    )
    faults["ratio turned round"] = way._replace(token_loss=_turned(low, high))
    if low != high:
        faults["upper range is the lower"] = way._replace(high=low)
        faults["lower range is the upper"] = way._replace(low=high)
        faults["ranges exchanged"] = way._replace(low=high, high=low)
    for size in (0.1, 0.2, 0.28, 0.3, 0.4):
        if (size, size) != (low, high):
            faults[f"clip range {size}"] = way._replace(low=size, high=size)
    return faults


def _turned(low: float, high: float) -> policy_losses.TokenLoss:
    def loss(new: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return policy_losses.clip_loss(new, -ratio, advantages, mask, low, high)

    return loss


def kl_faults(way: Way, coeff: float) -> dict[str, Way]:
    """Another KL, none, or one of another size or sign."""
    if way.ref is None:
        return {}
    if not way.kl_coeff:
        return {f"a KL in the loss, {name}": way._replace(kl=one, kl_coeff=coeff) for name, one in KLS.items()}
    faults = {f"KL by {name}": way._replace(kl=one) for name, one in KLS.items() if one is not way.kl}
    faults["no KL"] = way._replace(kl_coeff=0.0)
    faults["sign of the KL"] = way._replace(kl_coeff=-way.kl_coeff)
    faults["KL without its coefficient"] = way._replace(kl_coeff=1.0)
    faults["coefficient of the KL squared"] = way._replace(kl_coeff=way.kl_coeff**2)
    return faults


def weight_faults(step: Step, way: Way) -> dict[str, Way]:
    """Other weights of tokens and rows."""
    mask, faults = way.mask, {}
    for name in policy_losses.AGGREGATIONS:
        if name != step.config["aggregation"] and (name != "constant" or step.config.get("max_new_tokens")):
            if name != "prompt" or "group" in step:
                faults[f"aggregation {name}"] = way._replace(weights=weights_of(step, mask, name))
    if step.config.get("num_items"):
        faults["tokens of this pass in place of the step's"] = way._replace(weights=mask / mask.sum())
    places = mask.any(0).sum()
    faults["padding counted"] = way._replace(weights=mask / (mask.shape[0] * places))
    faults["padding of prompts counted"] = way._replace(weights=mask.double() / mask.numel())
    faults["sum in place of mean"] = way._replace(weights=mask.double())
    if "micro_batch" in step and step.config["aggregation"] == "token":
        passes = step.whole("micro_batch")
        number = passes.max() + 1
        tokens = torch.zeros(int(number)).long().index_add(0, passes, mask.sum(1)).clamp(min=1)  # (M,)
        faults["mean of means of passes"] = way._replace(weights=mask / (number * tokens[passes])[:, None])
        faults["sum of means of passes"] = way._replace(weights=mask / tokens[passes][:, None])
    count = float(step.config.get("passes") or (step.whole("micro_batch").max() + 1 if "micro_batch" in step else 1))
    if count > 1:
        faults["not divided by the passes"] = way._replace(weights=way.weights * count)
        faults["divided by the passes twice"] = way._replace(weights=way.weights / count)
    return faults


# --------------------------------------------------------------------------------------------------------------- SFT
def sft_totals(step: Step) -> tuple[dict[str, Total], dict[str, Total]]:
    """Mean negative log-probability of the trained tokens, and it with one fault each."""
    step.need("new_logprobs", "loss_mask")
    if step.config.get("loss_type") not in (None, "nll"):
        raise Missing(f"the loss nll, not {step.config['loss_type']}")
    new, mask = step.of_tokens("new_logprobs"), step.mask().clone()
    if "input_ids" in step or not bool(new[:, 0].any()):
        mask[:, 0] = False  # nothing predicts the first token, though labels may have it
    zeros, aggregation = torch.zeros_like(new), step.config.setdefault("aggregation", "token")
    weights = weights_of(step, mask, aggregation)
    way = Way(zeros + 1, mask, zeros, None, "reinforce", 0, 0, False, weights, 0, None)
    ways = weight_faults(step, way)
    ways["mask one late"] = way._replace(weights=way.weights.roll(1, 1), mask=mask.roll(1, 1))
    if "attention_mask" in step:
        every = step.attended().clone()
        every[:, 0] = False
        ways["prompt tokens counted"] = way._replace(mask=every, weights=every / every.sum())
        ways["divided by all tokens"] = way._replace(weights=mask / every.sum())
    ways["sign"] = way._replace(advantages=-way.advantages)
    return with_empty_rows(step, f"mean of tokens, {aggregation}", way, ways)
