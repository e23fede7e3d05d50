"""Logs of episodes: rows of `rollouts.jsonl`, stories of evaluations, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs.episodes import Episode, PlayedBatch, rates_by_level
from lightrlhf.storage.writing import write_text
from lightrlhf.training.rollout_log import append_rollouts, num_logged, turns_row, writing_rollouts
from lightrlhf.training.run import Metrics, Run

NUM_STORIES = 4  # of an evaluation


def log_episodes(
    run: Run[Any],
    episodes: Sequence[Episode],
    played: PlayedBatch,
    tokenizer: Tokenizer,
    group_size: int,
    log_ratio: Tensor | None,
    **columns: Tensor,
) -> None:
    """Log whole episodes, a row each; log_ratio: (B, T-1) of their decisions, columns: `advantages` and others, (B,).

    The first prompt is the row's prompt; its response has each action and, between them, the next whole prompt.
    """
    kept = episodes[: num_logged(run, len(episodes))]
    if not kept:
        return
    by_token = {name: column[:, None].expand(played.action_mask.shape) for name, column in columns.items()}
    by_token |= {} if log_ratio is None else {"log_ratio": log_ratio}
    with writing_rollouts(run):
        rows = []
        for number, episode in enumerate(kept):
            at = (played.episode == number).nonzero()[:, 0]
            numbers = {name: [row[i][played.action_mask[i]].tolist() for i in at] for name, row in by_token.items()}
            rows.append(episode_row(episode, tokenizer, number // group_size, numbers))
        append_rollouts(run, rows)


def episode_row(episode: Episode, tokenizer: Tokenizer, group: int, numbers: dict[str, list[list[float]]]) -> Row:
    """An episode as a row of `rollouts.jsonl`; numbers: see `turns_row`."""
    ids: list[int] = []
    spans = []
    for one in episode.decisions:
        start = len(ids) + len(one.prompt_ids)
        ids += one.prompt_ids + one.response_ids
        spans.append((start, len(ids)))
    score = sum(one.reward for one in episode.decisions)
    columns = {name: getattr(episode, name) for name in ("task", "level", "success", "cost")}
    rewards = {"environment": score}
    return turns_row(tokenizer, ids, spans, numbers, group=group, score=score, rewards=rewards, columns=columns)


def episode_metrics(run: Run[Any], episodes: Sequence[Episode], levels: Sequence[str]) -> Metrics:
    """Success, cost, length and invalid actions; neither the entropy bonus nor the KL penalty enters them."""
    overall, by_level = rates_by_level(episodes, levels, run.ranks.sum)
    logprobs = [value for one in episodes for decision in one.decisions for value in decision.logprobs]
    entropy = run.ranks.total(-sum(logprobs)) / max(run.ranks.total(len(logprobs)), 1.0)
    metrics = {"objective/score": overall.pop("reward"), "objective/entropy": entropy}
    metrics |= {f"episodes/{name}": value for name, value in overall.items()}
    for level, row in by_level.items():
        metrics |= {f"success/{level}": row["success"], f"cost/{level}": row["cost"]}
    return metrics


def held_out_metrics(run: Run[Any], episodes: Sequence[Episode], levels: Sequence[str]) -> Metrics:
    """Success, cost, length and invalid actions of held-out episodes, and success on each level."""
    overall, by_level = rates_by_level(episodes, levels, run.ranks.sum)
    metrics = {f"val/{name}": value for name, value in overall.items()}
    return metrics | {f"val/success/{level}": row["success"] for level, row in by_level.items()}


def write_trajectories(run: Run[Any], episodes: Sequence[Episode]) -> None:
    """Write the first `NUM_STORIES` episodes as text to `trajectories/` (first rank only)."""
    if run.ranks.is_first and not run.dry:
        folder = run.files.directory / "trajectories"
        with run.files.writing("trajectories"):
            folder.mkdir(exist_ok=True)
            write_text(folder / f"{run.step:06d}.txt", "\n".join(one.story() for one in episodes[:NUM_STORIES]))
