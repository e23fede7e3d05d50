"""Pairs of futures: two dialogues that share all before a turn h, part there, and are rolled on to a later turn l.

What REFUEL (Gao et al. 2024, 2410.04612) learns from, as data: which dialogue, turn and horizon are sampled, both sides
rolled out, and what makes two scored sides a row for training. A dialogue's number, which no other of a run has,
decides all of it together with the seed, so a stage that was cut short gives the same again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lightrlhf.data.batch import epoch_order
from lightrlhf.data.splits import Row
from lightrlhf.generation.dialogues import Dialogue, as_row, from_row, mix_seed, roll_out
from lightrlhf.models.roles import Policy

SIDES = ("first", "second")
INVALID_REWARD = -99999.0  # of a prefix that the scorer gave no number


class Sampling(Protocol):
    """The arguments that say which futures are sampled, beside those of generation."""

    seed: int
    num_turns: int
    horizon: str  # random: uniform over the turns; final: the last one
    prefix: str  # whose dialogue precedes turn h: the policy's, or the dataset's
    turn: str  # which turn learns: random, uniform up to the horizon, or the last
    total_length: int  # longest dialogue to turn h, in tokens
    validation_percentage: float
    rollout_mini_batch_size: int


# ---------------------------------------------------------------------------------------------------------- sampling
def nth_opening(rows: Sequence[Dialogue], place: int, seed: int) -> Dialogue:
    """The dialogue at a place of the endless seeded order; its index is the place, which no other dialogue has."""
    epoch, within = divmod(place, len(rows))
    return dataclasses.replace(rows[_order(len(rows), seed, epoch)[within]], index=place)


_order = functools.cache(epoch_order)


def sample_turn(args: Sampling, index: int, num_turns: int, num_prefixes: int) -> tuple[int, int]:
    """Turn h and horizon l of a dialogue of `num_turns`, counted from 0; the seed and its index tell which.

    l is uniform over the turns, or the last; h is uniform up to l among the turns that have a prefix.
    """
    rng = random.Random(f"{args.seed} {index}")
    last = num_turns - 1
    if args.turn == "last":
        return last, last
    horizon = last if args.horizon == "final" else rng.randint(0, last)
    return rng.randint(0, min(horizon, num_prefixes - 1)), horizon


def branch(args: Any, policy: Policy, tokenizer: Any, rows: Sequence[Dialogue], user: Any) -> list[Row]:
    """Two dialogues from each row that part at a sampled turn h and go on to a sampled horizon l, as JSON lines.

    args: those of `Sampling` and of generation.
    """

    def rolled(dialogues: list[Dialogue], num_turns: Any, side: int) -> list[Dialogue]:
        seed, slots = mix_seed(args.seed, side), args.rollout_mini_batch_size
        return roll_out(policy, tokenizer, dialogues, num_turns, user, args, seed, slots)

    if args.prefix == "policy":
        whole = rolled([row.before(0) for row in rows], args.num_turns, 0)
        places = [sample_turn(args, row.index, row.num_turns, row.num_turns) for row in whole]
        both = [whole]
    else:  # a dialogue of the data that stops before turn h, gone on with twice
        whole, both = list(rows), []
        horizons = [args.num_turns if args.turn == "random" else row.num_turns for row in rows]
        places = [sample_turn(args, row.index, n, row.num_turns) for row, n in zip(rows, horizons)]
    starts = [row.before(turn) for row, (turn, _) in zip(whole, places)]
    ends = [horizon + 1 for _, horizon in places]
    both += [rolled(starts, ends, side) for side in range(len(both), 2)]
    lines = []
    for row, (turn, horizon), sides in zip(rows, places, zip(*both)):
        columns = {name: value for name, value in row.columns.items() if name != "user_turns"}
        line: Row = {"index": row.index, "turn": turn, "horizon": horizon}
        line |= {"columns": columns} if columns else {}
        lines.append(line | {name: as_row(side) for name, side in zip(SIDES, sides)})
    return lines


# ------------------------------------------------------------------------------------------------------------- pairs
def side_of(row: Row, side: str) -> Dialogue:
    """One of the two dialogues of a line that `branch` gave."""
    return from_row(row[side], row["index"], row.get("columns", {}))


def make_pair(args: Sampling, row: Row, scores: Row) -> Row | str:
    """A row of `refuel_*.pt`, the side with the higher score as `chosen`; else why there is none.

    scores: of every prefix of each side. A dialogue that its user ended before the horizon counts by its last turn.
    """
    turn, sides = row["turn"], [side_of(row, side) for side in SIDES]
    if any(side.num_turns <= turn or (side.full and side.num_turns <= row["horizon"]) for side in sides):
        return "without room for the horizon"
    if INVALID_REWARD in (*scores["first"], *scores["second"]):
        return "without a valid reward"
    if sides[0].turn_ids(turn) == sides[1].turn_ids(turn):
        return "the same reply twice"
    if max(side.turn_spans[turn][1] for side in sides) > args.total_length:
        return "too long"
    rewards = [values[min(row["horizon"], len(values) - 1)] for values in (scores["first"], scores["second"])]
    one, two = (0, 1) if rewards[0] >= rewards[1] else (1, 0)
    pair = turn_row(sides[one], sides[two], turn)
    pair |= {"chosen_reward": rewards[one], "rejected_reward": rewards[two]}
    return pair | {"columns": {"turn": turn, "horizon": row["horizon"]}}


def turn_row(chosen: Dialogue, rejected: Dialogue, turn: int) -> Row:
    """The ids of both sides to the turn that learns, and the mask of that turn's tokens."""
    row: Row = {}
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        start, end = side.turn_spans[turn]
        row[f"{name}_input_ids"] = side.input_ids[:end]
        row[f"{name}_action_mask"] = torch.arange(1, end) >= start  # (T-1,)
    return row


def split_of(args: Sampling, row: Row) -> str:
    """The split of a dialogue's pair, by its opening and the seed alone, so that no opening is in two."""
    opening = row["first"]["input_ids"][: row["first"]["turn_spans"][0][0]]
    share = int.from_bytes(hashlib.sha256(repr((args.seed, opening)).encode()).digest()[:8], "big") / 2**64
    held_out = args.validation_percentage
    return "validation" if share < held_out else "test" if share < 2 * held_out else "train"
