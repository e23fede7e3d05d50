"""REFUEL online, with the data's user messages: setting two of Gao et al. 2024 (2410.04612).

Each step rolls dialogues of the data out from a random turn h to their ends, twice, with the recorded user, and learns
from the pairs by the loss of `lightrlhf.refuel`. R = s - c (S_old - S_ref) at turn h, where s is the score of the whole
dialogue and c `--init_kl_coeff`; a dialogue whose turn h was cut by its length has the score `--penalty_reward_value`.

Left out: a critic, and an adaptive KL weight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightrlhf import refuel
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least
from lightrlhf.cli.groups import EvalIntervalArgs, FrozenModelsArgs, RolloutLogArgs, ServerArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import dialogue_pair_batch, mix_seed
from lightrlhf.data.flat import Rows, chained
from lightrlhf.data.rows import Splits
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation import dialogue_pairs, samplers, users
from lightrlhf.generation import dialogues as talks
from lightrlhf.generation.dialogues import Dialogue, DialogueArgs, User
from lightrlhf.maths import ops
from lightrlhf.models import given, roles, sharding
from lightrlhf.rewards import functions, loading, scorers
from lightrlhf.training import reference as scoring
from lightrlhf.training import rollout_log
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin

GAP = ("sampling/kl", "sampling/ratio_max")  # between servers and trainer, of the first replies of a step


@dataclass(frozen=True, kw_only=True)
class OnlineRefuelArgs(
    refuel.RegressionArgs, EvalIntervalArgs, DialogueArgs, ServerArgs, RolloutLogArgs, FrozenModelsArgs
):
    """Multi-turn RLHF by regression on relative futures, from dialogues rolled out while training."""

    experiment_name: str = "rlhf-online-refuel"
    """Folder below `log_dir` for the runs of one algorithm."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    rollout_size: int = at_least(1, 32)
    """Dialogues per step and device; each yields one pair."""
    ppo_epochs: int = at_least(1, 4)
    """Passes over the pairs of a step."""
    init_kl_coeff: float = at_least(0, 0.05)
    """Weight of the KL penalty in the reward: the log-ratio to the initial policy at the trained turn."""
    penalty_reward_value: float = -2.0
    """Score of a dialogue whose trained turn was truncated."""
    whiten_rewards: bool = False
    """Whiten the rewards of a step (mean 0, variance 1) over both sides and all devices."""


