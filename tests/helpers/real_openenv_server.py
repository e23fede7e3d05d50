"""A server of the package openenv-core, in an environment that has it, at the port that is given: guess a number.

The action is a text, or with a second argument its fields are; pings must be answered within a fifth of a second.
"""

import sys
from typing import Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import BaseModel, Field


class Say(Action):
    text: str


class Place(BaseModel):
    row: int = 0


class Guess(Action):
    number: int = Field(ge=0)
    tone: Literal["quiet", "loud"] = "quiet"
    notes: list[str] = Field(default_factory=list)
    place: Place = Place()


class Told(Observation):
    text: str


class Room(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, greeting="guess", **given):
        self.number = seed % 10
        return Told(text=greeting)

    def step(self, action, timeout_s=None, **given):
        guess = action.text if isinstance(action, Say) else str(action.number)
        if guess == "crash":
            raise RuntimeError("no luck")
        right = guess == str(self.number)
        text = "right" if right else "wrong" * (20_000 if getattr(action, "tone", "") == "loud" else 1)
        return Told(text=text, reward=right, done=right)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Room, Guess if len(sys.argv) > 2 else Say, Told, max_concurrent_envs=3)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", ws_ping_interval=0.2, ws_ping_timeout=0.2)
