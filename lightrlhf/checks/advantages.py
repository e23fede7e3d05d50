"""Rewards to advantages: the baseline, the deviation, and the rows that belong together."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.checks.fitting import ROUNDINGS, Formula, Known, fits, judge
from lightrlhf.checks.step import UNITS, Missing, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.maths import groups, ops

EPS = 1e-4  # the largest that trainers add to a deviation (TRL); 1e-6 and 1e-8 are usual, too
STANDARDISED = ("std", "batch_std")


def check_advantages(step: Step) -> Verdict:
    """Of groups, or by GAE where the settings say so."""
    if step.config.get("advantage") == "gae":
        return check_gae(step)
    if "given_advantages" in step and "rewards" not in step:
        return check_kept(step)
    step.need("advantages", "rewards", "group")
    (found, is_known), scores, group = row_advantages(step), step.scores(), step.whole("group")
    if step.config.get("kl_placement") == "reward" and step.config.get("kl_coeff"):
        raise Missing("a way to tell the KL in the rewards from a baseline; give token_rewards instead")
    expected = step.config.get("advantage")
    if expected not in (None, *groups.ADVANTAGES):
        raise Missing(f"a formula for advantage {expected}")
    scored, added = ~scores.isnan(), torch.where(is_known, step.config.get("advantage_error") or 0.0, torch.inf)
    if bool((found[~scored] != 0).any()):
        row = int((~scored & (found != 0)).nonzero()[0])
        zeros = of_groups(step, scores.nan_to_num(), group, added)
        as_zero = [name for name, one in zeros.items() if fits(found, one)]
        fault = "unscored rows taken as 0" if as_zero else "unscored rows have an advantage"
        return Verdict("advantages", WRONG, fault, f"row {row} has no reward and advantage {float(found[row]):.6g}")
    meant = of_groups(step, scores, group, added)
    near = (name for sign in (1, -1) for name, one in meant.items() if fits(sign * found, one))
    kind = expected or next(near, "std")
    faults = faults_of(step, kind, found, scores, group, added)
    return judge("advantages", found, Known(meant, faults), [expected] if expected else [], "advantage")


def check_kept(step: Step) -> Verdict:
    """Advantages of a pass are those that its rows got when they were sampled."""
    (found, is_known), given = row_advantages(step), step.get("given_advantages")
    other = (is_known & (found != given)).nonzero()[:, 0].tolist()
    if not other:
        return Verdict("advantages", RIGHT, evidence="as when the rows were sampled")
    row = other[0]
    evidence = f"row {row}: found {float(found[row]):.6g}, sampled with {float(given[row]):.6g}"
    evidence += f"; {len(other)} of {len(found)} differ"
    if bool((found == -given).all()):
        return Verdict("advantages", WRONG, "sign", evidence, (), "advantages")
    causes = ("rows misaligned", "shuffled without their rows", "changed after they were made")
    is_moved = found.sort().values.equal(given.sort().values)
    fault = "rows misaligned" if is_moved else "advantages changed after sampling"
    return Verdict("advantages", WRONG, fault, evidence, causes, "advantages")


def row_advantages(step: Step) -> tuple[Tensor, Tensor]:
    """The advantage of each row, and whether it is known: of tokens a row without a trained one has none; (B,) each.

    Raises: Missing where the tokens of a row differ.
    """
    values = step.get("advantages")
    if values.ndim == 1:
        return values, torch.ones_like(values, dtype=torch.bool)
    trained = step.mask()
    is_known = trained.any(1)
    low, high = (torch.where(trained, values, far).aminmax(dim=1) for far in (torch.inf, -torch.inf))
    if bool(is_known.any()) and not bool((is_known & (high.max - low.min > 0)).any()):
        return torch.where(is_known, high.max, 0.0), is_known
    raise Missing("trained tokens, all of a row with one advantage; for GAE give values and token_rewards")


def of_groups(step: Step, scores: Tensor, group: Tensor, added: Tensor) -> dict[str, Formula]:
    """Each known kind, with the error of its rounding, of what is added to a deviation, and `added` to advantages."""
    moments = groups.group_moments(scores, group, int(group.max()) + 1)
    error = ROUNDINGS * step.unit * float(scores.nan_to_num().abs().max())
    is_zero = has_exact_zeros(step, scores, moments)
    found = {}
    for name, estimator in groups.ADVANTAGES.items():
        values = groups.group_advantages(scores, moments, estimator)
        bound = torch.full_like(values, error)
        if name in STANDARDISED:
            deviation = (moments.std if name == "std" else moments.batch_std) + groups.EPS
            bound = (error * (1 + values.abs()) + EPS * values.abs()) / deviation
        elif name == "maxrl":
            bound = (error * (1 + values.abs()) + EPS * values.abs()) / (moments.mean.abs() + groups.EPS)
        found[name] = Formula(values, torch.where(is_zero & (name != "none"), 0.0, bound) + added)
    return found


def has_exact_zeros(step: Step, scores: Tensor, moments: groups.Moments) -> Tensor:
    """Where the scores of a group are equal and its mean is their number, however float32 sums and divides: (B,) bool.

    Others, such as seven times 0.7, and scores that a log rounded, keep the bound of a deviation of 0.
    """
    size, odd = moments.size, moments.size - (moments.size + 1) % 2  # an odd multiple has the most digits
    by_factor = (size * scores).float() * (1 / size).float()  # as CUDA divides
    is_exact = ((odd * scores).float() == odd * scores) & (by_factor == scores) & (size > 1) & (moments.std == 0)
    weighted = {*(step.config.get("reward_weights") or [])} - {1}
    return is_exact & (step.unit <= UNITS["float32"] and not weighted)


def faults_of(step: Step, kind: str, found: Tensor, scores: Tensor, group: Tensor, added: Tensor) -> dict[str, Formula]:
    """What known faults make of the kind of advantage that was meant, by name."""
    rows = torch.arange(len(scores))

    def of(group: Tensor, scores: Tensor = scores, kind: str = kind) -> Formula:
        return of_groups(step, scores, group.unique(return_inverse=True)[1], added)[kind]

    right, faults = of(group), {}
    size = step.config.get("num_generations") or int((group == group[0]).sum())
    if kind in STANDARDISED:
        count = torch.bincount(group)[group].double() if kind == "std" else torch.tensor(float(len(scores)))
        scale = (count / (count - 1).clamp(min=1)).sqrt()
        faults["std with n"] = Formula(right.values * scale, right.error * scale)
    if bool(scores.isnan().any()):
        faults["unscored rows taken as 0"] = of(group, scores.nan_to_num())
    faults["baseline of the batch"] = of(torch.zeros_like(group))
    for other in ("std", "mean", "rloo"):
        faults[f"baseline of the batch, {other}"] = of(torch.zeros_like(group), kind=other)
    centre = of(torch.zeros_like(group), kind="mean").values
    deviation = groups.group_moments(scores, group, int(group.max()) + 1).std + groups.EPS
    largest = right.error.nan_to_num(posinf=0.0).max()
    faults["mean of the batch, std of the group"] = Formula(centre / deviation, largest + EPS / deviation + added)
    faults["groups of consecutive rows"] = of(rows // size)
    faults["groups interleaved"] = of(rows % max(len(scores) // size, 1))
    for number in (n for n in range(2, len(scores)) if len(scores) % n == 0 and n != size):
        faults[f"groups of {number} rows"] = of(rows // number)
    if "micro_batch" in step:
        passes = step.whole("micro_batch")
        faults["groups cut by batches"] = of(group * (passes.max() + 1) + passes)
        faults["baseline of each batch"] = of(passes)
    faults["sign"] = Formula(-right.values, right.error)
    faults |= misaligned(right, found)
    moved = (of(group, scores.roll(shift)) for shift in range(1, len(scores)))
    if rolled := next((one for one in moved if fits(found, one)), None):
        faults["rewards of other rows"] = rolled
    whole = ops.whiten(right.values, ~scores.isnan())
    spread = right.values.std(correction=0) + groups.EPS
    faults["whitened over the batch"] = Formula(whole, (right.error + 2 * EPS) / spread)
    if not bool(found.any()):
        return {"advantages of 0": Formula(found, found)}
    top, where = found.abs().max(), right.values.abs().argmax()
    faults["advantages clipped"] = Formula(right.values.clamp(-top, top), right.error)
    if right.values[where]:
        scale = found[where] / right.values[where]
        faults[f"scaled by {float(scale):.4g}"] = Formula(right.values * scale, right.error * scale.abs())
    return faults


def misaligned(right: Formula, found: Tensor) -> dict[str, Formula]:
    """The right values of other rows, where the rows were moved; empty where that is not the case."""
    for shift in range(1, len(found)):
        rolled = Formula(right.values.roll(shift), right.error.roll(shift))
        if fits(found, rolled):
            return {"rows misaligned": rolled}
    order, place = right.values.argsort(), found.argsort().argsort()
    return {"rows misaligned": Formula(right.values[order][place], right.error[order][place])}


def check_gae(step: Step) -> Verdict:
    """Advantages of tokens from rewards and values (PPO)."""
    step.need("advantages", "token_rewards", "values", "loss_mask", "gamma", "lambd")
    rewards, values, mask = step.of_tokens("token_rewards"), step.of_tokens("values"), step.mask()
    of_tokens = step.unit * torch.where(mask, rewards.abs() + 2 * values.abs().maximum(values.roll(-1, 1).abs()), 0.0)
    sizes = of_tokens, torch.zeros_like(values), mask, step.config["gamma"], step.config["lambd"]
    error = ROUNDINGS * ops.gae(*sizes)[0]  # of each token those that follow

    def of(rewards: Tensor = rewards, values: Tensor = values, sign: float = 1.0, **other: float) -> dict[str, Formula]:
        discounts = {name: other.get(name, step.config[name]) for name in ("gamma", "lambd")}
        made = sign * ops.gae(rewards, torch.where(mask, values, 0.0), mask, **discounts)[0]
        plain = torch.where(mask, made, 0.0)
        spread = float(plain[mask].std(correction=0)) + groups.EPS
        return {"gae": Formula(plain, error), "whitened gae": Formula(ops.whiten(plain, mask), (error + EPS) / spread)}

    meant = of()
    rows = zip(meant["gae"].values, mask)
    by_row = torch.stack([ops.whiten(row[None], one[None])[0] for row, one in rows])
    changed = {
        "sign": of(sign=-1.0),
        "gamma 1": of(gamma=1.0),
        "lambda 1": of(lambd=1.0),
        "lambda 0": of(lambd=0.0),
        "values of 0": of(values=torch.zeros_like(values)),
        "values one late": of(values=values.roll(1, 1)),
        "values one early": of(values=values.roll(-1, 1)),
    }
    if "kl" in step and step.config.get("kl_coeff"):
        penalty = torch.where(mask, step.config["kl_coeff"] * step.of_tokens("kl"), 0.0)
        changed["KL left out"], changed["sign of the KL"] = of(rewards + penalty), of(rewards + 2 * penalty)
    faults = {"whitened per sequence": Formula(by_row, meant["whitened gae"].error)}
    for name, made in changed.items():
        faults |= {name: made["gae"], f"{name}, whitened": made["whitened gae"]}
    found = torch.where(mask, step.of_tokens("advantages"), 0.0)
    return judge("advantages", found, Known(meant, faults), list(meant), "gamma, lambd")
