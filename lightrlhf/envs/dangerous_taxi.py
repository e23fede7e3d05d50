"""DangerousTaxi, after Reflect-RL (Zhou, Du and Li 2024, https://arxiv.org/abs/2402.12621): mistakes end the episode.

Gymnasium's Taxi (v4) as text. The taxi drives to the passenger, picks them up, drives to the destination and drops
them off; an action that changes nothing (a wall, nobody to pick up, no place to get out) ends the episode at once.
Rewards are Taxi's divided by 20: -0.05 a step, +1 when the passenger is delivered, -0.5 for the fatal action. The
optimal policy takes 13.1 steps on average over all starts and at most 18, so the horizon is 20 steps: within the 15
steps of the authors' code only 80.7% of the starts can be solved.

Levels: `pickup` ends with the passenger aboard, `dropoff` begins there, `full` is the whole task. The oracle uses a
table of distances, computed once from gymnasium's transitions.

Left out: Taxi's rain, changing destinations, and rendered images.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from lightrlhf.envs import Info, Start, information, text_space

ACTIONS = ["south", "north", "east", "west", "pickup", "dropoff"]
PICKUP, DROPOFF, FULL = 0, 1, 2
LEVELS = ["pickup", "dropoff", "full"]
ABOARD = 4  # gymnasium's number for a passenger inside the taxi
SCALE = 20.0
FATAL = -0.5
SHARES = {"test": 0.2, "validation": 0.1}  # of the starts; the rest is for training
RESULTS = {"pickup": "The passenger is aboard.", "dropoff": "The passenger got out."}
INSTRUCTIONS = """\
You drive a taxi in a grid of 5 x 5 cells. T is the taxi, P the waiting passenger, D the destination. The taxi is \
written O while it stands where the passenger waits, and X while the passenger is aboard; when no D is to be seen, the \
taxi stands on the destination. R, G, Y and B are the places where people may get in or out. A colon between two cells \
is open, a vertical bar is a wall; north is up. Drive to the passenger, pick them up, drive to the destination and \
drop them off. An action that changes nothing ends the ride in failure: driving into a wall or out of the grid, \
picking up where no passenger waits, dropping off anywhere but at R, G, Y or B or without a passenger."""


class Tables(NamedTuple):
    """Precomputed properties of the 500 states."""

    following: np.ndarray  # (500, 6) the next state, int64
    rewards: np.ndarray  # (500, 6) Taxi's own
    delivers: np.ndarray  # (500, 6) bool, the passenger arrives
    to_aboard: np.ndarray  # (500,) steps of a shortest path until the passenger is aboard
    to_delivery: np.ndarray  # (500,) steps of a shortest path until they arrive
    texts: list[str]
    places: list[tuple[int, int, int, int]]  # row, column, passenger, destination
    stands: list[tuple[int, int]]  # of R, G, Y, B
    starts: dict[str, list[list[int]]]  # states by split and level


@functools.cache
def tables() -> Tables:
    """Computed once per process, from gymnasium's transitions."""
    taxi: Any = gymnasium.make("Taxi-v4").unwrapped
    outcome = [[taxi.P[state][action][0] for action in range(len(ACTIONS))] for state in range(500)]
    following = np.array([[next_state for _, next_state, _, _ in row] for row in outcome])
    delivers = np.array([[bool(over) for *_, over in row] for row in outcome])
    places = [taxi.decode(state) for state in range(500)]
    aboard = np.array([passenger == ABOARD for _, _, passenger, _ in places])
    texts = [_draw_grid(taxi, *place) for place in places]
    return Tables(
        following=following,
        rewards=np.array([[reward for _, _, reward, _ in row] for row in outcome]),
        delivers=delivers,
        to_aboard=_distances(following, aboard[following] & ~aboard[:, None]),
        to_delivery=_distances(following, delivers),
        texts=texts,
        places=places,
        stands=list(taxi.locs),
        starts=_split_starts(places, taxi.locs),
    )


def _distances(following: np.ndarray, arrives: np.ndarray) -> np.ndarray:
    """(500,) steps of a shortest path to a transition that `arrives`: breadth-first search backwards from the goal."""
    distance = np.full(len(following), np.inf)
    distance[arrives.any(1)] = 1
    for steps in range(2, len(following)):
        near = (distance[following] == steps - 1).any(1) & np.isinf(distance)
        if not near.any():
            return distance
        distance[near] = steps
    return distance


