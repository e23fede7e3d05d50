"""Environments of TextArena and SkyRL-gym for `--env`, each by one class.

    pip install textarena
    lightrlhf grpo --env examples/text_games.py:TextArena --env_options game=GuessTheNumber-v0 max_turns=5 ...

    pip install skyrl-gym
    lightrlhf grpo --env examples/text_games.py:SkyRLGym --env_options name=gsm8k_multi_turn ...

TextArena's 0.7 and SkyRL-gym's 0.4 were tried (`make test-harness`). Left out: games for two players.
"""

from __future__ import annotations

from typing import Any

from lightrlhf.generation.episode_env import Answer, Json, Message


class TextArena:
    """A game of TextArena for one player, in gymnasium's form: the reward comes with the end.

    TextArena draws a game from the global `random`, which the process of an environment has to itself.
    """

    def __init__(self, game: str, **options: Any) -> None:
        import textarena

        self.own_action = textarena.ObservationType.PLAYER_ACTION
        self.game = textarena.make(f"{game}-raw", **options)  # without wrappers, which repeat the whole dialogue

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.game.reset(num_players=1, seed=seed)
        return self.news(), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, info = self.game.step(action=text)
        if not done:
            return self.news(), 0.0, False, False, info
        rewards, infos = self.game.close()
        return infos[0].get("reason", ""), rewards[0], True, False, infos[0]

    def news(self) -> str:
        """What the player has not read yet; their own words stand in the dialogue already."""
        _, observed = self.game.get_observation()
        return "\n".join(str(text) for _, text, kind in observed if kind is not self.own_action)


class SkyRLGym:
    """An environment of SkyRL-gym, made anew for each episode: a row's columns are its `extras`."""

    tools: list[Json] | None = None
    gives_reward = True
    has_outcome = False
    is_stateless = False

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        import skyrl_gym

        self.env = skyrl_gym.make(self.name, env_config={}, extras=row)
        messages, _ = self.env.init([])  # what it adds to the prompt
        return messages

    def step(self, reply: Message) -> Answer:
        said = self.env.step(reply.get("content") or "")
        return Answer(said["observations"], said["reward"], said["done"], counts={"calls": 1})

    def finish(self, stop_reason: str) -> float | None:
        self.env.close()
        return 0.0  # all rewards came with the turns
