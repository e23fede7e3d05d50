"""Walks through a text environment: what a player saw, did and should have done, each step with a comment.

A *positive* walk is an oracle mixed with noise: each command is random with probability `noise`, else the oracle's.
A *negative* walk leaves the oracle's way on purpose: in every second state a command is considered that is wrong
there, the comment says why and what to do instead, and the walk then goes astray by it, so that the next comment sets
out from where a mistake has led.

Both begin with the oracle for a random part of its way (`expert_start`), since a noisy player seldom gets far. A walk
follows from seed, split, kind and number alone, so walks can be added later without changing any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from lightrlhf.cli.errors import RunFailure
from lightrlhf.envs import Info, Start

Kind = Literal["positive", "negative"]
IN_VAIN = 200  # so many walks in a row without an example mean that none will come


class Example(NamedTuple):
    """One state of a walk."""

    text: str
    task: str
    history: list[tuple[str, str]]
    admissible: list[str]
    mask: list[bool]
    action: str  # what was done; in a negative example the wrong command
    expert: str
    comment: str  # the environment's own, from a template
    source: str  # such as "negative walk 12, step 3", for messages

    def info(self) -> Info:
        """What the prompts read of the state's `info`."""
        return {
            "task": self.task,
            "history": self.history,
            "admissible": self.admissible,
            "action_mask": self.mask,
        }


def read_example(values: list[Any]) -> Example:
    """An example as JSON keeps it: a list."""
    example = Example(*values)
    return example._replace(history=[tuple(step) for step in example.history])


class Walker:
    """Makes walks on the starts of one split."""

    def __init__(
        self, env: Any, seed: int, split: str, noise: float, expert_start: bool, level: int | None = None
    ) -> None:
        self.env, self.split, self.seed, self.noise, self.expert_start = env, split, seed, noise, expert_start
        levels = range(len(env.levels)) if level is None else [level]
        by_level = [env.starts(split, each) for each in levels]
        self.starts: list[list[Start]] = [starts for starts in by_level if starts]
        self.lengths: dict[str, int] = {}  # of the oracle's way, by start

    def walk(self, kind: Kind, number: int) -> list[Example]:
        """The examples of a walk; levels take turns."""
        rng = random.Random(f"{self.seed} {self.split} {kind} {number}")
        start = rng.choice(self.starts[number % len(self.starts)])
        lead = rng.randrange(self._length(start)) if self.expert_start else 0
        text, info = self.env.reset(seed=number, options=start)  # for what an environment draws besides its start
        for _ in range(lead):
            text, *_, info = self.env.step(self.env.expert())
        step = self._noisy if kind == "positive" else self._astray
        examples, over = [], False
        while not over:
            expert = self.env.expert()
            if expert is None:  # no way is left, or the oracle knows none
                break
            if expert not in info["admissible"]:
                raise RunFailure(f"the environment's oracle says {expert!r}, which is not among the commands it offers")
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
        """Numbered walks without end. Raises: RunFailure when no more examples come."""
        empty = 0
        number = first
        while empty < IN_VAIN:
            examples = self.walk(kind, number)
            empty = 0 if examples else empty + 1
            yield number, examples
            number += 1
        reason = "its oracle knows no way" if kind == "positive" else "it calls no command wrong"
        remedy = "another --env" if kind == "positive" else "--negative_percentage 0"
        raise RunFailure(f"{IN_VAIN} {kind} walks of the {self.split} split gave no example: {reason}; try {remedy}")

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
        """Steps of the oracle's way, at least 1."""
        key = repr(sorted(start.items()))
        if key not in self.lengths:
            self.env.reset(options=start)
            steps, over = 0, False
            while not over and (action := self.env.expert()) is not None:
                *_, terminated, truncated, _ = self.env.step(action)
                steps, over = steps + 1, terminated or truncated
            self.lengths[key] = max(1, steps)
        return self.lengths[key]
