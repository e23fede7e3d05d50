"""The sampler of a run's rollouts: which prompts, which random numbers, in this process or on rollout servers.

Prompts and noise follow from the step and the seed alone, so a resumed run needs no state but pass rates (with
`--curriculum_score`), and servers can be asked for the next rollout while this one is learned from (`--max_staleness
1`). The first rollout is compared with what policy and reference give it, which start from the same weights.

Left out: importance weights of servers' responses, which are a line of the loop (`maths.sampling_gap`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import NotFinite
from lightrlhf.data.batch import Batch, Rollout, number_rows
from lightrlhf.data.scores import Scores
from lightrlhf.data.splits import Row
from lightrlhf.generation.rollout import (
    generate_rollout,
    make_rollout,
    measure_gap,
    prompt_ids,
    refuse_gap,
    sampled_batch,
    score_logprobs,
    store_sampling,
)
from lightrlhf.generation.served import Request, ServedPolicy
from lightrlhf.models.frozen import is_held
from lightrlhf.models.sharding import gather_shards
from lightrlhf.training.pass_rates import make_pass_rates
from lightrlhf.training.run import Metrics, Run
from lightrlhf.training.start import Start
from lightrlhf.training.start_check import check_start


class RolloutSampler:
    """Samples `responses` responses to each prompt of a step, with the weights that are trained.

    model: the policy as `run.setup` returned it; reference: None leaves `ref_logprobs` NaN.
    Raises: RunFailure when a server cannot be used, UsageError when weights cannot be written for it.
    """

    def __init__(
        self, run: Run[Any], model: nn.Module, reference: nn.Module | None, start: Start[Any, Row], responses: int = 1
    ) -> None:
        self.run, self.model, self.reference = run, model, reference
        self.tokenizer, self.prompts, self.responses = start.tokenizer, start.rows, responses
        self.served = ServedPolicy(run.args, start.policy, start.tokenizer, run) if run.args.rollout_server else None
        self.pass_rates = make_pass_rates(run, len(start.rows))
        self._num_groups = 0  # of the step, on all ranks
        store_sampling(start.policy, run.args, start.tokenizer)

    def sample(self, step: int) -> Rollout:
        """This rank's rollout of a step, counted from 0; the responses to a prompt are next to each other.

        Sharding may split a group over two ranks. Raises: RunFailure when the first rollout's log-probabilities do not
        match the weights; ServersGone when no server is left.
        """
        run, ahead = self.run, None
        if run.args.max_staleness and step + 1 < run.order.planned_steps:
            rows, noise = self._draw(self._prompts_of(step + 1), step + 1)
            ahead = Request(prompt_ids(rows), noise)
        drawn = self._prompts_of(step)
        self._num_groups = len(drawn)
        rollout = self._respond(drawn, range(len(drawn)), (step,), ahead)
        if step == 0:
            self._check_start(rollout)
        return rollout

    def replace(self, step: int, number: int, groups: Tensor) -> Rollout:
        """Responses to other prompts, drawn with replacement, for groups (G,) of the step; number: of the round."""
        size, generator = len(self.prompts), self.run.ranks.generator(step, number, -1)
        drawn = torch.randint(size, (len(groups),), generator=generator).tolist()
        return self._respond(drawn, groups.tolist(), (step, number))

    def note(self, rollout: Rollout, scores: Scores) -> Metrics:
        """Note which prompts of a rollout were solved, for the next ones; returns metrics."""
        return self.pass_rates.update(rollout, scores.total, self.run.ranks) if self.pass_rates else {}

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that a resumed run needs."""
        return {"pass_rates": self.pass_rates.counts} if self.pass_rates else {}

    def sample_held_out(self, rows: Sequence[Row]) -> Rollout:
        """A response to each of the first `--eval_iters` batches of held-out prompts, by the same noise each time."""
        run, args = self.run, self.run.args
        rows = run.order.eval_rows(rows, args.rollout_mini_batch_size)
        rows = number_rows(rows, range(len(rows)))
        return self._generate(run.ranks.shard(rows), run.ranks.noise(len(rows), args.max_new_tokens, -1))

    # -------------------------------------------------------------------------------------------------- drawing
    def _prompts_of(self, step: int) -> list[int]:
        """Numbers of the prompts of a step, on all ranks."""
        if self.pass_rates:
            size = self.run.args.rollout_size * self.run.ranks.world_size
            return self.pass_rates.draw(size, self.run.ranks.generator(step, -3))
        return self.run.order.draw(len(self.prompts), step, self.run.args.rollout_size)

    def _draw(self, drawn: Sequence[int], *key: int) -> tuple[list[Row], Tensor]:
        """This rank's rows of the drawn prompts, each as often as it has responses, and their noise (B, length)."""
        rows = [row for row in number_rows(self.prompts, drawn) for _ in range(self.responses)]
        return self.run.ranks.shard(rows), self.run.ranks.noise(len(rows), self.run.args.max_new_tokens, *key)

    def _respond(
        self, drawn: Sequence[int], groups: Sequence[int], key: tuple[int, ...], ahead: Request | None = None
    ) -> Rollout:
        """Responses to the drawn prompts, numbered as `groups` of the step."""
        rollout = self._generate(*self._draw(drawn, *key), ahead)
        own = self.run.ranks.shard([group for group in groups for _ in range(self.responses)])
        return dataclasses.replace(rollout, group=torch.tensor(own, dtype=torch.int64), num_groups=self._num_groups)

    # ------------------------------------------------------------------------------------------------- sampling
    def _generate(self, rows: Sequence[Row], noise: Tensor, ahead: Request | None = None) -> Rollout:
        run, args = self.run, self.run.args
        with run.autocast():
            if self.served is None:
                settings = (args, self.tokenizer, noise, args.rollout_mini_batch_size)
                try:
                    return generate_rollout(self.model, self.reference, rows, *settings)
                except NotFinite as problem:
                    raise NotFinite(str(problem), rows=[rows[i]["row"] for i in problem.indices]) from None
            rollout = self._ask(self.served, rows, noise, ahead)
        if not rollout.staleness:
            refuse_gap(self.served, rollout)
        return rollout

    def _ask(self, served: ServedPolicy, rows: Sequence[Row], noise: Tensor, ahead: Request | None) -> Rollout:
        """A rollout that servers sample, with the gap between their log-probabilities and this process's."""
        args, prompts = self.run.args, prompt_ids(rows)
        sampled, staleness = served.sample(Request(prompts, noise), ahead)
        batch = sampled_batch(prompts, sampled, self.tokenizer.pad_token_id)
        with gather_shards(getattr(self.model, "module", self.model)):
            scored = score_logprobs(self.model, batch, args.temperature, args.rollout_mini_batch_size)  # (B, T-1)
        batch = dataclasses.replace(measure_gap(batch, scored, args.sampling_correction), staleness=staleness)
        settings = (self.tokenizer, self.reference, args.temperature, args.rollout_mini_batch_size)
        return make_rollout(batch, rows, sampled, *settings)

    def _check_start(self, rollout: Rollout) -> None:
        """Compare the first rollout's log-probabilities with the reference's, or without one with a forward pass.

        Likewise where the reference alone is held in bfloat16, for its log-probabilities may be off by the rounding.
        The pass is without groups, as in the rollout, because another packing rounds differently.
        """
        args, other, name = self.run.args, rollout.ref_logprobs, "the reference's"
        model: Any = getattr(self.model, "module", self.model)
        reference: Any = self.reference
        is_rounded = reference is not None and is_held(reference.model) and not is_held(model.model)
        if self.reference is None or is_rounded:
            batch, name = rollout.extend(Batch, group=None), "a forward pass's"
            with self.run.autocast(), gather_shards(model):
                other = score_logprobs(self.model, batch, args.temperature, args.rollout_mini_batch_size)  # (B, T-1)
        logprobs = rollout.logprobs
        if rollout.sampling_gap is not None and args.sampling_correction == "none":  # a server's; their gap is checked
            logprobs = logprobs + rollout.sampling_gap
        check_start(float((logprobs - other).abs().max()), 1e-2, name)
