"""Curriculum: the stages of training in a text environment, and the starts of each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import epoch_order
from lightrlhf.envs.agents import MOST_STEPS


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    levels: tuple[int, ...]
    most_decisions: int = MOST_STEPS


def curriculum(args: Any, names: Sequence[str]) -> list[Stage]:
    """The stages, each for an equal share of the iterations. Raises: UsageError when a level is unknown."""
    unknown = [name for name in args.levels if name not in names]
    if unknown:
        raise UsageError(f"--levels {unknown[0]} is none of the environment's: {', '.join(names)}")
    chosen = [number for number, name in enumerate(names) if not args.levels or name in args.levels]
    if not args.depth_curriculum:
        groups = [chosen]
    else:
        groups = [[level] for level in chosen]
        if args.merge_first_two:
            groups = [sum(groups[:2], []), *groups[2:]]
        if args.merge_after_first_k:
            first, rest = groups[: args.merge_after_first_k], groups[args.merge_after_first_k :]
            groups = [*first, *([sum(rest, [])] if rest else [])]
    stages = [Stage(tuple(group)) for group in groups]
    return [Stage(stages[0].levels, most_decisions=1), *stages] if args.first_step else stages


def starts_of(
    stage: Stage, train: dict[int, list[dict[str, Any]]], step: int, number: int, args: Any
) -> list[dict[str, Any]]:
    """The starts of an iteration, `number` ones `group_size` times: the stage's in an order that is new each pass."""
    pool = [start for level in stage.levels for start in train[level]]
    found = []
    for place in range(step * number, (step + 1) * number):
        turn, index = divmod(place, len(pool))
        found.append(pool[epoch_order(len(pool), args.seed, turn)[index]])
    if stage.most_decisions == 1:
        found = [start | {"first_step": True} for start in found]  # for what an environment then takes for success
    if args.leaveout_prob:
        found = [start | {"leaveout_prob": args.leaveout_prob} for start in found]
    return [start for start in found for _ in range(args.group_size)]
