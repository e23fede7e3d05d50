"""Rewards, a user and an environment that the runs of the freeze name; the same file in both trees."""

import os
import random
import signal

import gymnasium

from lightrlhf.envs import information, text_space

ACTIONS = ["west", "east", "wait"]
LENGTHS = (3, 5)  # of the two levels
calls = 0  # of `kills_a_server` in this process


def vowels(prompts, completions, **columns):
    """Rarely gives the same reward twice."""
    return [sum(letter in "aeiou" for letter in text) + len(text) / 100 for text in completions]


def whole_vowels(prompts, completions, **columns):
    """Often gives the same reward twice, so that groups have no signal."""
    return [sum(letter in "aeiou" for letter in text) for text in completions]


def length(prompts, completions, **columns):
    """An audit, or a second reward; None for every fifth text."""
    return [None if len(text) % 5 == 0 else len(text) / 10 for text in completions]


def noisy(prompts, completions, **columns):
    """Draws from both generators that a checkpoint keeps."""
    import torch

    return [value + float(torch.rand(())) + random.random() for value in vowels(prompts, completions)]


def kills_a_server(prompts, completions, **columns):
    """Kills the process $FREEZE_SERVER at call number $FREEZE_CALL."""
    global calls
    calls += 1
    if calls == int(os.environ.get("FREEZE_CALL", "0")):
        os.kill(int(os.environ["FREEZE_SERVER"]), signal.SIGKILL)
    return whole_vowels(prompts, completions)


def echo(dialogues, seeds, **columns):
    """A user who repeats the first letters of the last message, and draws a number."""
    return [f"You said {messages[-1]['content'][:5]} {seed % 7}?" for messages, seed in zip(dialogues, seeds)]


class Corridor(gymnasium.Env):
    """Walk to an end of the corridor, east or west as the task says; the other end is a trap."""

    actions = ACTIONS
    levels = ["short", "long way"]
    instructions = "Walk to the goal."

    def __init__(self, horizon: int = 10) -> None:
        self.horizon = horizon
        self.observation_space = self.action_space = text_space(80)

    def starts(self, split, level=None):
        shift = {"train": 0, "validation": 1, "test": 2}[split]
        places = [(goal, at) for goal in ("west", "east") for at in range(-4, 5) if (at + 4) % 3 == shift]
        chosen = (0, 1) if level is None else (level,)
        return [{"level": n, "goal": goal, "at": at} for n in chosen for goal, at in places if abs(at) < LENGTHS[n]]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.at, self.level = options["goal"], options["at"], options["level"]
        self.history, self.cost = [], 0.0
        return self.text(), self.info()

    def text(self):
        return f"at {self.at} of {LENGTHS[self.level]}"

    def info(self, success=False, invalid=False):
        facts = {"task": f"go {self.goal}", "history": self.history, "success": success, "cost": self.cost}
        return information(ACTIONS, ACTIONS, level=self.level, invalid=invalid, **facts)

    def step(self, action):
        before = self.at
        self.at += {"west": -1, "east": 1}.get(action, 0)
        ended = abs(self.at) >= LENGTHS[self.level]
        success = ended and (self.at > 0) == (self.goal == "east")
        reward = (1.0 if success else -0.5 if ended else 0.0) - 0.05
        self.cost -= reward
        self.history.append((action, "moved" if self.at != before else "nothing"))
        info = self.info(success, self.at == before)
        return self.text(), reward, ended, not ended and len(self.history) >= self.horizon, info

    def expert(self):
        return self.goal

    def reflection(self, action=None):
        return f"walk {self.goal}" if action is None else f"not {action} but {self.goal}"
