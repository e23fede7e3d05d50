"""Samplers: who answers prompts, the engine of this process or rollout servers, for programs that learn from texts.

Such a program needs the responses alone. What servers sampled with is still compared with the weights of this process,
on the first responses of each version, and refused where it differs; not of greedy or truncated sampling.

Left out: importance weights, which need all log-probabilities (see `rollout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.batch import SampledBatch, response_batch
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.rollout import gap_metrics, old_logprobs, refuse_gap
from lightrlhf.generation.served import CHECKED_ROWS, ServedPolicy
from lightrlhf.models.roles import Policy
from lightrlhf.models.sharding import unsharded
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.training.run import Metrics


class Sampler(Protocol):
    """Answers prompts."""

    def __call__(self, prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        """A response to each prompt by noise (B, max_new_tokens); None when no rank has a prompt left.

        Ranks that share servers call it equally often, those that are done with no prompts.
        """


def local_sampler(policy: Policy, tokenizer: Any, args: SamplingArgs, num_slots: int) -> Sampler:
    """The engine of this process."""
    ends = end_ids(tokenizer, policy.model)

    def sample(prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        return generate(policy, prompts, args, ends, noise, num_slots, tokenizer) if prompts else None

    return sample


class ServedSampler:
    """The servers of `--rollout_server`, with the weights that a policy has at the run's step.

    Raises: RunFailure when a server cannot be used, or samples from other probabilities than the policy's; UsageError
    when the exchange folder cannot be written.
    """

    def __init__(self, run: Any, policy: Policy, tokenizer: Any) -> None:
        self.run, self.policy, self.tokenizer = run, policy, tokenizer
        self.served = ServedPolicy(run, policy, tokenizer)
        self.metrics: Metrics = {}  # of the gap at the step `checked`
        self.checked: int | None = None

    def __call__(self, prompts: Sequence[list[int]], noise: Tensor) -> Completions | None:
        """As `Sampler`."""
        if not self.run.total(len(prompts)):
            return None
        completions, _ = self.served.sample(prompts, noise)
        if self.checked != self.run.step and is_whole(self.run.args):
            self._check(prompts, completions)
            self.checked = self.run.step
        return completions

    def _check(self, prompts: Sequence[list[int]], completions: Completions) -> None:
        """Compare the first responses of each rank with a forward pass."""
        rows = slice(0, CHECKED_ROWS)
        columns = (completions.responses[rows], completions.logprobs[rows], completions.truncated[rows])
        first = Completions(*columns, removed_mass=0.0)
        batch = response_batch(prompts[rows], first.responses, self.tokenizer.pad_token_id)
        batch = batch.to(next(self.policy.parameters()).device)
        with unsharded(self.policy), self.run.autocast():
            logprobs, gap = old_logprobs(self.policy, batch, first, self.run.args, CHECKED_ROWS, is_served=True)
        sampled = batch.extend(SampledBatch, logprobs=logprobs, sampling_gap=gap)
        self.metrics = gap_metrics(self.run, sampled)
        refuse_gap(self.run, sampled, self.served)


def is_whole(args: SamplingArgs) -> bool:
    """Whether responses are samples of the policy's own distribution, of which log-probabilities can be compared."""
    return (args.do_sample, args.top_k, args.top_p, args.min_p, args.repetition_penalty) == (True, 0, 1.0, 0.0, 1.0)


class Alone:
    """What servers need of a run, in a program without one: a process that samples from weights that do not change."""

    world_size, rank, step, is_first = 1, 0, 0, True
    precision = "32-true"  # as frozen models are loaded
    dry = None

    def __init__(self, args: Any) -> None:
        self.args, self.directory = args, Path()  # where nothing is written: merged weights have no base
        self.endings: list[Callable[[], None]] = []

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def full(self, module: Any) -> Any:
        return module

    def total(self, value: float) -> float:
        return float(value)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return value

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_end(self, end: Callable[[], None]) -> None:
        self.endings.append(end)

    def close(self) -> None:
        """End what was opened."""
        for end in self.endings:
            end()
