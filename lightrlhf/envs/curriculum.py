"""Curriculum: the stages of training in a text environment, and the starts of each iteration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import epoch_order
from lightrlhf.envs import Start
from lightrlhf.envs.episodes import MAX_STEPS


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    levels: tuple[int, ...]
    max_decisions: int = MAX_STEPS


def curriculum(names: Sequence[str], levels: Sequence[str] = (), stages: str | None = None) -> list[Stage]:
    """The stages of `--stages`, or one of the chosen `levels`, by default all of `names`, the environment's levels.

    Raises: UsageError when a level is unknown.
    """
    chosen = [name for name in names if not levels or name in levels]
    parts = [(chosen, MAX_STEPS)] if stages is None else split_stages(stages)
    for flag, wanted in [("--levels", levels), *(("--stages", part) for part, _ in parts)]:
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise UsageError(f"{flag} {unknown[0]} is not a level of the environment; it has {', '.join(names)}")
    return [Stage(tuple(names.index(name) for name in part), limit) for part, limit in parts]


def split_stages(text: str, flag: str = "--stages") -> list[tuple[list[str], int]]:
    """Level names and maximum decisions of each stage of `--stages`: `a; b+c` are two stages, `a/1` is one decision.

    Raises: ValueError when a stage or a level has no name.
    """
    stages = []
    for part in text.split(";"):
        members, slash, limit = part.strip().rpartition("/1")
        is_short = bool(slash) and not limit
        levels = [name.strip() for name in (members if is_short else part).split("+")]
        if "" in levels:
            raise ValueError(f'{flag} {text!r} has a level without a name; write stages such as "pickup; dropoff+full"')
        stages.append((levels, 1 if is_short else MAX_STEPS))
    return stages


def starts_of(
    stage: Stage,
    pools: Mapping[int, Sequence[Start]],
    step: int,
    number: int,
    seed: int,
    repeats: int = 1,
    leaveout_prob: float = 0.0,
) -> tuple[list[int], list[Start]]:
    """The starts of an iteration, their numbers first: `number` different ones, each `repeats` times in a row.

    pools: training starts by level, numbered one level after the other. A stage's starts are taken in an order that is
    shuffled anew in each pass.
    """
    first = dict(zip(pools, itertools.accumulate(map(len, pools.values()), initial=0)))  # number in each level
    pool = [(first[level] + i, start) for level in stage.levels for i, start in enumerate(pools[level])]
    drawn = []
    for position in range(step * number, (step + 1) * number):
        epoch, index = divmod(position, len(pool))
        drawn.append(pool[epoch_order(len(pool), seed, epoch)[index]])
    if stage.max_decisions == 1:
        # an environment may define success differently
        drawn = [(i, start | {"first_step": True}) for i, start in drawn]
    if leaveout_prob:
        drawn = [(i, start | {"leaveout_prob": leaveout_prob}) for i, start in drawn]
    repeated = [one for one in drawn for _ in range(repeats)]
    return [i for i, _ in repeated], [start for _, start in repeated]
