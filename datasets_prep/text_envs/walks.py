"""Walks through a text environment: trajectories with the oracle's command and a comment at each step.

A *positive* walk is an oracle mixed with noise: each command is random with probability `noise`, otherwise the
oracle's. A *negative* walk deviates from the oracle on purpose: in every second state a wrong command is drawn, the
comment explains why it is wrong and what to do instead, and the walk executes it, so that later comments are about
states that follow a mistake.

Both begin with the oracle for a random part of its path (`expert_start`), since a noisy walk seldom gets far. A walk
depends on seed, split, kind and number alone, so walks can be added later without changing the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from lightrlhf.cli.errors import RunFailure
from lightrlhf.envs import Info, Start, TextEnv

Kind = Literal["positive", "negative"]
MAX_EMPTY = 200  # consecutive walks without an example, after which no more are expected


class Example(NamedTuple):
    """One state of a walk."""

    text: str
    task: str
    history: list[tuple[str, str]]
    admissible: list[str]
    mask: list[bool]
    action: str  # the command that was executed; in a negative example the wrong one
    expert: str
    comment: str  # the environment's own, from a template
    source: str  # such as "negative walk 12, step 3", for messages

    def info(self) -> Info:
        """The part of the state's `info` that prompts use."""
        return {
            "task": self.task,
            "history": self.history,
            "admissible": self.admissible,
            "action_mask": self.mask,
        }


def read_example(values: list[Any]) -> Example:
    """An example from a JSON list."""
    example = Example(*values)
    return example._replace(history=[(command, result) for command, result in example.history])


class Walker:
    """Generates walks from the starts of one split."""

    def __init__(
        self, env: TextEnv, seed: int, split: str, noise: float, expert_start: bool, level: int | None = None
    ) -> None:
        self.env, self.split, self.seed, self.noise, self.expert_start = env, split, seed, noise, expert_start
        levels = range(len(env.levels)) if level is None else [level]
        by_level = [env.starts(split, each) for each in levels]
        self.starts: list[list[Start]] = [starts for starts in by_level if starts]
        self.lengths: dict[str, int] = {}  # of the oracle's path, by start

    def walk(self, kind: Kind, number: int) -> list[Example]:
        """The examples of a walk; levels alternate."""
        rng = random.Random(f"{self.seed} {self.split} {kind} {number}")
        start = rng.choice(self.starts[number % len(self.starts)])
        lead = rng.randrange(self._length(start)) if self.expert_start else 0
        text, info = self.env.reset(seed=number, options=start)  # an environment may draw more than its start
        for _ in range(lead):
            text, *_, info = self.env.step(self.env.expert() or "")
        step = self._noisy if kind == "positive" else self._astray
        examples, over = [], False
        while not over:
            expert = self.env.expert()
            if expert is None:  # the goal is out of reach, or the oracle finds no path
                break
            if expert not in info["admissible"]:
                raise RunFailure(f"the environment's oracle returned {expert!r}, which is not an admissible command")
            action, comment = step(rng, info, expert)
            if comment:
                where = f"{self.split}, {kind} walk {number}, step {len(info['history'])}"
                mask = [bool(on) for on in info["action_mask"]]
                state = (text, info["task"], info["history"], info["admissible"], mask)
                examples.append(Example(*state, action, expert, comment, where))
            text, _, terminated, truncated, info = self.env.step(action)
            over = terminated or truncated
        return examples

    def walks(self, kind: Kind, first: int = 0) -> Iterator[tuple[int, list[Example]]]:
        """Endless numbered walks. Raises: RunFailure after `MAX_EMPTY` consecutive walks without examples."""
        empty = 0
        number = first
        while empty < MAX_EMPTY:
            examples = self.walk(kind, number)
            empty = 0 if examples else empty + 1
            yield number, examples
            number += 1
        reason = "its oracle finds no path" if kind == "positive" else "its `reflection` objects to no command"
        remedy = "another --env" if kind == "positive" else "--negative_percentage 0"
        raise RunFailure(f"{MAX_EMPTY} {kind} walks of the {self.split} split gave no example: {reason}; try {remedy}")

    def _noisy(self, rng: random.Random, info: Info, expert: str) -> tuple[str, str]:
        action = rng.choice(info["admissible"]) if rng.random() < self.noise else expert
        return action, self.env.reflection()

    def _astray(self, rng: random.Random, info: Info, expert: str) -> tuple[str, str]:
        if rng.random() < 0.5:
            return expert, ""
        for action in rng.sample(info["admissible"], len(info["admissible"])):
            if action != expert and (comment := self.env.reflection(action)):
                return action, comment
        return expert, ""

    def _length(self, start: Start) -> int:
        """Steps of the oracle's path, at least 1."""
        key = repr(sorted(start.items()))
        if key not in self.lengths:
            self.env.reset(options=start)
            steps, over = 0, False
            while not over and (action := self.env.expert()) is not None:
                *_, terminated, truncated, _ = self.env.step(action)
                steps, over = steps + 1, terminated or truncated
            self.lengths[key] = max(1, steps)
        return self.lengths[key]