def _draw_grid(taxi: Any, row: int, column: int, passenger: int, destination: int) -> str:
    grid = [[letter.decode() for letter in line] for line in taxi.desc]
    cell = lambda place: (1 + place[0], 1 + 2 * place[1])
    marks = {cell(taxi.locs[destination]): "D"}
    if passenger != ABOARD:
        marks[cell(taxi.locs[passenger])] = "P"
    here = cell((row, column))
    marks[here] = "X" if passenger == ABOARD else "O" if marks.get(here) == "P" else "T"
    for (line, place), mark in marks.items():
        grid[line][place] = mark
    return "\n".join("".join(line) for line in grid)


def _split_starts(places: list[tuple[int, int, int, int]], stands: list[tuple[int, int]]) -> dict[str, list[list[int]]]:
    """Starts by split and level. `pickup` and `full` have the same states in each split."""
    waiting = [s for s, (_, _, passenger, destination) in enumerate(places) if passenger not in (ABOARD, destination)]
    riding = [
        s
        for s, (row, column, passenger, destination) in enumerate(places)
        if passenger == ABOARD and (row, column) != stands[destination]
    ]
    divided: dict[str, list[list[int]]] = {split: [[], [], []] for split in ("train", "validation", "test")}
    for levels, states in (((PICKUP, FULL), waiting), ((DROPOFF,), riding)):
        random.Random("DangerousTaxi").shuffle(states)
        test, validation = (round(SHARES[name] * len(states)) for name in ("test", "validation"))
        parts = {"test": states[:test], "validation": states[test : test + validation]}
        for split, part in (parts | {"train": states[test + validation :]}).items():
            for level in levels:
                divided[split][level] = part
    return divided


