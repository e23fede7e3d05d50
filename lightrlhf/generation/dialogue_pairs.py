"""Dialogue pairs for REFUEL (Gao et al. 2024, 2410.04612): two roll-outs that share the prefix before turn h and
continue separately to turn l.

Here: which dialogue, turn and horizon are sampled, the roll-out of both sides, and how two scored sides become a row to
train on. All of it depends on the seed and the dialogue's index, which is unique in a run, so a stage that is resumed
gives the same rows.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightrlhf.cli.fields import at_least
from lightrlhf.cli.groups import RunArgs, SamplingArgs
from lightrlhf.data.batch import epoch_order, mix_seed
from lightrlhf.data.splits import Row, split_by_hash
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.dialogues import Dialogue, DialogueArgs, User, as_row, from_row, roll_out
from lightrlhf.generation.samplers import Sampler
from lightrlhf.generation.users import UserArgs
from lightrlhf.models.roles import Policy
from lightrlhf.training.rollout_log import turns_row

SIDES = ("first", "second")
INVALID_REWARD = -99999.0  # in place of a score that the scorer did not give


@dataclass(frozen=True, kw_only=True)
class PairArgs(RunArgs, SamplingArgs, UserArgs, DialogueArgs):
    """Pairs of dialogues."""

    horizon: Literal["random", "final"] = "random"
    """Horizon, the turn at which a dialogue is scored: uniform over the turns, or always the last."""
    prefix: Literal["policy", "dataset"] = "policy"
    """Source of the dialogue before the trained turn: the policy, or the data."""
    turn: Literal["random", "last"] = "random"
    """Trained turn: uniform up to the horizon, or only the last turn."""
    validation_percentage: float = at_least(0, 0.05, below=0.5, remedy="try 0.05", show="rarely")
    """Fraction of dialogues held out for validation, and again for test."""


# ---------------------------------------------------------------------------------------------------------- sampling
def nth_opening(rows: Sequence[Dialogue], place: int, seed: int) -> Dialogue:
    """Item `place` of an infinite seeded shuffle; its `index` is set to `place`, so it is unique."""
    epoch, within = divmod(place, len(rows))
    return dataclasses.replace(rows[int(_order(len(rows), seed, epoch)[within])], index=place)


@functools.cache
def _order(num_rows: int, seed: int, epoch: int) -> Tensor:
    return epoch_order(num_rows, seed, epoch)


def sample_turn(args: PairArgs, index: int, num_turns: int, num_prefixes: int) -> tuple[int, int]:
    """Trained turn h and horizon l of a dialogue of `num_turns`, counted from 0, from the seed and its index.

    l is uniform over the turns, or the last; h is uniform up to l among the turns that have a prefix.
    """
    rng = random.Random(f"{args.seed} {index}")
    last = num_turns - 1
    if args.turn == "last":
        return last, last
    horizon = last if args.horizon == "final" else rng.randint(0, last)
    return rng.randint(0, min(horizon, num_prefixes - 1)), horizon


def branch(
    args: PairArgs, policy: Policy, tokenizer: Tokenizer, user: User, sample: Sampler | None, rows: Sequence[Dialogue]
) -> list[Row]:
    """Two dialogues from each row that differ from a sampled turn h on and end at a sampled horizon l, as JSON rows.

    sample: see `roll_out`.
    """

    def extend(dialogues: list[Dialogue], num_turns: int | list[int], side: int) -> list[Dialogue]:
        seed, slots = mix_seed(args.seed, side), args.rollout_mini_batch_size
        return roll_out(policy, tokenizer, dialogues, num_turns, user, args, seed, slots, sample)

    if args.prefix == "policy":
        prefixes = extend([row.before(0) for row in rows], args.num_turns, 0)
        lengths = [max(row.num_turns, 1) for row in prefixes]  # 0: no room for a reply, which `make_pair` counts
        turns = [sample_turn(args, row.index, n, n) for row, n in zip(prefixes, lengths)]
        sides = [prefixes]
    else:  # the data's dialogue up to turn h, continued twice
        prefixes, sides = list(rows), []
        lengths = [args.num_turns if args.turn == "random" else row.num_turns for row in rows]
        turns = [sample_turn(args, row.index, n, row.num_turns) for row, n in zip(rows, lengths)]
    starts = [row.before(turn) for row, (turn, _) in zip(prefixes, turns)]
    ends = [horizon + 1 for _, horizon in turns]
    sides += [extend(starts, ends, side) for side in range(len(sides), 2)]
    lines = []
    for row, (turn, horizon), both in zip(rows, turns, zip(*sides)):
        columns = {name: value for name, value in row.columns.items() if name != "user_turns"}
        line: Row = {"index": row.index, "turn": turn, "horizon": horizon}
        line |= {"columns": columns} if columns else {}
        lines.append(line | {name: as_row(side) for name, side in zip(SIDES, both)})
    return lines


# ------------------------------------------------------------------------------------------------------------- pairs
def side_of(row: Row, side: str) -> Dialogue:
    """One of the two dialogues of a row of `branch`."""
    return from_row(row[side], row["index"], row.get("columns", {}))


def make_pair(args: PairArgs, row: Row, scores: Row) -> Row | str:
    """A row of `refuel_*.pt` with the higher scored side as `chosen`, or the reason why there is no such row.

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
    """The ids of both sides up to the trained turn, and the mask of that turn's tokens."""
    row: Row = {}
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        start, end = side.turn_spans[turn]
        row[f"{name}_input_ids"] = side.input_ids[:end]
        row[f"{name}_action_mask"] = torch.arange(1, end) >= start  # (T-1,)
    return row


def turn_rollout(
    tokenizer: Tokenizer,
    side: Dialogue,
    turn: int,
    group: int,
    score: float | None,
    log_ratio: torch.Tensor | None = None,
) -> Row:
    """A side as a row of `rollouts.jsonl`, whose response is all from the trained turn on; log_ratio: (N,) of its ids.

    A dialogue without that turn has an empty response.
    """
    return turns_row(
        tokenizer,
        side.input_ids,
        side.turn_spans[turn:],
        {} if log_ratio is None else {"log_ratio": [log_ratio.tolist()]},
        group=group,
        score=score,
        truncated=turn < side.num_turns and side.truncated[turn],
        columns={name: value for name, value in side.columns.items() if name != "user_turns"},
    )


def split_of(args: PairArgs, row: Row) -> str:
    """The split of a dialogue's pair, from its opening and the seed alone, so that splits share no opening."""
    opening = row["first"]["input_ids"][: row["first"]["turn_spans"][0][0]]
    share = args.validation_percentage
    return split_by_hash(repr((args.seed, opening)).encode(), {"validation": share, "test": share})
