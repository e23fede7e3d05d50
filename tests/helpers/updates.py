"""Exact models and plain gradient descent, for tests that write a program's update in float64 from its paper."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from helpers import RunOfOneStep
from lightrlhf.models.roles import Policy


class RunOfSteps(RunOfOneStep):
    """A stand-in for `Run` whose optimisers are plain gradient descent."""

    def __init__(self, args, rate: float, **modules) -> None:
        super().__init__(args, **modules)
        self.rate = rate

    def optimize(self, name: str) -> float:
        descend(self.modules[name], self.rate)
        return 0.0

    def skip_updates(self, number: int) -> None:
        """There is no schedule."""


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


def _distributions(policy: Policy, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    logits = policy.model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)  # (tokens, V)


def changes(before: nn.Module, after: nn.Module, rate: float) -> dict[str, Tensor]:
    """The sum of the gradients that led from one to the other, by name of the parameter."""
    old = dict(before.named_parameters())
    return {name: (old[name] - p).detach().double() / rate for name, p in after.named_parameters()}
