"""Pairs of DPO: their loss in float64 with one fault each, and rows that belong together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.checks.step import Missing, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.maths import preference

Total = Callable[[Tensor], Tensor]  # log-probabilities (B, T), or their sums (B,), to the loss
BETAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)  # that people set


class Sums(NamedTuple):
    """How pairs are made of rows, the chosen ones first; a fault changes one."""

    mask: Tensor | None  # (B, T); None: rows are sums
    lengths: Tensor  # (B,)
    ref: Tensor  # as the new log-probabilities, or their sums (B,)
    loss: str
    beta: float
    smoothing: float
    weights: Tensor  # of pairs, (B/2,)
    is_mean: bool = False
    swapped: bool = False


def pair_total(sums: Sums, new: Tensor) -> Tensor:
    """The scalar loss of pairs, a weighted sum."""
    rows = []
    for values in (new, sums.ref):
        row = values if sums.mask is None or values.ndim == 1 else torch.where(sums.mask, values, 0.0).sum(1)
        rows.append(row / sums.lengths if sums.is_mean else row)
    half = len(new) // 2
    first, second = (slice(half, None), slice(half)) if sums.swapped else (slice(half), slice(half, None))
    policy, ref = rows
    pairs = preference.Pairs(
        policy_chosen_logps=policy[first],
        policy_rejected_logps=policy[second],
        ref_chosen_logps=ref[first],
        ref_rejected_logps=ref[second],
        beta=sums.beta,
        chosen_lengths=sums.lengths[first],
        rejected_lengths=sums.lengths[second],
        label_smoothing=sums.smoothing,
    )
    return (preference.LOSSES[sums.loss](pairs) * sums.weights).sum()


def pair_totals(step: Step) -> tuple[dict[str, Total], dict[str, Total]]:
    """The mean loss of pairs, or the mean over passes of their means, and it with one fault each."""
    step.need("new_logprobs", "beta")
    config, new = step.config, step.get("new_logprobs")
    ref = step.get("ref_sum" if "ref_sum" in step and "ref_logprobs" not in step else "ref_logprobs")
    kind = config.get("loss_type") or "sigmoid"
    if kind not in preference.LOSSES or kind in preference.SOFT_LABEL_LOSSES:
        raise Missing(f"a known loss_type, not {kind}")
    if new.shape != ref.shape and ref.ndim > 1:
        raise Missing("new_logprobs and ref_logprobs of one shape")
    if len(new) % 2:
        raise Missing("rows of pairs: first the chosen ones, then as many rejected ones")
    mask = None if new.ndim == 1 else step.mask()
    lengths = step.mask().sum(1).double() if "loss_mask" in step else torch.ones(len(new)).double()
    count, passes = len(new) // 2, 1
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    of_passes = weights
    if "micro_batch" in step:
        place = step.whole("micro_batch")[:count]
        passes = int(place.max()) + 1
        of_passes = 1 / (passes * torch.bincount(place)[place].double())
    sums = Sums(mask, lengths, ref, kind, float(config["beta"]), float(config.get("label_smoothing") or 0.0), weights)
    meant = {f"{kind} of pairs": sums, f"{kind} of pairs, mean of passes": sums._replace(weights=of_passes)}
    ways = pair_faults(step, sums, passes)
    return {n: partial(pair_total, one) for n, one in meant.items()}, {
        n: partial(pair_total, one) for n, one in ways.items()
    }


def pair_faults(step: Step, sums: Sums, passes: int) -> dict[str, Sums]:
    """Pairs with one fault each."""
    ref, weights, mask = sums.ref, sums.weights, sums.mask
    scales = {"sign": -1.0, "sum in place of mean": len(weights), "divided by rows, not pairs": 0.5}
    if passes > 1:
        scales |= {"not divided by the passes": passes, "divided by the passes twice": 1 / passes}
    ways = {
        "without the reference": sums._replace(ref=torch.zeros_like(ref)),
        "chosen and rejected exchanged": sums._replace(swapped=True),
        "reference of other rows": sums._replace(ref=ref.roll(1, 0)),
        "reference exchanged": sums._replace(ref=ref.roll(len(ref) // 2, 0)),
        "beta of 1": sums._replace(beta=1.0),
        "beta twice": sums._replace(beta=sums.beta**2),
        **{name: sums._replace(weights=weights * scale) for name, scale in scales.items()},
        "no label smoothing" if sums.smoothing else "label smoothing 0.1": sums._replace(
            smoothing=0.0 if sums.smoothing else 0.1
        ),
    }
    ways |= {f"beta of {one}": sums._replace(beta=one) for one in BETAS if one != sums.beta}
    if "loss_mask" in step:
        ways["means in place of sums"] = sums._replace(is_mean=True)
        ways["sums in place of means"] = sums._replace(lengths=torch.ones_like(sums.lengths))
    if mask is not None and "attention_mask" in step:
        every = step.attended().clone()
        every[:, 0] = False
        ways["prompt tokens counted"] = sums._replace(mask=every)
        padded = torch.ones_like(every)
        padded[:, 0] = False
        ways["padding counted"] = sums._replace(mask=padded)
        ways["response and padding counted"] = sums._replace(mask=mask | (padded & ~every))
        ways["mask one late"] = sums._replace(mask=mask.roll(1, 1))
        ways["mask one early"] = sums._replace(mask=mask.roll(-1, 1))
        first, last = mask & (mask.cumsum(1) == 1), mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        ways["first token not counted"] = sums._replace(mask=mask & ~first)
        ways["last token not counted"] = sums._replace(mask=mask & ~last)
    skipped = preference.SOFT_LABEL_LOSSES
    return ways | {
        f"loss {name}": sums._replace(loss=name) for name in preference.LOSSES if name not in {sums.loss, *skipped}
    }


def check_pairs(step: Step) -> Verdict:
    """Pairs: chosen rows first, of the same prompts, whose responses differ and are trained where they do."""
    if step.config.get("method") != "dpo":
        raise Missing("pairs, of method dpo")
    step.need("input_ids", "loss_mask")
    half = len(step.get("input_ids")) // 2
    attended = step.attended() if "attention_mask" in step else step.mask() | True
    rows = [row[on].tolist() for row, on in zip(step.whole("input_ids"), attended)]
    starts = [int((row & on).long().cumsum(0).eq(0)[on].sum()) for row, on in zip(step.mask(), attended)]  # untrained
    texts = [
        tuple(token for token, is_on in zip(row, mask) if is_on)
        for row, mask in zip(step.whole("input_ids").tolist(), step.mask().tolist())
    ]
    pairs = [(row, row + half) for row in range(half)]
    cut = step.get("truncated") > 0 if "truncated" in step else torch.zeros(2 * half, dtype=torch.bool)
    same = [a for a, b in pairs if texts[a] == texts[b] and not bool(cut[a] & cut[b])]
    if same:
        return _pairs_wrong("chosen and rejected are the same", same, half, "one column read twice")
    if "side" in step and "half" in step:
        known = ~step.get("side").isnan()
        turned = (known & (step.get("side") == step.get("half"))).nonzero()[:, 0].tolist()
        if turned:
            return _pairs_wrong(
                "chosen and rejected exchanged", [one % half for one in turned], half, "columns exchanged"
            )
    prompts = [row[:start] for row, start in zip(rows, starts)]
    if "prompt_len" in step:
        before = step.attended() & ~step.responses()
        prompts = [row[on].tolist() for row, on in zip(step.whole("input_ids"), before)]
    other = [a for a, b in pairs if prompts[a] != prompts[b] and not bool(cut[a] | cut[b])]
    if other:
        late = all(
            prompts[a][:-1] == prompts[b][:-1] and len(prompts[a]) == len(prompts[b]) for a in other for b in [a + half]
        )
        fault = "mask one late" if late and "prompt_len" not in step else "prompts of a pair differ"
        return _pairs_wrong(fault, other, half, "rows misaligned")
    return Verdict("pairs", RIGHT, evidence=f"{half} pairs")


def _pairs_wrong(fault: str, rows: list[int], half: int, cause: str) -> Verdict:
    return Verdict("pairs", WRONG, fault, f"{len(rows)} of {half} pairs, first {rows[0]}", (cause,), "data")
