"""Agents of language models for text environments: a policy that acts, and a frozen reflector that comments.

`ModelAgent` is the pair of Reflect-RL (Zhou et al. 2024, 2402.12621, section 3): the reflector comments on the
observation, the policy sees the comment and the admissible commands and chooses one by a label of a single token, or
writes its command out.

With a history, prompts of an episode share a growing prefix: both models read only what follows it
(`lightrlhf.generation.prefix_cache`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.fields import at_least, between, flag
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs, SamplingArgs
from lightrlhf.data.batch import inference_batch_size, response_batch, to_device
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs import TextEnv, prompts
from lightrlhf.envs.episodes import Decision, Episode, PlayedBatch, Seat, allowed_labels, decision_batch
from lightrlhf.generation.engine import generate, no_gradients
from lightrlhf.generation.prefix_cache import CachedPrefix, has_kv_cache, load_prefixes, store_prefixes
from lightrlhf.generation.rollout import measure_gap, refuse_gap
from lightrlhf.generation.sampling import check_sampled, sample
from lightrlhf.generation.served import Request, ServedPolicy
from lightrlhf.models.forward import inference
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.offload import on_device
from lightrlhf.models.roles import Policy, max_positions, policy_inputs
from lightrlhf.models.tokenizer import end_ids, load_tokenizer
from lightrlhf.training.run import Run
from lightrlhf.training.start_check import check_start

MAX_CACHED = 100_000  # comments, and encoded prompts


@dataclass(frozen=True, kw_only=True)
class ActingArgs(SamplingArgs):
    """How a model acts in an environment."""

    max_new_tokens: int = 1
    """Tokens of an action: 1 chooses by a label, more write the command out."""
    shrink_head: bool = flag(True, show="rarely")
    """Choose among the labels of admissible commands alone; otherwise any token may come, and others are invalid."""
    shuffle_action: bool = flag(False, needs={"max_new_tokens": 1}, show="rarely")
    """Shuffle the labels of the commands for each decision, so that a label carries no meaning."""
    max_choices: int = at_least(2, 62, show="rarely")
    """Number of labels where commands change from state to state or labels are shuffled."""
    with_history: bool = False
    """Show the earlier actions and their results."""
    reflect_prob: float = between(0, 1, 1.0, show="rarely")
    """Share of decisions on which the reflector comments."""
    reflect_max_new_tokens: int = at_least(1, 100, show="rarely")
    """Longest comment, end token included."""
    reflect_do_sample: bool = flag(False, show="rarely")
    """Sample comments; when false take the most likely one, generated once for each observation."""

    def greedy(self) -> ActingArgs:
        """An agent with the same models that takes the most likely action and comment instead of sampled ones."""
        options = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name in ACTING_FLAGS}
        return GreedyArgs(**(options | {"reflect_do_sample": False}))


class GreedyArgs(ActingArgs):
    """Acting by the most likely action."""

    @property
    def do_sample(self) -> bool:
        """False: the agent takes the most likely action."""
        return False


ACTING_FLAGS = {one.name for one in dataclasses.fields(ActingArgs)}


class Reflector:
    """A frozen model that comments on observations. Greedy comments are generated once per prompt and cached."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, args: ActingArgs, num_slots: int) -> None:
        self.policy, self.tokenizer, self.num_slots = policy, tokenizer, num_slots
        self.args = DecodingArgs(
            max_new_tokens=args.reflect_max_new_tokens, do_sample=args.reflect_do_sample, temperature=args.temperature
        )
        self.with_history = args.with_history
        self.reuses_prefixes = args.with_history and has_kv_cache(policy.model)
        self.comments: dict[str, str] = {}  # by prompt

    def __call__(self, seats: Sequence[Seat]) -> list[str]:
        """One comment for each seat; the prompt does not contain the commands."""
        texts = [prompts.reflection_prompt(seat.text, seat.info, self.with_history) for seat in seats]
        if self.args.do_sample:
            uniforms = [[seat.rng.random() for _ in range(self.args.max_new_tokens)] for seat in seats]
            return self._generate(texts, seats, torch.tensor(uniforms)) if texts else []
        if len(self.comments) + len(seats) > MAX_CACHED:
            self.comments.clear()
        new = {text: seat for text, seat in zip(texts, seats) if text not in self.comments}
        if new:
            unused = torch.zeros(len(new), self.args.max_new_tokens)  # greedy decoding draws no random numbers
            self.comments |= dict(zip(new, self._generate(list(new), list(new.values()), unused)))
        return [self.comments[text] for text in texts]

    def _generate(self, texts: Sequence[str], seats: Sequence[Seat], uniforms: Tensor) -> list[str]:
        ids = [encode_prompt(self.tokenizer, text) for text in texts]
        ends = end_ids(self.tokenizer, self.policy.model)
        prefixes = [seat.reflector_prefix for seat in seats] if self.reuses_prefixes else None
        completions = generate(self.policy, ids, self.args, ends, uniforms, self.num_slots, prefixes=prefixes)
        for seat, prefix in zip(seats, prefixes or []):
            seat.reflector_prefix = prefix
        return [decode(self.tokenizer, response) for response in completions.responses]