class DangerousTaxi(gymnasium.Env):
    """The taxi as a text environment; see `lightrlhf.envs.TextEnv`.

    horizon:      steps until an episode is truncated
    pickup_bonus: extra reward when the passenger is picked up for the first time
    first_step:   end after one step, with reward 1 and success if a shortest path begins with it
    split, level: pool of starts for a `reset` without options; all states of the level when no split is given
    """

    metadata = {"render_modes": ["ansi"]}
    actions = ACTIONS
    levels = LEVELS
    instructions = INSTRUCTIONS

    def __init__(
        self,
        horizon: int = 20,
        pickup_bonus: float = 0.0,
        first_step: bool = False,
        split: str | None = None,
        level: int = FULL,
        render_mode: str | None = None,
    ) -> None:
        if horizon < 1:
            raise ValueError(f"horizon {horizon} must be at least 1")
        if level not in range(len(LEVELS)):
            raise ValueError(f"level {level} must be 0, 1 or 2: {', '.join(LEVELS)}")
        self.horizon, self.pickup_bonus, self.first_step = horizon, pickup_bonus, first_step
        self.render_mode = render_mode
        self._tables = tables()
        splits = list(self._tables.starts) if split is None else [split]
        self._drawn_from = [start for name in splits for start in self.starts(name, level)]
        self.observation_space = text_space(max_length=128)
        self.action_space = text_space(max_length=128)
        self._state, self._level = 0, level
        self._over = True

    def starts(self, split: str, level: int | None = None) -> list[Start]:
        """Fixed starts of a split: dicts of state and level. Raises: ValueError for an unknown split."""
        if split not in self._tables.starts:
            raise ValueError(f"split {split} must be one of {', '.join(self._tables.starts)}")
        levels = range(len(LEVELS)) if level is None else [level]
        return [{"state": state, "level": each} for each in levels for state in self._tables.starts[split][each]]

    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        """`options`: a start, and `horizon`, `pickup_bonus` or `first_step` for this episode alone."""
        super().reset(seed=seed)
        options = options or {}
        if "state" not in options:
            options = self._drawn_from[int(self.np_random.integers(len(self._drawn_from)))] | options
        self._state, self._level = int(options["state"]), int(options["level"])
        self._check_start()
        self._horizon = int(options.get("horizon", self.horizon))
        self._bonus = float(options.get("pickup_bonus", self.pickup_bonus))
        self._first_step = bool(options.get("first_step", self.first_step))
        self._history: list[tuple[str, str]] = []
        self._cost = 0.0
        self._over = self._success = self._was_aboard = False
        return self._tables.texts[self._state], self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One action; a text that is not one of `actions` changes nothing, so it is fatal."""
        if self._over:
            raise RuntimeError("the episode is over; call reset")
        before = self._state
        index = ACTIONS.index(action) if action in ACTIONS else None
        is_right = self._first_step and index is not None and self._steps_after(action) < self._steps_left()
        if index is not None:
            self._state = int(self._tables.following[before, index])
            self._success = bool(self._tables.delivers[before, index])
        invalid = self._state == before
        if invalid:
            reward, result = FATAL, "Nothing changed."
        else:
            reward = float(self._tables.rewards[before, index]) / SCALE
            result = RESULTS.get(action, "The taxi moved.")
        if action == "pickup" and not invalid and not self._was_aboard:
            self._was_aboard = True
            reward += self._bonus
            if self._level == PICKUP:
                self._success, reward = True, reward + 1.0 + 1.0 / SCALE  # the same +1 as for a delivery
        if is_right:
            self._success, reward = True, 1.0
        self._history.append((action, result))
        self._cost -= reward
        self._over = terminated = invalid or self._success or self._first_step
        truncated = not terminated and len(self._history) >= self._horizon
        self._over |= truncated
        return self._tables.texts[self._state], reward, terminated, truncated, self._info(invalid)

    def expert(self) -> str | None:
        """The next action of a shortest path; the first in the order of `actions` if there are several."""
        if self._over:
            return None
        return next(action for action in ACTIONS if self._steps_after(action) < self._steps_left())

    def reflection(self, action: str | None = None) -> str:
        """The taxi's position, what would be fatal or wrong, and the next action."""
        best = self.expert()
        if best is None:
            return ""
        row, column, passenger, destination = self._tables.places[self._state]
        goal = self._tables.stands[destination if passenger == ABOARD else passenger]
        aim = "the destination" if passenger == ABOARD else "the passenger"
        where = f"The taxi is in row {row}, column {column}, {aim} in row {goal[0]}, column {goal[1]}."
        if action is None:
            fatal = [other for other in ACTIONS if self._is_fatal(other)]
            return f"{where} Fatal: {', '.join(fatal)}. Next: {best}."
        if not self._is_fatal(action) and self._steps_after(action) < self._steps_left():
            return ""
        return f"{where} Not {action}: {self._objection(action, passenger)}. Instead: {best}."

    def render(self) -> str:
        """The grid."""
        return self._tables.texts[self._state]

    def _objection(self, action: str, passenger: int) -> str:
        if action not in ACTIONS:
            return "that is no action and would be fatal"
        if not self._is_fatal(action):
            return "the destination is elsewhere" if action == "dropoff" else "it leads away"
        if action == "pickup":
            return "the passenger is aboard" if passenger == ABOARD else "nobody waits here"
        if action == "dropoff":
            return "nobody may get out here" if passenger == ABOARD else "nobody is aboard"
        return "a wall is there"

    def _steps_left(self) -> float:
        distances = self._tables.to_aboard if self._level == PICKUP else self._tables.to_delivery
        return float(distances[self._state])

    def _steps_after(self, action: str) -> float:
        """Steps that remain after an action, infinite after a fatal one."""
        index = ACTIONS.index(action)
        after = self._tables.following[self._state, index]
        if after == self._state:
            return np.inf
        if self._level == PICKUP:
            return 0.0 if action == "pickup" else self._tables.to_aboard[after]
        return 0.0 if self._tables.delivers[self._state, index] else self._tables.to_delivery[after]

    def _is_fatal(self, action: str) -> bool:
        return action not in ACTIONS or self._tables.following[self._state, ACTIONS.index(action)] == self._state

    def _check_start(self) -> None:
        if self._level not in range(len(LEVELS)):
            raise ValueError(f"level {self._level} must be 0, 1 or 2: {', '.join(LEVELS)}")
        if not 0 <= self._state < len(self._tables.places):
            raise ValueError(f"state {self._state} must be from 0 to {len(self._tables.places) - 1}")
        *_, passenger, destination = self._tables.places[self._state]
        if passenger == destination or (passenger == ABOARD) != (self._level == DROPOFF):
            raise ValueError(f"no episode of level {LEVELS[self._level]} begins in state {self._state}")

    def _info(self, invalid: bool = False) -> Info:
        return information(
            ACTIONS,
            ACTIONS,
            history=self._history,
            success=self._success,
            cost=self._cost,
            level=self._level,
            invalid=invalid,
        )
