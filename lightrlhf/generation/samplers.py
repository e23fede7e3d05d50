"""Samplers for programs that learn from texts: the engine of this process, or rollout servers.

Such a program needs the responses alone. What servers sampled with is still compared with the weights of this process,
on the first responses of each version, and refused where it differs; not of greedy or truncated sampling.

Left out: importance weights, which need all log-probabilities (see `rollout_sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor

from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.rollout import gap_metrics, measure_gap, refuse_gap, sampled_batch, score_logprobs
from lightrlhf.generation.served import CHECKED_ROWS, Request, ServedPolicy
from lightrlhf.models.roles import Policy
from lightrlhf.models.sharding import gather_shards
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.training.run import Metrics, Run


class Sampler(Protocol):
    """Answers prompts."""

    def __call__(self, prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        """A response to each prompt by noise (B, max_new_tokens); None when no rank has a prompt left.

        Ranks that share servers call it equally often, those that are done with no prompts.
        """


def local_sampler(policy: Policy, tokenizer: Tokenizer, args: SamplingArgs, num_slots: int) -> Sampler:
    """The engine of this process."""
    ends = end_ids(tokenizer, policy.model)

    def sample(prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        return generate(policy, prompts, args, ends, noise, num_slots, tokenizer) if prompts else None

    return sample


class ServedSampler:
    """The servers of `--rollout_server`, with the weights that a policy has at the run's step.

    run: None for a policy that does not learn; then `close` must be called.
    Raises: RunFailure when a server cannot be used, or samples from other probabilities than the policy's; UsageError
    when the exchange folder cannot be written.
    """

    def __init__(self, args: Any, policy: Policy, tokenizer: Tokenizer, run: Run[Any] | None = None) -> None:
        self.policy, self.tokenizer, self.run = policy, tokenizer, run
        self.served = ServedPolicy(args, policy, tokenizer, run)
        self.metrics: Metrics = {}  # of the gap at the step `checked`
        self.checked: int | None = None

    def __call__(self, prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        """As `Sampler`."""
        completions = self.served.sample_any(Request(list(prompts), noise))
        if completions is not None and self.checked != self.served.step and is_whole(self.served.args):
            self._check(prompts, completions)
            self.checked = self.served.step
        return completions

    def _check(self, prompts: Sequence[list[int]], completions: Completions) -> None:
        """Compare the first responses of each rank with a forward pass."""
        args, rows = self.served.args, slice(0, CHECKED_ROWS)
        columns = (completions.responses[rows], completions.logprobs[rows], completions.truncated[rows])
        first = Completions(*columns, removed_mass=0.0)
        batch = sampled_batch(prompts[rows], first, self.tokenizer.pad_token_id)
        with gather_shards(self.policy), self.run.autocast() if self.run else nullcontext():
            scored = score_logprobs(self.policy, batch, args.temperature, CHECKED_ROWS)  # (B, T-1)
        sampled = measure_gap(batch, scored, args.sampling_correction)
        self.metrics = gap_metrics(self.served.ranks, sampled, args)
        refuse_gap(self.served, sampled)

    def use(self, args: Any) -> ServedSampler:
        """This sampler with other flags, such as another temperature."""
        self.served.args = args
        return self

    def close(self) -> None:
        """Cancel pending requests."""
        self.served.close()


def is_whole(args: SamplingArgs) -> bool:
    """Whether responses are samples of the policy's own distribution, of which log-probabilities can be compared."""
    return (args.do_sample, args.top_k, args.top_p, args.min_p, args.repetition_penalty) == (True, 0, 1.0, 0.0, 1.0)
