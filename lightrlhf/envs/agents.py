"""Episodes in text environments: many are played at once, by an agent that sees all who wait for an action together.

An environment is an object as `lightrlhf/envs` describes it: gymnasium's API, texts as observations and actions. An
agent maps the waiting seats to decisions, so a model reads them in one batch. `ModelAgent` is the pair of Reflect-RL
(Zhou et al. 2024, 2402.12621, section 3): a frozen reflector comments on the observation, the policy sees the comment
and the commands on offer and chooses one by a label of a single token, or writes its command out.

A seat's random numbers follow from the seed and its episode alone: what happens in an episode does not depend on how
many are played side by side. How a state becomes a prompt comes in as an object, the module `lightrlhf.envs.prompts`.

With a history, prompts of an episode share a growing beginning: both models read only what comes after it
(`lightrlhf.common.prefix_cache`).

Left out: environments in processes of their own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.args import GenerationArgs, check_at_least
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import inference_batch_size, response_batch
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.generation.engine import generate, no_gradients
from lightrlhf.generation.prefix_cache import CachedPrefix, has_kv_cache, load_prefixes, store_prefixes
from lightrlhf.generation.sampling import sample
from lightrlhf.models.roles import Policy

MOST_STEPS = 10_000  # an environment that is never done is a mistake, not a long episode
MOST_CACHED = 100_000


@dataclass(frozen=True, kw_only=True)
class ActingArgs(GenerationArgs):
    """How a model acts in an environment."""

    max_new_tokens: int = 1
    """Tokens of an action: 1 chooses by a label, more write the command out."""
    shrink_head: bool = True
    """Choose among the labels on offer alone; otherwise any token may be said, and one that is no label is invalid."""
    shuffle_action: bool = False
    """Draw the labels of the commands anew for each decision, so that a label means nothing by itself."""
    max_choices: int = 62
    """Labels there are for environments whose commands change from state to state, and to draw from at random."""
    with_history: bool = False
    """Show the earlier actions and what came of them."""
    reflect_prob: float = 1.0
    """Share of decisions that the reflector comments on."""
    reflect_max_new_tokens: int = 100
    """Longest comment, end token included."""
    reflect_do_sample: bool = False
    """Sample comments; when false take the most likely one, once for each observation."""

    def check_acting(self) -> None:
        """Raises: ValueError, one line, when an option is out of range."""
        self.check_generation()
        check_at_least(self, "max_choices", 2)
        check_at_least(self, "reflect_max_new_tokens", 1)
        if not 0 <= self.reflect_prob <= 1:
            raise ValueError(f"--reflect_prob {self.reflect_prob} must lie in [0, 1]")
        if self.shuffle_action and self.max_new_tokens > 1:
            raise ValueError("--shuffle_action True has no labels to shuffle with --max_new_tokens above 1")
        if self.repetition_penalty != 1:
            raise ValueError(f"--repetition_penalty {self.repetition_penalty}: an action may well be repeated; leave 1")


@dataclass
class Decision:
    """One action and how it came about. Ids are empty where no model of ours chose it."""

    action: str  # what the environment was told
    observation: str = ""
    reflection: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the response's tokens, at the temperature
    allowed: list[int] = field(default_factory=list)  # numbers of the labels on offer
    reward: float = 0.0
    invalid: bool = False


@dataclass
class Episode:
    """What happened from a start to the end."""

    start: dict[str, Any]
    level: int = 0
    task: str = ""
    decisions: list[Decision] = field(default_factory=list)
    success: bool = False
    cost: float = 0.0

    @property
    def total_reward(self) -> float:
        return sum(decision.reward for decision in self.decisions)

    def story(self) -> str:
        """The episode as text, for reading."""
        lines = [f"Task: {self.task}"] if self.task else []
        for number, one in enumerate(self.decisions, start=1):
            lines += [f"--- {number} ---", one.observation.rstrip()]
            lines += [f"Reflection: {one.reflection}"] if one.reflection else []
            lines += [f"Action: {one.action}  (reward {one.reward:g}{', invalid' if one.invalid else ''})"]
        outcome = "success" if self.success else "failure"
        return "\n".join([*lines, f"=== {outcome} after {len(self.decisions)} actions, cost {self.cost:g}", ""])


@dataclass
class Seat:
    """An environment that waits for an action."""

    env: Any
    episode: Episode
    rng: random.Random
    text: str
    info: dict[str, Any]
    read: CachedPrefix | None = None  # what the policy has read of this episode, for a prefix cache
    commented: CachedPrefix | None = None  # the same of the reflector


Agent = Callable[[Sequence[Seat]], list[Decision]]


def play(
    envs: Sequence[Any], starts: Sequence[dict[str, Any]], agent: Agent, seed: str, most_decisions: int = MOST_STEPS
) -> list[Episode]:
    """One episode from each start, in their order; an environment whose episode is done takes the next start.

    seed: a name for the random numbers; most_decisions: an episode ends after so many (1 makes it a bandit's).
    Raises: RunFailure when an environment is never done.
    """
    episodes = [Episode(start) for start in starts]
    waiting = deque(enumerate(episodes))
    seats: list[Seat] = []

    def sit(env: Any) -> None:
        if waiting:
            number, episode = waiting.popleft()
            rng = random.Random(f"{seed}/{number}")
            text, info = env.reset(seed=rng.getrandbits(31), options=episode.start)
            episode.level, episode.task = info["level"], info["task"]
            seats.append(Seat(env, episode, rng, text, info))

    for env in envs:
        sit(env)
    while seats:
        busy, seats = seats, []
        for seat, decision in zip(busy, agent(busy)):
            seat.text, reward, terminated, truncated, seat.info = seat.env.step(decision.action)
            decision.reward, decision.invalid = float(reward), bool(seat.info["invalid"])
            seat.episode.decisions.append(decision)
            seat.episode.cost, seat.episode.success = float(seat.info["cost"]), bool(seat.info["success"])
            if len(seat.episode.decisions) >= MOST_STEPS:
                raise RunFailure(f"{seat.env} was not done after {MOST_STEPS} actions; give it a horizon")
            if terminated or truncated or len(seat.episode.decisions) >= most_decisions:
                sit(seat.env)
            else:
                seats.append(seat)
    return episodes


# ------------------------------------------------------------------------------------------------------ plain agents
def oracle_agent(seats: Sequence[Seat]) -> list[Decision]:
    """The environment's own expert; where that knows nothing, the first command on offer."""
    return [Decision(seat.env.expert() or seat.info["admissible"][0], seat.text) for seat in seats]


def random_agent(seats: Sequence[Seat]) -> list[Decision]:
    """Any command on offer."""
    return [Decision(seat.rng.choice(seat.info["admissible"]), seat.text) for seat in seats]


# ----------------------------------------------------------------------------------------------------- the two models
class Reflector:
    """A frozen model that comments on observations. Greedy comments are made once per prompt and kept."""

    def __init__(self, policy: Policy, tokenizer: Any, prompts: Any, args: ActingArgs, num_slots: int) -> None:
        self.policy, self.tokenizer, self.prompts, self.num_slots = policy, tokenizer, prompts, num_slots
        self.args = GenerationArgs(
            max_new_tokens=args.reflect_max_new_tokens,
            do_sample=args.reflect_do_sample,
            temperature=args.temperature,
        )
        self.with_history = args.with_history
        self.keeps = args.with_history and has_kv_cache(policy.model)
        self.kept: dict[str, str] = {}

    def __call__(self, seats: Sequence[Seat]) -> list[str]:
        """One comment for each seat; it never sees the commands on offer."""
        texts = [self.prompts.reflection_prompt(seat.text, seat.info, self.with_history) for seat in seats]
        if self.args.do_sample:
            uniforms = [[seat.rng.random() for _ in range(self.args.max_new_tokens)] for seat in seats]
            return self._generate(texts, seats, torch.tensor(uniforms)) if texts else []
        if len(self.kept) + len(seats) > MOST_CACHED:
            self.kept.clear()
        new = {text: seat for text, seat in zip(texts, seats) if text not in self.kept}
        if new:
            nothing = torch.zeros(len(new), self.args.max_new_tokens)  # greedy text draws no numbers
            self.kept |= dict(zip(new, self._generate(list(new), list(new.values()), nothing)))
        return [self.kept[text] for text in texts]

    def _generate(self, texts: Sequence[str], seats: Sequence[Seat], uniforms: Tensor) -> list[str]:
        prompts = [encode_prompt(self.tokenizer, text) for text in texts]
        ends = [self.tokenizer.eos_token_id]
        reads = [seat.commented for seat in seats] if self.keeps else None
        said = generate(self.policy, prompts, self.args, ends, uniforms, self.num_slots, prefixes=reads)
        for seat, read in zip(seats, reads or []):
            seat.commented = read
        return [decode(self.tokenizer, response) for response in said.responses]


class ModelAgent:
    """A policy, with or without a reflector before it.

    num_choices: how many labels there are; batch_size: prompts per forward pass.
    Raises: UsageError when the tokenizer has no single token for a label.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        prompts: Any,
        args: ActingArgs,
        num_choices: int,
        batch_size: int,
        reflector: Reflector | None = None,
    ) -> None:
        self.policy, self.tokenizer, self.prompts, self.args = policy, tokenizer, prompts, args
        self.batch_size, self.reflector = batch_size, reflector
        self.labels: list[str] = prompts.choices(num_choices) if args.max_new_tokens == 1 else []
        self.label_ids = torch.tensor(prompts.label_ids(tokenizer, self.labels), dtype=torch.int64)  # (L,)
        self.encode = lru_cache(MOST_CACHED)(lambda text: encode_prompt(tokenizer, text))
        self.keeps = args.with_history and has_kv_cache(policy.model)

    def __call__(self, seats: Sequence[Seat]) -> list[Decision]:
        """One decision for each seat."""
        decisions = []
        for seat, reflection in zip(seats, self._reflect(seats)):
            labels = self._labels(seat)
            prompt = self.prompts.policy_prompt(seat.text, seat.info, reflection, labels, self.args.with_history)
            allowed = [self.labels.index(label) for label in labels or []]
            decisions.append(Decision("", seat.text, reflection, self.encode(prompt), allowed=allowed))
        self._check_room(decisions)
        (self._choose if self.labels else self._write)(seats, decisions)
        return decisions

    def _reflect(self, seats: Sequence[Seat]) -> list[str | None]:
        """A comment for each seat that gets one by its own coin."""
        if self.reflector is None:
            return [None] * len(seats)
        commented = [seat for seat in seats if seat.rng.random() < self.args.reflect_prob]
        comments = {id(seat): text for seat, text in zip(commented, self.reflector(commented))}
        return [comments.get(id(seat)) for seat in seats]

    def _labels(self, seat: Seat) -> list[str] | None:
        """A label for each command on offer. Raises: RunFailure when there are too few."""
        if not self.labels:
            return None
        count = len(seat.info["action_mask"])
        if count > len(self.labels):
            raise RunFailure(f"a state has {count} commands for {len(self.labels)} labels; raise --max_choices")
        return self.prompts.labels_for(seat.info, seat.rng if self.args.shuffle_action else None, len(self.labels))

    def _check_room(self, decisions: Sequence[Decision]) -> None:
        room = getattr(self.policy.model.config, "max_position_embeddings", None)
        longest = max(len(one.prompt_ids) for one in decisions)
        if room and longest + self.args.max_new_tokens > room:
            raise RunFailure(
                f"a prompt of {longest} tokens and its action do not fit into the policy's {room} positions; "
                "use --with_history False, a shorter --reflect_max_new_tokens or a longer model"
            )

    def _choose(self, seats: Sequence[Seat], decisions: list[Decision]) -> None:
        """One token a prompt. Equal prompts with equal offers are read once."""
        model = self.policy.model
        groups: dict[Any, list[int]] = {}
        for number, one in enumerate(decisions):
            groups.setdefault((tuple(one.prompt_ids), tuple(one.allowed)), []).append(number)
        ordered = sorted(groups.values(), key=lambda group: -len(decisions[group[0]].prompt_ids))
        was_training = self.policy.training
        self.policy.eval()
        with no_gradients(model):
            while ordered:
                longest = len(decisions[ordered[0][0]].prompt_ids)
                most = self.batch_size if self.keeps else inference_batch_size(longest, self.batch_size, model.device)
                part, ordered = ordered[:most], ordered[most:]
                logits, read = self._logits([decisions[group[0]] for group in part], [seats[g[0]].read for g in part])
                source = torch.tensor([i for i, group in enumerate(part) for _ in group])
                rows = [number for group in part for number in group]
                uniforms = torch.tensor([seats[number].rng.random() for number in rows])
                tokens, logprobs, _ = sample(logits[source], uniforms, self.args)
                for i, number, token, logprob in zip(source.tolist(), rows, tokens.tolist(), logprobs.tolist()):
                    one, seats[number].read = decisions[number], read[i]
                    chosen = int(self.label_ids[token]) if self.args.shrink_head else token
                    one.response_ids, one.logprobs = [chosen], [logprob]
                    offered = dict(zip(self.label_ids[one.allowed].tolist(), seats[number].info["admissible"]))
                    one.action = offered.get(chosen, "")
        self.policy.train(was_training)

    def _logits(
        self, decisions: Sequence[Decision], read: Sequence[CachedPrefix | None]
    ) -> tuple[Tensor, Sequence[CachedPrefix | None]]:
        """Of the labels, (B, L), or with a whole head of the vocabulary, (B, V), on the CPU; and what was read now."""
        model, prompts = self.policy.model, [one.prompt_ids for one in decisions]
        past = load_prefixes(model, prompts, read) if self.keeps else None
        rest = past.rest if past else prompts
        batch = response_batch(rest, [[0]] * len(rest), 0).to(model.device)
        mask = torch.cat([past.mask, batch.attention_mask], 1) if past else batch.attention_mask
        options: dict[str, Any] = {"cache": past.cache} if past else {}
        if self.args.shrink_head:
            allowed = allowed_labels(decisions, len(self.labels))
            options |= {"label_ids": self.label_ids.to(model.device), "allowed": allowed.to(model.device)}
        logits = self.policy.choice_logits(batch.input_ids, mask, batch.action_mask, **options).cpu()
        return logits, store_prefixes(past, prompts) if past else read

    def _write(self, seats: Sequence[Seat], decisions: list[Decision]) -> None:
        """Commands written out, each up to the end token."""
        uniforms = torch.tensor([[seat.rng.random() for _ in range(self.args.max_new_tokens)] for seat in seats])
        prompts = [one.prompt_ids for one in decisions]
        ends = [self.tokenizer.eos_token_id]
        reads = [seat.read for seat in seats] if self.keeps else None
        said = generate(self.policy, prompts, self.args, ends, uniforms, self.batch_size, self.tokenizer, reads)
        for seat, read in zip(seats, reads or []):
            seat.read = read
        for one, response, logprobs in zip(decisions, said.responses, said.logprobs):
            one.response_ids, one.logprobs = response, logprobs
            one.action = decode(self.tokenizer, response).strip()


def allowed_labels(decisions: Sequence[Decision], num_labels: int) -> Tensor:
    """(B, 1, L) bool, the same for every token of a row."""
    allowed = torch.zeros(len(decisions), 1, num_labels, dtype=torch.bool)
    for row, one in zip(allowed, decisions):
        row[0, one.allowed] = True
    return allowed


def num_choices(env: Any, args: ActingArgs) -> int:
    """How many labels there are: one for each action where they are fixed and not drawn, else `--max_choices`."""
    return args.max_choices if env.actions is None or args.shuffle_action else len(env.actions)


def count(episodes: Sequence[Episode]) -> list[float]:
    """Sums over episodes, for `rates`: episodes, successes, cost, reward, decisions, invalid ones."""
    decisions = [decision for one in episodes for decision in one.decisions]
    rewards, invalid = sum(one.reward for one in decisions), sum(one.invalid for one in decisions)
    successes, cost = sum(one.success for one in episodes), sum(one.cost for one in episodes)
    return [len(episodes), successes, cost, rewards, len(decisions), invalid]


def rates(counts: Sequence[float]) -> dict[str, float]:
    """Means of what `count` gave, or of sums of it: per episode, and of invalid actions per decision."""
    episodes, successes, cost, rewards, decisions, invalid = counts
    return {
        "success": successes / max(episodes, 1),
        "cost": cost / max(episodes, 1),
        "reward": rewards / max(episodes, 1),
        "length": decisions / max(episodes, 1),
        "invalid_ratio": invalid / max(decisions, 1),
    }
