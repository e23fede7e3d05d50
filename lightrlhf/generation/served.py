"""The policy of a run on rollout servers: sampling there, learning here.

Before a rollout the weights are written to the exchange folder and loaded by the servers, unless they have the step's
weights already. At `--max_staleness 1` the next rollout is requested as soon as this one arrives, so it is sampled by
weights one step older during this update; replacement groups use the current weights. Only the first rank
talks to servers: it samples for all ranks.

Left out: an age of more than one step, and rollouts that are cut and continued by newer weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure, ServersGone, UsageError
from lightrlhf.data.batch import SampledBatch
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.exchange import Exchange, choose_root, version_bytes
from lightrlhf.generation.server_pool import RolloutServers
from lightrlhf.generation.vllm import Target
from lightrlhf.maths.sampling_gap import gap_size
from lightrlhf.models.quantisation import compute_dtype
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tied import would_untie
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.training.ranks import LocalRanks
from lightrlhf.training.run import Run

Result = TypeVar("Result")
SLEEP = "LIGHTRLHF_SERVER_SLEEP"  # environment variable for a server that shares the accelerator with the trainer
CHECKED_ROWS = 8  # responses that servers score a second time where a gap is found


class Request(NamedTuple):
    """Prompts to answer, one response each, and the random numbers to sample them with."""

    prompts: list[list[int]]
    noise: Tensor  # (B, max_new_tokens) uniform


class Ahead(NamedTuple):
    """A request that servers answer while the rollout before it is learned from."""

    request: Request  # of all ranks
    step: int  # of the weights that sample it
    future: Future[Completions]


class ServedPolicy:
    """A policy that servers sample from.

    args: `SamplingArgs` and `ServerArgs`. run: the training, whose current weights servers get; without one weights
    never change, and `close` must be called. only_labels: responses are labels out of few allowed tokens.
    Raises: RunFailure when a server cannot be used, UsageError when the exchange folder cannot be written.
    """

    def __init__(
        self, args: Any, policy: Policy, tokenizer: Tokenizer, run: Run[Any] | None = None, only_labels: bool = False
    ) -> None:
        self.args, self.policy, self.run, self.only_labels = args, policy, run, only_labels
        self.ranks = run.ranks if run else LocalRanks()
        self.ends = end_ids(tokenizer, policy.model)
        self.step_of_servers: int | None = None  # whose weights they have
        self.ahead: Ahead | None = None  # on the first rank
        self.is_asleep = False
        self._on_first(self._connect)
        if run:
            run.on_end(self.close)

    @property
    def step(self) -> int:
        """Number of steps that the policy has learned."""
        return self.run.step if self.run else 0

    def sample(
        self, request: Request, ahead: Request | None = None, allowed: Sequence[list[int]] | None = None
    ) -> tuple[Completions, int]:
        """The responses to this rank's request, and how many steps old the weights were that sampled them.

        ahead: the request of the next call, which servers answer from now on; allowed: see `RolloutServers.start`.
        Raises: ServersGone, on all ranks, when no server is left.
        """
        ranks = self.ranks
        parts = ranks.gather(request)
        whole = join_requests(parts)
        allowed_of_all = None if allowed is None else [ids for own in ranks.gather(list(allowed)) for ids in own]
        is_ahead = self._on_first(lambda: self._is_ahead(whole))
        self._wake()
        if not is_ahead:
            self._publish()
        completions, step = self._on_first(
            lambda: self._take_ahead() if is_ahead else self._sample(whole, allowed_of_all)
        )
        parts_ahead = [one for one in ranks.gather(ahead) if one is not None]  # of all ranks, or of none
        if ahead is not None:
            self._publish()
            self._on_first(lambda: self._sample_ahead(join_requests(parts_ahead)))
        else:
            self.is_asleep = self._on_first(self._sleep)
        start = sum(len(own.prompts) for own in parts[: ranks.rank])
        mine = slice(start, start + len(request.prompts))
        columns = (completions.responses[mine], completions.logprobs[mine], completions.truncated[mine])
        return Completions(*columns, removed_mass=0.0), self.step - step

    def sample_any(self, request: Request, allowed: Sequence[list[int]] | None = None) -> Completions | None:
        """The responses to a request, of which a rank may have none; None when no rank has a prompt."""
        return self.sample(request, allowed=allowed)[0] if self.ranks.total(len(request.prompts)) else None

    def wait_for_others(self, allowed: Sequence[list[int]] | None = None) -> None:
        """Take part in what other ranks ask until none has a prompt left; allowed: empty where they give it."""
        while self.sample_any(Request([], torch.empty(0, self.args.max_new_tokens)), allowed):
            pass

    def publish(self) -> Target:
        """Give servers the weights of the current step, unless they have them; all ranks call it together."""
        self._publish()
        return self._on_first(lambda: cast(Target, self.servers.target))

    def leave_out(self, url: str, problem: Exception) -> None:
        """Leave a server out, which another client found to have failed, until it has the current weights again."""
        if self.ranks.is_first:
            self.servers.leave_out(url, problem)

    def room(self) -> float:
        """Tokens of a prompt and its response that all servers have positions for."""
        limits = self._on_first(lambda: [settings.get("max_model_len") for _, settings in self.servers.settings()])
        return min((limit for limit in limits if type(limit) is int), default=math.inf)

    def diagnose(self, rollout: SampledBatch, limit: float) -> str:
        """Likely causes of a gap between servers and trainer, and remedies; limit: KL per token."""
        return self._on_first(lambda: self._diagnosis(rollout, limit))

    def close(self) -> None:
        """Cancel pending requests, and remove the exchange folder."""
        if self.ranks.is_first:
            if self.is_asleep:
                with suppress(UsageError):
                    self.servers.sleep(False)
            self.servers.close()
            self.exchange.close()

    # --------------------------------------------------------------------------------------------------- weights
    def _publish(self) -> None:
        """Give servers the weights of the current step, unless they have them."""
        if self.step_of_servers == self.step:
            return
        with torch.autocast(self.policy.model.device.type, enabled=False):  # adapters are merged in full precision
            full = self.run.learners.full(self.policy) if self.run else self.policy
            self._on_first(lambda: self._load(full))
        self.step_of_servers = self.step

    def _load(self, full: Policy) -> None:
        if self.ahead is not None:  # no weights change under a rollout
            self.ahead.future.result()
        folder = self.run.files.directory if self.run and not self.run.dry else self.exchange.folder
        try:
            target = self.exchange.write(full, self.step, folder / "base", self.args.exchange_adapter)
        except UsageError as problem:
            raise ServersGone(str(problem)) from None
        self.servers.load(target)

    def _sleep(self) -> bool:
        """Have servers free their memory if LIGHTRLHF_SERVER_SLEEP is 1; returns whether they did."""
        if is_asked := os.environ.get(SLEEP) == "1":
            self.servers.sleep(True)
        return is_asked

    def _wake(self) -> None:
        if self.is_asleep:
            self._on_first(lambda: self.servers.sleep(False))
            self.is_asleep = False

    # -------------------------------------------------------------------------------------------------- sampling
    def _sample(self, request: Request, allowed: list[list[int]] | None) -> tuple[Completions, int]:
        future = self.servers.start(request.prompts, self.args, self.ends, request.noise, allowed)
        return future.result(), self.step

    def _sample_ahead(self, request: Request) -> None:
        future = self.servers.start(request.prompts, self.args, self.ends, request.noise)
        self.ahead = Ahead(request, self.step, future)

    def _is_ahead(self, request: Request) -> bool:
        """Whether the servers are working on exactly this request."""
        known = self.ahead and self.ahead.request
        return known is not None and known.prompts == request.prompts and torch.equal(known.noise, request.noise)

    def _take_ahead(self) -> tuple[Completions, int]:
        assert self.ahead is not None
        ahead, self.ahead = self.ahead, None
        return ahead.future.result(), ahead.step

    def _diagnosis(self, rollout: SampledBatch, limit: float) -> str:
        """Diagnose by the servers' settings, and by re-scoring the first responses without cached prefixes."""
        precision = str(compute_dtype(self.args)).removeprefix("torch.")
        for url, settings in self.servers.settings():
            dtype = str(settings.get("dtype", precision)).removeprefix("torch.")
            if dtype != precision:
                return f"{url} computes in {dtype}, this run in {precision}: start it with --dtype {precision}"
        if self.args.temperature != 1 or rollout.sampling_gap is None or self.only_labels:  # servers score whole texts
            return "check that servers have the run's model and --dtype, and reset their prefix caches"
        first = rollout.select(slice(0, CHECKED_ROWS))
        texts = [ids[mask].tolist() for ids, mask in zip(first.input_ids, first.attention_mask)]
        gap = rollout.sampling_gap[: len(first), : first.action_mask.shape[1]]
        is_bypassed = self.args.sampling_correction == "none"
        pi = first.logprobs + gap if is_bypassed else first.logprobs  # (b, T-1) of the trainer's pass
        found = self.servers.score(texts)
        if not found:
            return self._suspect()
        for url, scores in found:
            fresh = torch.zeros_like(pi)  # (b, T-1)
            for row, values in enumerate(scores):
                fresh[row, : len(values)] = torch.tensor(values)
            kl = gap_size(pi - fresh, first.action_mask).metrics()["sampling/kl"]
            if not kl <= limit:
                return f"{url} has other weights than it was given (KL {kl:.2g} to these): {self._suspect()}"
        return (
            "without cached prefixes they agree, so keys and values of earlier weights were reused: the prefix cache "
            "is not reset when weights change; start the server without one, or update it"
        )

    def _suspect(self) -> str:
        """Why a server may have other weights than it was given."""
        if self.args.exchange_adapter:
            return "an adapter's name was used before, or its base is not this run's; restart it on the same base"
        return "does another trainer use it? restart it on the model that this run starts from"

    # ----------------------------------------------------------------------------------------------------- ranks
    def _connect(self) -> None:
        """Find the servers. Raises: RunFailure when one samples from another distribution than the run's."""
        args = self.args
        model, started_from = self.policy.model, [name for name, _ in self.policy.loaded.values()]
        unties = would_untie(model, self.policy.adapters) and not would_untie(model, started_from)
        if unties and not args.exchange_adapter:
            raise UsageError(
                "--rollout_server: an adapter on the output layer cannot be merged for a server where that is tied to "
                "the embedding; leave it out of --lora_targets, or add --exchange_adapter True"
            )
        self.servers = RolloutServers(args, vocabulary_size(self.policy))
        try:
            for url, settings in self.servers.settings():
                mode = settings.get("logprobs_mode")
                is_other = args.temperature != 1 or self.only_labels
                if is_other and mode not in (None, "processed_logprobs"):
                    raise RunFailure(
                        f"--rollout_server {url} reports log-probabilities of another distribution than it samples "
                        f"from (logprobs_mode {mode}); start it with --logprobs-mode processed_logprobs"
                    )
            self.exchange = Exchange(choose_root(version_bytes(self.policy)))
        except BaseException:
            self.servers.close()
            raise

    def _on_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank and broadcast its result or its exception."""
        answer: tuple[Any, UsageError | None] | None = None
        if self.ranks.is_first:
            try:
                answer = work(), None
            except UsageError as problem:
                answer = None, problem
        result, raised = self.ranks.broadcast(answer)
        if raised is not None:
            raise raised
        return result


def join_requests(requests: Sequence[Request]) -> Request:
    """The requests of all ranks as one, in their order."""
    prompts = [prompt for request in requests for prompt in request.prompts]
    return Request(prompts, torch.cat([request.noise for request in requests]))
