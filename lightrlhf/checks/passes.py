"""Log-probabilities in a batch against each row passed alone, and samples against the distribution they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.checks.logprobs import compare, pass_error
from lightrlhf.checks.step import Missing, Step
from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict

LARGEST_Z = 8.0  # standard errors; 1e-15 for a normal sum, and far out for one with the tail of log-probabilities
LEAST_TOKENS = 40  # for a sum that is nearly normal
PAIRS = (("new_logprobs", "alone_logprobs"), ("old_logprobs", "alone_logprobs"), ("ref_logprobs", "alone_ref_logprobs"))


def check_passes(step: Step) -> Verdict:
    """Log-probabilities in a batch equal each row's by itself: no padding, packing, dropout or scale in them."""
    given = [pair for pair in PAIRS if all(one in step for one in pair)]
    if "new_logprobs" in step:
        given = [pair for pair in given if pair[0] != "old_logprobs"]
    right = None
    for first, second in given:
        verdict = _check_pair(step, first, second)
        if verdict.says == WRONG:
            return verdict
        right = verdict if verdict.says == RIGHT else right or verdict
    if "ref_sum" in step and "alone_ref_logprobs" in step:
        right = _check_sums(step)
    if right is None:
        raise Missing("alone_logprobs, and new_logprobs or old_logprobs")
    return right


def _check_pair(step: Step, first: str, second: str) -> Verdict:
    dropout = float(step.config.get("ref_dropout" if first.startswith("ref") else "dropout") or 0.0)
    if dropout and step.config.get("method") == "sft":
        return Verdict("passes", CANNOT_TELL, evidence="needs a pass without dropout")
    verdict = compare(step, "passes", first, second)
    if verdict.says == RIGHT or verdict.fault != "ratio not 1 at the first pass":
        return verdict
    trained, error = step.mask(), pass_error(step)
    gaps = (step.of_tokens(first) - step.of_tokens(second)).abs()
    if "plain_logprobs" in step and _mean(gaps, trained) > error:
        plain = (step.of_tokens(first) - step.of_tokens("plain_logprobs")).abs()
        if _mean(plain, trained) <= error:
            return verdict._replace(fault="temperature not applied", causes=(), look_at="temperature")
    if dropout:
        return verdict._replace(fault="dropout on in one of the passes", causes=(), look_at="disable_dropout")
    return _place(step, verdict, gaps, trained, error)


def _mean(values: Tensor, where: Tensor) -> float:
    return float(values[where].mean()) if bool(where.any()) else 0.0


def _place(step: Step, verdict: Verdict, gaps: Tensor, trained: Tensor, error: float) -> Verdict:
    """The fault by the rows that it is in."""
    bad = torch.stack([torch.tensor(_mean(*one) > error) for one in zip(gaps, trained)])  # (B,)
    causes: tuple[str, ...]
    if verdict.look_at.startswith("ref"):
        causes = ("stored for other rows", "an adapter is on in the reference", "weights of another version")
        return verdict._replace(fault="reference of other weights or rows", causes=causes, look_at="ref_model")
    if step.config.get("packed") and not bool(bad.all()):
        causes = ("no mask between the texts of a packed row", "attention that ignores position_ids")
        return verdict._replace(fault="texts of a packed row see each other", causes=causes, look_at="packing")
    if "attention_mask" in step:
        attended = step.attended()
        padded = ~attended[:, 0] & attended.any(1)
        if bool(padded.any()) and bool((bad <= padded).all()):
            causes = ("attention to padding", "positions that count padding")
            return verdict._replace(fault="padding changes the pass", causes=causes, look_at="attention_mask")
    causes = ("another temperature", "weights of another version", "another mask of attention", "logits one place off")
    return verdict._replace(fault="pass differs from its rows alone", causes=causes)


def _check_sums(step: Step) -> Verdict:
    """Sums that were stored before the run, against the reference now."""
    trained, stored = step.mask(), step.get("ref_sum")
    values = torch.where(trained, step.of_tokens("alone_ref_logprobs"), 0.0).sum(1)
    error = pass_error(step) * trained.sum(1).clamp(min=1)
    gap = (stored - values).abs()
    evidence = f"stored sums - reference now: {float(gap.max()):.3g} at most"
    if bool((gap <= error).all()):
        return Verdict("passes", RIGHT, evidence=evidence)
    for shift in range(1, len(gap)):
        if bool(((stored - values.roll(shift)).abs() <= error.max()).all()):
            return Verdict("passes", WRONG, "rows misaligned", evidence, ("stored for other rows",), "ref_logps")
    lengths = trained.sum(1).clamp(min=1)
    if bool(((stored - values / lengths).abs() <= error).all()):
        return Verdict("passes", WRONG, "means in place of sums", evidence, (), "ref_logps")
    causes = ("stored for other rows", "stored by other weights", "another mask", "dropout")
    return Verdict("passes", WRONG, "reference of other weights or rows", evidence, causes, "ref_logps")


def check_samples(step: Step) -> Verdict:
    """The log-probabilities of sampled tokens are as likely as draws from the policy make them."""
    step.need("alone_logprobs", "alone_entropy", "alone_spread", "temperature")
    if step.is_cut():
        raise Missing("top_p 1, top_k 0 and min_p 0: the samples are of a part of the vocabulary")
    trained = step.mask()
    excess = (step.of_tokens("alone_logprobs") + step.of_tokens("alone_entropy"))[trained]
    spread = float(step.of_tokens("alone_spread")[trained].sum())
    if len(excess) < LEAST_TOKENS or spread <= 0:
        raise Missing(f"{LEAST_TOKENS} sampled tokens with several choices")
    z = float(excess.sum()) / spread**0.5
    evidence = f"mean log-probability is {float(excess.mean()):+.3g} off its expected one, {z:+.1f} standard errors"
    if abs(z) <= LARGEST_Z:
        return Verdict("samples", RIGHT, evidence=evidence)
    if z > 0:
        causes: tuple[str, ...] = (
            "greedy sampling",
            "a lower temperature",
            "top_p or top_k that the settings do not say",
        )
        return Verdict(
            "samples", WRONG, "samples too likely for the policy", evidence, causes, "temperature, top_p, top_k"
        )
    causes = ("a higher temperature", "samples of other weights", "tokenised again", "another prompt")
    return Verdict("samples", WRONG, "samples too unlikely for the policy", evidence, causes, "temperature")
