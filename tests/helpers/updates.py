"""Exact models and plain gradient descent, for tests that write a program's update in float64 from its paper."""

import copy

import torch
from torch import Tensor, nn

from helpers import KeptGradients, RunOfOneStep
from helpers.rollouts import rollout_of
from lightrlhf.data.batch import Batch, Rollout
from lightrlhf.models.roles import Policy


class Descent(KeptGradients):
    """Learners whose updates are steps of plain gradient descent, by `rate`."""

    rate: float

    def optimize(self, name: str) -> float:
        descend(self[name].module, self.rate)
        return 0.0

    def skip_updates(self, number: int) -> None:
        """There is no schedule."""


class RunOfSteps(RunOfOneStep):
    """As `RunOfOneStep`, of steps of plain gradient descent."""

    kind = Descent

    def __init__(self, args, rate: float, **modules) -> None:
        super().__init__(args, **modules)
        self.rate = self.learners.rate = rate


@torch.no_grad()
def descend(module: nn.Module, rate: float) -> None:
    """One step of gradient descent; removes the gradients."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= rate * parameter.grad
            parameter.grad = None


def exact(module: nn.Module) -> nn.Module:
    """A copy in float64."""
    return copy.deepcopy(module).double()


def exact_logprobs(policy: Policy, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """log pi of each token of a response by one pass over its row alone, without padding: (tokens, V) -> (tokens,)."""
    return _distributions(policy, prompt, response, temperature).gather(1, torch.tensor(response)[:, None])[:, 0]


def exact_entropy(policy: Policy, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Entropy of the policy before each token of a response: (tokens,)."""
    logprobs = _distributions(policy, prompt, response, temperature)
    return -(logprobs.exp() * logprobs).sum(1)


@torch.no_grad()
def sampled_by_others(policy: Policy, prompts, responses, truncated, temperature: float) -> tuple[Rollout, Tensor]:
    """A rollout of other weights than the policy's, so that ratios are not 1, and weights as where servers sampled."""
    torch.manual_seed(2)
    rollout = rollout_of(prompts, responses, truncated=truncated)
    mask, noise = rollout.action_mask, torch.randn(2, *rollout.action_mask.shape)
    for row, response in enumerate(zip(prompts, responses)):
        rollout.logprobs[row][mask[row]] = exact_logprobs(policy, *response, temperature)
    rollout.ref_logprobs = torch.where(mask, rollout.logprobs + 0.5 * noise[0], 0.0)
    rollout.logprobs = torch.where(mask, rollout.logprobs + 0.2 * noise[1], 0.0)
    return rollout, torch.where(mask, 0.25 + 1.5 * torch.rand(mask.shape), 0.0)


def numbers_in(rollout: Rollout, correction: Tensor, row: int) -> list[list[float]]:
    """Of each token of a response its log-probabilities under policy and reference, and its weight."""
    columns = (rollout.logprobs, rollout.ref_logprobs, correction)
    return [column[row][rollout.action_mask[row]].tolist() for column in columns]


def _distributions(policy: Policy, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    logits = policy.model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)  # (tokens, V)


def observation_losses(policy: Policy, batch: Batch, temperature: float) -> Tensor:
    """-log pi of each token between the turns of a row, but the one right behind a turn: (N,), a row at a time."""
    losses = []
    for ids, mask, sampled in zip(batch.input_ids, batch.attention_mask, batch.action_mask.tolist()):
        ids = ids[mask]
        logprobs = (policy.model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        behind = sampled.index(True) + 1 if True in sampled else len(ids)
        places = [t for t in range(behind, len(ids) - 1) if not sampled[t] and not sampled[t - 1]]
        losses += [-logprobs[t, ids[t + 1]] for t in places]
    return torch.stack(losses)


def changes(before: nn.Module, after: nn.Module, rate: float) -> dict[str, Tensor]:
    """The sum of the gradients that led from one to the other, by name of the parameter."""
    old = dict(before.named_parameters())
    return {name: (old[name] - p).detach().double() / rate for name, p in after.named_parameters()}
