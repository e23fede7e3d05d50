"""Environments of episodes in this process, whose answers come in any order."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from lightrlhf.generation.episode_env import Answer, Fault


class LocalPool:
    """A pool of `size` environments in this process. An exception becomes a `Fault`; no process can be lost."""

    def __init__(self, make: Callable[[], Any], size: int = 100, order: int = 0, gives_reward: bool = True) -> None:
        self.make, self.size, self.order = make, size, random.Random(order)
        self.tools, self.gives_reward = make().tools, gives_reward
        self.envs: dict[int, Any] = {}
        self.asked: list[tuple[int, str, tuple[Any, ...]]] = []
        self.log: list[tuple[int, str, tuple[Any, ...]]] = []

    def reset(self, episode: int, seed: int, row: dict[str, Any]) -> None:
        self._ask(episode, "reset", seed, row)

    def step(self, episode: int, reply: dict[str, Any]) -> None:
        self._ask(episode, "step", reply)

    def finish(self, episode: int, stop_reason: str) -> None:
        self._ask(episode, "finish", stop_reason)

    def drop(self, episode: int) -> None:
        del self.envs[episode]

    def _ask(self, episode: int, name: str, *values: Any) -> None:
        self.asked.append((episode, name, values))
        self.log.append(self.asked[-1])

    def results(self) -> Iterator[tuple[int, Any]]:
        while ready := [one for one in self.asked if one[0] in self.envs or len(self.envs) < self.size]:
            one = self.order.choice(ready) if len(self.envs) >= self.size or self.order.random() < 0.5 else ready[0]
            self.asked.remove(one)
            episode, name, values = one
            env = self.envs.setdefault(episode, None) or self.make()
            self.envs[episode] = env
            try:
                result = getattr(env, name)(*values)
            except ZeroDivisionError as problem:
                result = Fault("errors", str(problem))
            broke = isinstance(result, Answer) and result.done and result.stop_reason.startswith("env_")
            if name == "finish" or isinstance(result, Fault) or broke:
                del self.envs[episode]
            yield episode, result


class Told:
    """An environment without tools that takes `num_turns` turns; its outcome is the length of what was said."""

    tools: Any = None

    def __init__(self, num_turns: int = 2) -> None:
        self.num_turns, self.said = num_turns, []

    def reset(self, seed: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.seed, self.said = seed, []
        return []

    def step(self, reply: dict[str, Any]) -> Answer:
        self.said.append(reply["content"])
        if len(self.said) == self.num_turns:
            return Answer(done=True)
        return Answer([{"role": "user", "content": f"And {len(self.said)}?"}])

    def finish(self, stop_reason: str) -> float:
        return float(sum(map(len, self.said)))
