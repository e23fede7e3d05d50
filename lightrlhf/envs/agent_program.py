"""A program that speaks OpenAI's chat as an environment: it plays a whole episode by itself.

    async def solve(task, base_url, api_key):
        ...
        return reward

task: the columns of the prompt's row, its `messages`, and the group's `seed`; address and key are of a session of
`lightrlhf.serve`, for this episode alone. None or an exception: the episode has no reward. A plain function works, too.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from lightrlhf.cli.functions import load_function
from lightrlhf.generation.episode_env import Answer, Json, Message

SHAPE = "async f(task, base_url, api_key) -> reward or None"


class AgentProgram:
    """An `EpisodeEnv` of which the one step is the program's run; its message has `base_url` and `api_key`."""

    tools: list[Json] | None = None
    gives_reward = True
    is_stateless = False

    def __init__(self, path: str) -> None:
        self.function = load_function(path, "--agent", SHAPE, takes_columns=False)
        self.runner = asyncio.Runner()  # of all episodes: clients that a program forgot to close do so in its open loop

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        self.task = {**row, "seed": seed}
        return []

    def step(self, reply: Message) -> Answer:
        found = self.function(self.task, reply["base_url"], reply["api_key"])
        self.reward = self.runner.run(awaited(found)) if inspect.isawaitable(found) else found
        return Answer(done=True)

    def finish(self, stop_reason: str) -> float | None:
        return self.reward


async def awaited(value: Any) -> Any:
    """The result of anything that can be awaited; tasks that it leaves behind end with it."""
    try:
        return await value
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