class ModelAgent:
    """A policy, with or without a reflector.

    num_choices: number of labels; batch_size: prompts per forward pass. Where its policy is `served`, servers decide in
    place of this process; then all ranks call it equally often (see `wait_for_others`).
    Raises: UsageError when the tokenizer has no single token for a label.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        args: ActingArgs,
        num_choices: int,
        batch_size: int,
        reflector: Reflector | None = None,
    ) -> None:
        self.policy, self.tokenizer, self.args = policy, tokenizer, args
        self.batch_size, self.reflector = batch_size, reflector
        self.served: ServedPolicy | None = None
        self.labels: list[str] = prompts.choices(num_choices) if args.max_new_tokens == 1 else []
        self.label_ids = torch.tensor(prompts.label_ids(tokenizer, self.labels), dtype=torch.int64)  # (L,)
        self.encode = lru_cache(MAX_CACHED)(lambda text: encode_prompt(tokenizer, text))
        self.reuses_prefixes = args.with_history and has_kv_cache(policy.model)

    def __call__(self, seats: Sequence[Seat]) -> list[Decision]:
        """One decision for each seat."""
        decisions = []
        for seat, reflection in zip(seats, self._reflect(seats)):
            labels = self._labels(seat)
            prompt = prompts.policy_prompt(seat.text, seat.info, reflection, labels, self.args.with_history)
            allowed = [self.labels.index(label) for label in labels or []]
            decisions.append(Decision("", seat.text, reflection, self.encode(prompt), allowed=allowed))
        self._check_room(decisions)
        if self.served is not None:
            self._ask(self.served, seats, decisions)
        else:
            (self._choose if self.labels else self._write)(seats, decisions)
        return decisions

    def wait_for_others(self) -> None:
        """Take part in what other ranks ask servers, until all have played their episodes."""
        if self.served is not None:
            self.served.wait_for_others([] if self.labels and self.args.shrink_head else None)

    def batch(self, episodes: Sequence[Episode], rows: Sequence[int] | None = None) -> PlayedBatch:
        """The decisions of episodes that this agent played; rows: numbers of their starts in the data."""
        return decision_batch(episodes, self.tokenizer.pad_token_id, len(self.labels), rows)

    def score(self, run: Run[Any], policy: nn.Module, batch: PlayedBatch) -> Tensor:
        """Log-probabilities of the actions under a policy, dropout off: (B, T-1), on the host as the batch is."""
        logprobs = torch.zeros(batch.logprobs.shape, device=run.device)
        with on_device(policy), inference(policy), run.autocast():
            for rows in batch.by_length(run.args.micro_batch_size):
                part = batch.select(rows)
                there = to_device(rows, run.device)
                logprobs[there, : part.action_mask.shape[1]] = policy(**self.inputs(part)).logprobs
        return logprobs.cpu()

    def compare(self, run: Run[Any], actor: nn.Module, batch: PlayedBatch) -> PlayedBatch:
        """Compare the sampler with the policy: servers at each step, whose gap is measured, this process at the first.

        Raises: RunFailure when they differ by too much.
        """
        if self.served is not None:
            batch = measure_gap(batch, self.score(run, actor, batch), run.args.sampling_correction)
            refuse_gap(self.served, batch)
        elif run.step == 0:
            gap = float((self.score(run, actor, batch) - batch.logprobs).abs().max())
            check_start(gap, 1e-2 if run.args.precision == "32-true" else 0.5, "those it sampled with")
        return batch

    def inputs(self, batch: PlayedBatch) -> dict[str, Any]:
        """Arguments of the policy's forward pass over decisions; with `shrink_head` its head is cut to the labels."""
        inputs = policy_inputs(batch) | {"temperature": self.args.temperature}
        if self.labels and self.args.shrink_head:
            inputs |= {"label_ids": self.label_ids, "allowed": batch.on_host.allowed}
        return inputs

    def _reflect(self, seats: Sequence[Seat]) -> list[str | None]:
        """A comment for each seat with probability `reflect_prob`."""
        if self.reflector is None:
            return [None] * len(seats)
        commented = [seat for seat in seats if seat.rng.random() < self.args.reflect_prob]
        comments = {id(seat): text for seat, text in zip(commented, self.reflector(commented))}
        return [comments.get(id(seat)) for seat in seats]

    def _labels(self, seat: Seat) -> list[str] | None:
        """A label for each admissible command. Raises: RunFailure when there are too few."""
        if not self.labels:
            return None
        count = len(np.trim_zeros(seat.info["action_mask"], "b"))  # without the padding
        if count > len(self.labels):
            raise RunFailure(f"a state has {count} commands for {len(self.labels)} labels; raise --max_choices")
        return prompts.labels_for(seat.info, seat.rng if self.args.shuffle_action else None, len(self.labels))

    def _check_room(self, decisions: Sequence[Decision]) -> None:
        room = max_positions(self.policy)
        longest = max(len(one.prompt_ids) for one in decisions)
        if longest + self.args.max_new_tokens > room:
            raise RunFailure(
                f"a prompt of {longest} tokens and its action exceed the policy's {room} positions; "
                "use --with_history False, a shorter --reflect_max_new_tokens or a model with more positions"
            )

    def _choose(self, seats: Sequence[Seat], decisions: list[Decision]) -> None:
        """One token a prompt. Equal prompts with equal allowed labels are read once."""
        model = self.policy.model
        groups: dict[Any, list[int]] = {}
        for number, one in enumerate(decisions):
            groups.setdefault((tuple(one.prompt_ids), tuple(one.allowed)), []).append(number)
        ordered = sorted(groups.values(), key=lambda group: -len(decisions[group[0]].prompt_ids))
        with inference(self.policy), no_gradients(model):
            while ordered:
                longest = len(decisions[ordered[0][0]].prompt_ids)
                size = self.batch_size
                if not self.reuses_prefixes:
                    size = inference_batch_size(longest, size, model.device)
                part, ordered = ordered[:size], ordered[size:]
                old = [seats[group[0]].policy_prefix for group in part]
                logits, prefixes = self._logits([decisions[group[0]] for group in part], old)
                source = torch.tensor([i for i, group in enumerate(part) for _ in group])
                rows = [number for group in part for number in group]
                uniforms = torch.tensor([seats[number].rng.random() for number in rows])
                tokens, logprobs, _ = sample(logits[source], uniforms, self.args)
                check_sampled(logprobs, model)
                for i, number, token, logprob in zip(source.tolist(), rows, tokens.tolist(), logprobs.tolist()):
                    one, seats[number].policy_prefix = decisions[number], prefixes[i]
                    chosen = int(self.label_ids[token]) if self.args.shrink_head else token
                    one.response_ids, one.logprobs = [chosen], [logprob]
                    one.action = self._command(seats[number], one)

    def _command(self, seat: Seat, decision: Decision) -> str:
        """The command of the chosen label; nothing for another token."""
        commands = dict(zip(self.label_ids[decision.allowed].tolist(), seat.info["admissible"]))
        return commands.get(decision.response_ids[0], "")

    def _logits(
        self, decisions: Sequence[Decision], prefixes: Sequence[CachedPrefix | None]
    ) -> tuple[Tensor, Sequence[CachedPrefix | None]]:
        """Logits of the labels, (B, L), or with the whole head of the vocabulary, (B, V), on the CPU; new prefixes."""
        model, ids = self.policy.model, [one.prompt_ids for one in decisions]
        past = load_prefixes(model, ids, prefixes) if self.reuses_prefixes else None
        rest = past.rest if past else ids
        batch = response_batch(rest, [[0]] * len(rest), 0)
        mask = torch.cat([past.mask, batch.attention_mask], 1) if past else batch.attention_mask
        options: dict[str, Any] = {"cache": past.cache} if past else {}
        if self.args.shrink_head:
            allowed = allowed_labels(decisions, len(self.labels))
            options |= {"label_ids": self.label_ids, "allowed": allowed}
        logits = self.policy.choice_logits(batch.input_ids, mask, batch.action_mask, **options).cpu()
        return logits, store_prefixes(past, ids) if past else prefixes

    def _write(self, seats: Sequence[Seat], decisions: list[Decision]) -> None:
        """Commands written out, each up to the end token."""
        uniforms = torch.tensor([[seat.rng.random() for _ in range(self.args.max_new_tokens)] for seat in seats])
        ids = [one.prompt_ids for one in decisions]
        ends = end_ids(self.tokenizer, self.policy.model)
        prefixes = [seat.policy_prefix for seat in seats] if self.reuses_prefixes else None
        completions = generate(self.policy, ids, self.args, ends, uniforms, self.batch_size, self.tokenizer, prefixes)
        for seat, prefix in zip(seats, prefixes or []):
            seat.policy_prefix = prefix
        for one, response, logprobs in zip(decisions, completions.responses, completions.logprobs):
            one.response_ids, one.logprobs = response, logprobs
            one.action = decode(self.tokenizer, response).strip()

    def _ask(self, served: ServedPolicy, seats: Sequence[Seat], decisions: list[Decision]) -> None:
        """Labels or written commands, from servers."""
        uniforms = torch.tensor([[seat.rng.random() for _ in range(self.args.max_new_tokens)] for seat in seats])
        allowed = None
        if self.labels and self.args.shrink_head:
            allowed = [sorted(self.label_ids[one.allowed].tolist()) for one in decisions]
        sampled = served.sample_any(Request([one.prompt_ids for one in decisions], uniforms), allowed)
        assert sampled is not None  # since there are seats
        for seat, one, response, logprobs in zip(seats, decisions, sampled.responses, sampled.logprobs):
            one.response_ids, one.logprobs = response, logprobs
            one.action = self._command(seat, one) if self.labels else decode(self.tokenizer, response).strip()


def num_choices(env: TextEnv, args: ActingArgs) -> int:
    """Number of labels: one for each action where these are fixed and not shuffled, else `--max_choices`."""
    return args.max_choices if env.actions is None or args.shuffle_action else len(env.actions)


def load_reflector(
    name: str, args: ActingArgs, num_slots: int, device: torch.device, trust_remote_code: bool = False
) -> Reflector:
    """The frozen reflector of `--reflect_experiment_dir`, with its own tokenizer.

    Raises: UsageError when it cannot be loaded.
    """
    source = resolve(name, "--reflect_experiment_dir")
    tokenizer = load_tokenizer(None, source)
    frozen = FrozenArgs(trust_remote_code=trust_remote_code)
    model = load_policy(source, frozen, tokenizer, "--reflect_experiment_dir").requires_grad_(False).eval()
    return Reflector(model.to(device), tokenizer, args, num_slots)
