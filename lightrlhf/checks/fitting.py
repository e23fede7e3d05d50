"""Which known formula fits recorded numbers, within the rounding of those numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict

ROUNDINGS = 16  # operations between an input and a result, each with a relative error of one unit


class Formula(NamedTuple):
    """Values that a formula gives, and the largest error that rounding may make in them; both of one shape."""

    values: Tensor
    error: Tensor


class Known(NamedTuple):
    """Formulas by name: what people mean, and what faults make of it."""

    meant: Mapping[str, Formula]
    faults: Mapping[str, Formula]


def fits(found: Tensor, formula: Formula) -> bool:
    """Whether numbers are a formula's within rounding; where both are NaN they agree."""
    gap = (found - formula.values).abs()
    return bool(((gap <= formula.error) | (found.isnan() & formula.values.isnan())).all())


def judge(name: str, found: Tensor, known: Known, expected: Sequence[str], look_at: str, rows: str = "row") -> Verdict:
    """The verdict of a check that recomputes numbers.

    expected: names of the formulas that the settings allow; empty where they name none, then any that people mean is
    right, and a formula of the user's is not judged.
    """
    wanted = {one: known.meant[one] for one in expected} or known.meant
    if fit := [one for one, formula in wanted.items() if fits(found, formula)]:
        return Verdict(name, RIGHT, evidence=f"{' or '.join(fit)}, to rounding", look_at=look_at)
    others = {one: formula for one, formula in known.meant.items() if one not in wanted} | dict(known.faults)
    fit = [one for one, formula in others.items() if fits(found, formula)]
    if not expected and not fit:
        return Verdict(name, CANNOT_TELL, evidence=f"no known formula fits, and {look_at} is not given")
    nearest = min(wanted, key=lambda one: float((found - wanted[one].values).abs().nan_to_num(torch.inf).max()))
    gap = _describe(found, wanted[nearest], nearest, rows)
    if not fit:
        return Verdict(name, WRONG, "differs from every known formula", gap, ("a formula of one's own",), look_at)
    return Verdict(name, WRONG, fit[0], gap, tuple(fit) if len(fit) > 1 else (), look_at)


def _describe(found: Tensor, formula: Formula, name: str, rows: str) -> str:
    """The number that is furthest off, in words."""
    over = ((found - formula.values).abs() - formula.error).nan_to_num(torch.inf).flatten()
    worst = int(over.argmax())
    number = f"{rows} {worst}: " if found.ndim else ""
    if found.ndim == 2:
        number = f"{rows} {worst // found.shape[1]} token {worst % found.shape[1]}: "
    got, want = float(found.flatten()[worst]), float(formula.values.flatten()[worst])
    many = f"; {int((over > 0).sum())} of {over.numel()} differ" if over.numel() > 1 else ""
    return f"{number}found {got:.6g}, {name} gives {want:.6g}{many}"
