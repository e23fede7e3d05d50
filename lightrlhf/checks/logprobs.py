"""Log-probabilities against each other: what is impossible, the ratio at the first pass, and the KL term."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.checks.fitting import ROUNDINGS, Formula, Known, judge
from lightrlhf.checks.step import UNITS, Missing, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.maths import ops

KINDS = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "new_logprobs")
LARGEST_LOGIT = 32.0  # of usual models; rounding moves a log-probability by this many units
ROUNDED = 8  # times, in the last layers
UNLIKELY = -1.0  # a log-probability that no rounding makes 0; a large gap of logits gives 0 beside nearly 0


def check_logprobs(step: Step) -> Verdict:
    """Each array by itself and beside the others: NaN, above 0, or 0 where the others say otherwise."""
    given = [one for one in KINDS if one in step and step.get(one).ndim == 2]
    if not given:
        raise Missing(", or ".join(KINDS))
    trained, error = step.mask(), pass_error(step)
    for name in given:
        values = step.get(name)[trained]
        if bool(values.isnan().any()):
            many = f"{name}: {int(values.isnan().sum())} of {len(values)} trained tokens"
            return Verdict("logprobs", WRONG, "log-probabilities missing", many, ("a request failed",), name)
        if bool((values > error).any()):
            top = f"{name}: {float(values.max()):.4g} at most"
            causes = ("losses, their sign turned", "logits, not log-probabilities")
            return Verdict("logprobs", WRONG, "log-probabilities above 0", top, causes, name)
        policy = [one for one in given if one not in (name, "ref_logprobs")]  # a reference may find it unlikely
        others = [step.get(one)[trained] for one in policy]
        if not others or (name == "sampler_logprobs" and (step.is_cut() or step.config.get("temperature") == 0)):
            continue  # the one token that is left has 0
        zero = (values == 0) & (torch.stack(others) < UNLIKELY).any(0)
        if bool(zero.any()):
            many = f"{name}: {int(zero.sum())} of {len(values)} trained tokens are 0 where the others are not"
            causes = ("missing ones read as 0", "arrays of tool tokens filled with 0")
            return Verdict("logprobs", WRONG, "missing log-probabilities read as 0", many, causes, name)
    return Verdict("logprobs", RIGHT, evidence=f"{', '.join(given)}: {int(trained.sum())} tokens")


def pass_error(step: Step) -> float:
    """How far rounding moves a log-probability between two passes of one model, on average."""
    unit = UNITS.get(str(step.config.get("dtype") or "float32").removeprefix("torch."), UNITS["float32"])
    return max(unit, step.unit) * LARGEST_LOGIT * ROUNDED


def check_ratio(step: Step) -> Verdict:
    """The ratio before the first update on samples is 1: two passes of the same weights."""
    step.need("new_logprobs", "old_logprobs", "first_pass")
    if not step.config["first_pass"]:
        raise Missing("a first pass over the samples (first_pass)")
    return compare(step, "ratio", "new_logprobs", "old_logprobs")


def compare(step: Step, name: str, first: str, second: str) -> Verdict:
    """Whether two arrays are log-probabilities of one distribution to rounding, else which change makes them so."""
    trained, error = step.mask(), pass_error(step)
    if not bool(trained.any()):
        raise Missing("a trained token")
    new, old = step.of_tokens(first), step.of_tokens(second)
    gap = _gap(new, old, trained)
    evidence = f"{first} - {second}: mean size {gap:.3g}, rounding makes {error:.2g}"
    if gap <= error:
        return Verdict(name, RIGHT, evidence=evidence)
    changed = moved(new, old, trained)
    fit = [one for one, size in changed.items() if size <= error]
    if fit:
        return Verdict(name, WRONG, fit[0], evidence, tuple(fit) if len(fit) > 1 else (), second)
    causes = (
        "dropout on in one of the passes",
        "another temperature",
        "weights of another version",
        "another template",
    )
    return Verdict(name, WRONG, "ratio not 1 at the first pass", evidence, causes, f"{first}, {second}")


def moved(new: Tensor, old: Tensor, trained: Tensor) -> dict[str, float]:
    """Mean size of the gap if one array (B, T) is the other at another place, of another sign or in another base."""
    changed = {
        "log-probabilities one late": _gap(new, old.roll(1, 1), trained & trained.roll(1, 1)),
        "log-probabilities one early": _gap(new, old.roll(-1, 1), trained & trained.roll(-1, 1)),
        "sign of log-probabilities": _gap(new, -old, trained),
        "log-probabilities in another base": min(
            _gap(new, old * 2.302585, trained), _gap(new, old / 2.302585, trained)
        ),
    }
    for shift in range(1, len(new)):
        both = trained & trained.roll(shift, 0)
        if bool(both.any()) and bool((both.sum(1) == trained.sum(1)).all()):
            changed["rows misaligned"] = min(
                changed.get("rows misaligned", torch.inf), _gap(new, old.roll(shift, 0), both)
            )
    return changed


def _gap(new: Tensor, old: Tensor, where: Tensor) -> float:
    """Mean size of the difference at some tokens; infinite without a token."""
    return float((new - old)[where].abs().mean()) if bool(where.any()) else torch.inf


def check_kl(step: Step) -> Verdict:
    """The recorded KL term of each token by its estimator."""
    step.need("kl", "new_logprobs", "ref_logprobs", "loss_mask")
    trained = step.mask()
    new, ref = step.of_tokens("new_logprobs"), step.of_tokens("ref_logprobs")
    found = torch.where(trained, step.of_tokens("kl"), 0.0)
    sizes = ROUNDINGS * step.unit * (1 + new.abs() + ref.abs())  # of the difference

    def made(values: Tensor, slope: Tensor) -> Formula:
        error = sizes * (slope.abs() + values.abs()) + ROUNDINGS * step.unit  # 1 cancels in k3
        return Formula(torch.where(trained, values, 0.0), torch.where(trained, error, 0.0))

    far = (ref - new).exp()
    slopes = {"k1": torch.ones_like(new), "k2": (new - ref), "k3": 1 - far}
    meant = {name: made(estimate(new, ref), slopes[name]) for name, estimate in ops.KL_ESTIMATORS.items()}
    near = (new - ref).exp()
    faults = {f"{name} of the sign": Formula(-one.values, one.error) for name, one in meant.items()}
    faults["k3 reversed"] = made(ops.kl_k3(ref, new), 1 - near)
    faults["absolute difference"] = made((new - ref).abs(), torch.ones_like(new))
    faults["squared difference"] = made((new - ref).pow(2), 2 * (new - ref))
    faults["ratio in place of its logarithm"] = made(near, near)
    faults["KL of 0"] = made(torch.zeros_like(new), torch.zeros_like(new))
    expected = step.config.get("kl_estimator")
    return judge("kl", found, Known(meant, faults), [expected] if expected in meant else [], "kl_estimator")
