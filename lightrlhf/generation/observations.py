"""Cross-entropy of observations as a term of a policy's loss (`--observation_weight`): what the environment answers.

An observation's tokens stand behind the first turn of a row and were not sampled, the template's marks among them. The
token right behind a turn does not count: where a limit cut the turn, the policy did not write this end. The prompt of a
row carries no loss, nor do observations of episodes that are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.data.batch import Batch
from lightrlhf.models.roles import policy_inputs
from lightrlhf.training.run import Metrics, Run


def observed(batch: Batch) -> Tensor:
    """Mask of the observations' tokens, as an action mask: (B, T-1) bool."""
    actions = batch.action_mask
    is_behind = actions.cumsum(1) > 0  # (B, T-1)
    follows = torch.zeros_like(actions)
    follows[:, 1:] = actions[:, :-1]
    return batch.attention_mask[:, 1:] & ~actions & is_behind & ~follows


class Term:
    """The cross-entropy of a mini-batch's observations, at the sampling temperature, beside another loss."""

    total: Tensor  # () of the micro-batch that was read last; times `coeff`, divided by `count` it is the loss

    def __init__(self, run: Run[Any], minibatch: Batch) -> None:
        self.ranks, self.coeff = run.ranks, float(run.args.observation_weight)
        self.count = max(self.ranks.total(int(observed(minibatch).sum())), 1.0)  # of all ranks
        self.sum = torch.zeros((), device=run.device)

    def read(self, model: nn.Module, micro: Batch, **options: Any) -> Any:
        """`TokenStats` of actions and observations of a micro-batch, whose cross-entropy is `total` from now on."""
        mask = observed(micro.on_host)
        stats = model(**policy_inputs(micro) | {"action_mask": micro.on_host.action_mask | mask}, **options)
        self.total = -stats.logprobs[mask.to(stats.logprobs.device)].sum()
        self.sum += self.total.detach()
        return stats

    def metrics(self) -> Metrics:
        """The mean cross-entropy over the observations of all ranks."""
        return {"policy/observation_loss": float(self.ranks.sum(self.sum)) / self.count}
