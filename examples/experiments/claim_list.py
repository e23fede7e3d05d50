"""The claims that papers make, beside the experiment that tests each here; written down before the runs that are kept.

A figure of a paper stands here only where it was read in the paper's abstract, its repository or a text that quotes it;
`says` is the claim alone elsewhere. `Earlier` figures are those of the pages before raw rows were kept.

Left out: claims about speed and memory (howto/speed.md), and those that an experiment here was not made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from examples.experiments.readings import Gap, Read, each, equal_kl
from examples.experiments.records import Row
from examples.experiments.stats import restricted

LIMIT = 60  # rollouts of a run on letters


class Earlier(NamedTuple):
    """What a page reported of a difference, over so many seeds; the rows were not kept."""

    n: int
    gap: Gap


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That an arm is better than a control, in one measure of one experiment.

    where: values of columns that choose the experiment's rows. matched: a second control with the same horizon; where
    the arm is better than the first control alone, the claim holds only at the same lambda.
    """

    says: str
    measure: str
    experiment: str
    arm: str
    control: str
    read: Read
    where: Mapping[str, Any] = field(default_factory=dict)
    matched: str | None = None
    less_is_better: bool = False
    digits: int = 3
    earlier: Earlier | None = None
    earlier_matched: Earlier | None = None


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper, what it reports and in which setting, and what of it is tested here."""

    title: str
    source: str
    reports: str
    commands: tuple[str, ...]
    page: str  # from howto/, where more is said of the experiment
    claims: tuple[Claim, ...]
    not_measurable: tuple[str, ...] = ()


def column(name: str) -> Read:
    """The value of a column."""
    return each(lambda row: float(row[name]))


def result(name: str) -> Read:
    """A value of the column `result`."""
    return each(lambda row: float(row["result"][name]))


def success(iterations: int) -> Read:
    """Sampled success on held-out starts after so many iterations; of an arm without RL its only one."""

    def value(row: Row) -> float:
        by_iteration = {one["iterations"]: one["success"] for one in row["results"]}
        return float(by_iteration.get(iterations, row["results"][-1]["success"]))

    return each(value)


rollouts = each(lambda row: restricted([row["rollouts"]], LIMIT)[0])
last_turn = each(lambda row: float(row["scores"][-1]))
gold_at_end = each(lambda row: float(row["curve"][-1]["gold"]))
