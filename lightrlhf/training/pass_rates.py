"""A curriculum by pass rate: prompts that are always or never solved are drawn less.

A group of 0/1 scores has a gradient in proportion to its deviation, which is 0 where all responses pass or none does.
So a step draws different prompts in proportion to p (1 - p) (Foster et al. 2025, 2502.12272). Here p is the mean of
Beta(1 + passes, 1 + failures), and a prompt's counts are halved before new ones are added, for the policy changes. A
prompt that was not drawn yet has p = 1/2; one of which all K responses always pass keeps about 2 / K of its weight, so
that it is seen again. Evaluation goes through all prompts alike.

Left out: prompts that come once alone, of which there is nothing to learn from their own past.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DrawnDataArgs
from lightrlhf.data.batch import Rollout
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.run import Metrics, Run

MEMORY = 0.5  # share of a prompt's counts that is left when it is drawn again


class PassRates:
    """The pass rates of N prompts, the same on all ranks.

    score: from which a response passes; counts: (N, 2) float64, passes and responses.
    """

    def __init__(self, score: float, counts: Tensor) -> None:
        self.score, self.counts = score, counts

    def weights(self) -> Tensor:
        """4 p (1 - p) of each prompt: (N,) float64, in (0, 1]."""
        passes, responses = self.counts.unbind(1)
        rate = (passes + 1) / (responses + 2)
        return 4 * rate * (1 - rate)

    def draw(self, size: int, generator: torch.Generator) -> list[int]:
        """Numbers of `size` different prompts."""
        drawn: list[int] = torch.multinomial(self.weights(), size, generator=generator).tolist()
        return drawn

    def update(self, rollout: Rollout, total: Tensor, ranks: Ranks) -> Metrics:
        """Count a rollout's responses, an episode once, by their scores (B,), NaN where missing; returns metrics."""
        assert rollout.row is not None
        known = rollout.ends() & ~total.isnan()
        passed = total[known] >= self.score
        fresh = torch.zeros_like(self.counts)  # (N, 2)
        fresh.index_add_(0, rollout.row[known], torch.stack([passed, torch.ones_like(passed)], 1).to(fresh))
        fresh = ranks.sum(fresh)
        again = fresh[:, 1:] > 0
        self.counts = torch.where(again, MEMORY * self.counts, self.counts) + fresh
        weights = self.weights()
        spread = float(weights.sum() ** 2 / weights.square().sum()) / len(weights)
        return {"curriculum/seen": float((self.counts[:, 1] > 0).double().mean()), "curriculum/spread": spread}


def make_pass_rates(run: Run[Any], num_prompts: int) -> PassRates | None:
    """The pass rates of a run with `--curriculum_score`, as its checkpoint has them. Raises: UsageError."""
    args = run.args
    if not isinstance(args, DrawnDataArgs) or args.curriculum_score is None:
        return None
    size = run.args.rollout_size * run.ranks.world_size
    if num_prompts <= size:
        raise UsageError(
            f"--curriculum_score {args.curriculum_score:g} chooses {size} of {num_prompts} prompts for a step; "
            "give more prompts, or a smaller --rollout_size"
        )
    stored: Mapping[str, Any] = run.resumed["extra"] if run.resumed else {}
    return PassRates(args.curriculum_score, stored.get("pass_rates", torch.zeros(num_prompts, 2, dtype=torch.float64)))