# ---------------------------------------------------------------------------------------------------------- program
def train(
    args: OnlineRefuelArgs,
    *,
    policy: Any = None,
    tokenizer: Tokenizer | None = None,
    dialogues: Mapping[str, Sequence[Dialogue]] | None = None,
    user: User | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by online REFUEL; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; dialogues: by split,
    `train` and `validation`; user: see `User`, by default the data's own messages; reward: f(prompts, completions,
    **columns) -> a number or None for each; on_step: called with (step, metrics) where metrics are logged, may raise
    `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    objects = {"policy": policy, "tokenizer": tokenizer, "dialogues": dialogues, "user": user, "reward": reward}
    load = (load_splits, given.load_start, check_dialogues)
    run, start = begin(args, OnlineRefuelArgs, "online_refuel", *load, objects, on_step)
    pad_id = start.tokenizer.pad_token_id
    rows = with_room(run, start.policy, start.rows)
    held_out = with_room(run, start.policy, start.held_out)[: args.eval_dialogues]
    run.order.name_rows("dialogues")
    reference = run.freeze(start.policy.reference())
    settings = (args, run.device, args.rollout_mini_batch_size, reward)
    kinds: dict[str, Any] = {"wrap_prompts": args.rm_chat_template, "grouped": True, "freeze": run.freeze}
    scorer = loading.load_rewards(*settings, **kinds).of_groups
    num_steps = run.order.num_steps(rows, args.rollout_size)
    num_parts = math.ceil(args.rollout_size / args.mini_batch_size)  # mini-batches of an epoch
    model = run.setup("policy", start.policy, args.learning_rate, num_steps * args.ppo_epochs * num_parts)
    served = samplers.ServedSampler(args, start.policy, start.tokenizer, run) if args.rollout_server else None
    sampler = DialogueSampler(run, model, user or users.recorded_user, start.tokenizer, served)
    run.keep(start.policy, start.tokenizer)

    def measure() -> Metrics:  # `pairs` are the last step's
        refuel.log_replies(run, start.policy, pairs.rows[:2], start.tokenizer, "train")
        return evaluate(run, sampler, scorer, held_out)

    for step in run.steps(num_steps):
        drawn = run.order.draw(len(rows), step, args.rollout_size)
        mine = [rows[i] for i in run.ranks.shard(drawn)]
        with run.phase("rollout", [row.index for row in mine]):
            pairs, metrics = make_pairs(run, sampler, reference, scorer, mine)  # R and S_old of two continuations each
        with run.phase("update"):
            parts = min(num_parts, len(drawn) // run.ranks.world_size)  # as many on each rank
            for epoch in range(args.ppo_epochs):
                generator = run.ranks.generator(step, epoch, run.ranks.rank)
                order = torch.randperm(len(pairs.rows), generator=generator).tolist()
                for part in range(parts):
                    index = order[len(order) * part // parts : len(order) * (part + 1) // parts]
                    metrics |= refuel.train_step(run, model, pairs.select(index), pad_id)
        run.end_step(metrics, pairs.rows, measure if held_out else None)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ data
def load_splits(
    args: OnlineRefuelArgs, dialogues: Mapping[str, Sequence[Dialogue]] | None, tokenizer: Tokenizer
) -> Splits[Dialogue]:
    """The dialogues of both splits, given ones or `--data_dir`'s, with the same columns."""
    if dialogues is None:
        splits = ("train", "validation") if args.eval_dialogues and args.eval_interval else ("train",)
        dialogues = {split: talks.load_dialogues(args.data_dir, split, args.verify) for split in splits}
    rows = talks.share_columns(dialogues)
    return Splits([rows["train"]], rows.get("validation", chained([])))


def check_dialogues(args: OnlineRefuelArgs, policy: roles.Policy, rows: Sequence[Dialogue]) -> None:
    """Raises: UsageError when the model has no embedding for a token of the dialogues."""
    talks.check_embedded(rows, policy, args.data_dir)


def with_room(run: Run[OnlineRefuelArgs], policy: roles.Policy, rows: Sequence[Dialogue]) -> Sequence[Dialogue]:
    """The dialogues that fit into the model's positions and `--total_length` with turns of maximal length.

    Raises: UsageError when none of them does.
    """
    args = run.args
    if not rows:
        return rows
    fits = talks.longest_lengths(rows, args.max_new_tokens) <= min(roles.max_positions(policy), args.total_length)
    if not fits.any():
        raise UsageError(
            f"--max_new_tokens {args.max_new_tokens} in each turn does not fit into --total_length {args.total_length} "
            f"or the model's positions for any dialogue of {args.data_dir}; give fewer"
        )
    if fits.all():
        return rows
    run.print0(f"{int((~fits).sum()):,} of {len(rows):,} dialogues could become too long and are left out")
    places, chosen = fits.nonzero()[:, 0], chained([rows])
    return cast(Sequence[Dialogue], chosen.select(places) if isinstance(chosen, Rows) else [rows[i] for i in places])


# --------------------------------------------------------------------------------------------------------- roll-outs
@dataclass
class DialogueSampler:
    """Continues dialogues with a user: the policy's turns are sampled in this process, or on servers."""

    run: Run[OnlineRefuelArgs]
    model: nn.Module
    user: User
    tokenizer: Tokenizer
    served: samplers.ServedSampler | None

    def roll_out(self, starts: Sequence[Dialogue], ends: Sequence[int], key: int) -> list[Dialogue]:
        """Continue dialogues of this rank to `ends` assistant turns each; key: of the noise, besides the run's seed."""
        args = self.run.args
        policy: Any = getattr(self.model, "module", self.model)
        with sharding.gather_shards(policy) if self.served is None else nullcontext():
            seed, slots = mix_seed(args.seed, key), args.rollout_mini_batch_size
            return talks.roll_out(policy, self.tokenizer, starts, ends, self.user, args, seed, slots, self.served)


def make_pairs(
    run: Run[OnlineRefuelArgs],
    sampler: DialogueSampler,
    reference: nn.Module,
    scorer: scorers.GroupScorer,
    rows: Sequence[Dialogue],
) -> tuple[refuel.Pairs, Metrics]:
    """A pair from each dialogue of this rank, and metrics over all ranks.

    R = s - init_kl_coeff (S_old - S_ref) at turn h, whitened over both sides and all ranks if requested. A pair without
    two valid scores is left out, so ranks may have different numbers of pairs, or none.
    """
    args, device = run.args, run.device
    turns = [random.Random(f"{args.seed} {run.step} {row.index}").randrange(row.num_turns) for row in rows]
    starts, ends = [row.before(h) for row, h in zip(rows, turns)], [row.num_turns for row in rows]
    sides = [sampler.roll_out(starts, ends, mix_seed(run.step, i)) for i in range(2)]
    scores = score_dialogues(scorer, [dialogue for side in sides for dialogue in side])
    truncated = [dialogue.truncated[h] for side in sides for dialogue, h in zip(side, turns)]
    scores = [args.penalty_reward_value if is_cut else score for is_cut, score in zip(truncated, scores)]
    pair_rows = [dialogue_pairs.turn_row(one, two, h) | {"row": one.index} for one, two, h in zip(*sides, turns)]
    width = max((len(row[f"{side}_action_mask"]) for row in pair_rows for side in refuel.SIDES), default=0)
    logprobs, ref_logprobs = torch.zeros(2, 2, len(rows), width, device=device)  # (2, B, T-1) each
    collate = partial(dialogue_pair_batch, pad_id=sampler.tokenizer.pad_token_id)
    settings = (pair_rows, collate, 2, args.temperature)
    old_logps = scoring.score_shard(run, sampler.model, *settings, logprobs).cpu()  # (2, B)
    kl = old_logps - scoring.score_shard(run, reference, *settings, ref_logprobs).cpu()  # (2, B)
    log_sides(run, sampler.tokenizer, turns, sides, scores, (logprobs - ref_logprobs).cpu())
    score = torch.tensor([math.nan if score is None else score for score in scores]).reshape(2, -1)
    valid = score.isfinite().all(0).expand_as(score)  # (2, B): both sides of the pair have a score
    rewards = torch.where(valid, score - args.init_kl_coeff * kl, 0.0)
    if args.whiten_rewards:
        rewards = ops.whiten(rewards, valid, sum_over_ranks=run.ranks.sum)
    sums = torch.stack([valid.sum(), torch.where(valid, score, 0.0).sum(), rewards.sum(), kl.sum()]).double()
    tokens = sum(int(row[f"{side}_action_mask"].sum()) for row in pair_rows for side in refuel.SIDES)
    counts = torch.tensor([kl.numel(), sum(truncated), tokens])
    totals = run.ranks.sum(torch.cat([sums, counts])).tolist()
    num_valid, score_sum, reward_sum, kl_sum, num_sides, num_cut, num_tokens = totals
    served = {} if sampler.served is None else sampler.served.metrics
    gap = {name: served[name] for name in GAP if name in served}
    kept = valid[0].nonzero()[:, 0].tolist()
    return refuel.Pairs(pair_rows, rewards, old_logps).select(kept), gap | {
        "objective/score": score_sum / num_valid if num_valid else math.nan,
        "objective/reward": reward_sum / num_valid if num_valid else math.nan,
        "objective/kl": kl_sum / num_sides,
        "objective/valid_ratio": num_valid / num_sides,
        "completions/truncated_ratio": num_cut / num_sides,
        "completions/mean_length": num_tokens / num_sides,
    }


def log_sides(
    run: Run[OnlineRefuelArgs],
    tokenizer: Tokenizer,
    turns: Sequence[int],
    sides: Sequence[Sequence[Dialogue]],
    scores: Sequence[float | None],
    log_ratios: Tensor,
) -> None:
    """Log both sides of the first dialogues; scores: of all first sides, then the second ones; log_ratios: (2, B, T-1)
    of the trained turns."""
    number = rollout_log.num_logged(run, len(scores))
    if not number:
        return
    with rollout_log.writing_rollouts(run):
        rows = []
        for place in range(number):
            i, side = divmod(place, 2)
            start, end = sides[side][i].turn_spans[turns[i]]
            score, log_ratio = scores[side * len(turns) + i], log_ratios[side, i, start - 1 : end - 1]
            rows.append(dialogue_pairs.turn_rollout(tokenizer, sides[side][i], turns[i], i, score, log_ratio))
        rollout_log.append_rollouts(run, rows)


def score_dialogues(scorer: scorers.GroupScorer, dialogues: Sequence[Dialogue]) -> list[float | None]:
    """The score of each whole dialogue."""
    return [score for (score,) in scorer([[talks.sample_of(row, row.num_turns - 1)] for row in dialogues])]


def evaluate(
    run: Run[OnlineRefuelArgs], sampler: DialogueSampler, scorer: scorers.GroupScorer, rows: Sequence[Dialogue]
) -> Metrics:
    """Mean valid score of held-out dialogues from their openings, with the same noise each time; NaN without any."""
    shard = run.ranks.shard(run.order.eval_rows(rows, run.args.rollout_mini_batch_size))
    starts, ends = [row.before(0) for row in shard], [row.num_turns for row in shard]
    dialogues = sampler.roll_out(starts, ends, -1)
    scores = [score for score in score_dialogues(scorer, dialogues) if score is not None]
    total, count = run.ranks.total(sum(scores)), run.ranks.total(len(scores))
    return {"val/score": total / count if count else math.nan}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(OnlineRefuelArgs, argv)))


if __name__ == "__main__":
    main()
