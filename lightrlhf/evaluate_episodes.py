"""Evaluate language models as agents: episodes of several turns with tools or an environment, from held-out prompts.

All models play K episodes from each prompt, with the same seeds of the environment and the same sampling noise. The
rewards are the environment's, of functions and of a reward model, as in training. Prints a table: mean score and
pass@k with 95% intervals, calls, turns, lengths, stop reasons, and the share without a reward. Each experiment dir gets
`eval/{split}_episodes.json`, and the episodes in `eval/{split}_episodes.jsonl`.

Left out: environments with starts in place of prompts (`lightrlhf.evaluate_env`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import number_rows
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts
from lightrlhf.data.tokens import decode
from lightrlhf.envs.episode_sampler import make_pool
from lightrlhf.envs.player import PlayArgs, Played, Player
from lightrlhf.evaluation import frame, responses
from lightrlhf.generation.episodes import Pool
from lightrlhf.generation.rollout_metrics import episode_columns
from lightrlhf.maths.ops import grouped_interval
from lightrlhf.models.loading import find_device
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.rewards.loading import load_rewards
from lightrlhf.storage.results import cell, check_results, print_table
from lightrlhf.storage.run_dir import short_name


@dataclass(frozen=True, kw_only=True)
class EvaluateEpisodesArgs(frame.PolicyEvaluationArgs, responses.ResponseArgs, PlayArgs):
    """Evaluate language models as agents in episodes of several turns."""

    model_name: list[str] = flag([], required="a model")
    """Experiment dirs or checkpoints; win rates are against the first."""
    num_generations: int = at_least(1, 1)
    """Episodes per prompt (K)."""

    def _check(self) -> None:
        self.check_pass_k(may_have_rewards=bool(self.env))
        if max(self.pass_k, default=1) > self.num_generations:
            raise ValueError(f"--pass_k {max(self.pass_k)} needs --num_generations of at least as many episodes")
        check_results(self.model_name, self.results_name)

    @property
    def results_name(self) -> str:
        """Name of the files of results in an experiment dir."""
        return f"{self.split}_episodes"


def run(args: EvaluateEpisodesArgs) -> list[dict[str, Any]]:
    """Evaluate models; returns a row of results per model.

    A dry run takes as many prompts as a batch has, and prints the first episode in place of writing.
    """
    check_args(args, EvaluateEpisodesArgs)
    args = frame.first_rows(args, max(1, args.rollout_mini_batch_size // args.num_generations))
    device, pool = find_device(args.accelerator), make_pool(args)
    prompts = load_prompts(args.data_folder, args.split, args.verify)[: args.num_samples]
    rows: list[dict[str, Any]] = []
    baseline: responses.Tally | None = None  # of the first model
    for name in args.model_names:
        records, tally, facts = frame.records_of(args, name), responses.Tally("reward"), list[dict[str, Any]]()
        for part in play_parts(args, name, prompts, pool, device):
            facts += [record["episode"] for record in part]
            records.extend(tally.add(responses.mark_passed(part, args.pass_k, args.pass_threshold)))
        row = {"model": short_name(name), "episodes": len(facts), **score_results(tally)}
        row |= responses.pass_rates(tally, args.pass_k, args.pass_threshold)
        row |= {name: sum(column) / len(column) for name, column in episode_columns(facts).items()}
        row |= responses.win_rates(tally, baseline, args.seed) if baseline else {}
        baseline = baseline or tally
        rows.append(row)
        frame.write(args, name, args.results_name, row, records)
    show(rows, f"episodes of {len(prompts)} prompts, {args.num_generations} of each")
    if args.dry_run:
        print("nothing was written; leave --dry_run out to play all")
    return rows


def play_parts(
    args: EvaluateEpisodesArgs, name: str, prompts: Sequence[Row], pool: Pool, device: torch.device
) -> Iterator[list[dict[str, Any]]]:
    """Yields records of a model's episodes, the episodes of some prompts at a time."""
    policy, tokenizer = frame.load_evaluated(args, name, args.data_folder, device)
    check_vocabulary(prompts, vocabulary_size(policy), "the prompts")
    rewards = load_rewards(args, device, args.rollout_mini_batch_size, wrap_prompts=args.rm_chat_template)
    player = Player(args, policy, tokenizer, pool, rewards, scored=bool(args.pass_k))
    size, k = max(1, args.rollout_mini_batch_size // args.num_generations), args.num_generations
    for start in range(0, len(prompts), size):
        part = number_rows(prompts, range(start, min(start + size, len(prompts))))
        asked = [(row["row"], decode(tokenizer, row["input_ids"].tolist())) for row in part for _ in range(k)]
        yield [record_of(*one, played) for one, played in zip(asked, player(part))]
    rewards.close()


def record_of(index: int, prompt: str, played: Played) -> dict[str, Any]:
    """An episode as a record; its response is the last text of the policy."""
    one = played.episode
    said = [message.get("content") or "" for message in one.messages if message["role"] == "assistant"]
    told = {"index": index, "prompt": prompt, "response": said[-1] if one.num_turns else ""}
    return told | {"reward": played.score, "rewards": played.rewards, "episode": one.facts(), "messages": one.messages}


def score_results(tally: responses.Tally) -> dict[str, Any]:
    """The mean reward of the episodes that have one, with its 95% interval over prompts, and how many have none."""
    scored = [(reward, index) for reward, index in zip(tally.rewards, tally.indices) if reward == reward]
    found: dict[str, Any] = {}
    if scored:
        values = [reward for reward, _ in scored]
        interval = grouped_interval(values, [index for _, index in scored])
        found = {"reward": sum(values) / len(values), "reward_interval": interval}
    missing = len(tally.rewards) - len(scored)
    return found | ({"reward_missing": missing} if missing else {})


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print a column per model; stop reasons that occur."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "model"))
    names = [name for name in names if not name.endswith("_interval")]
    names = [name for name in names if not name.startswith("stop_") or any(row[name] for row in rows)]
    lines = [[name.replace("_", " "), *(cell(row, name) for row in rows)] for name in names]
    print_table(title, ["", *(row["model"] for row in rows)], lines)


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns a row of results per model."""
    return run(parse(EvaluateEpisodesArgs, argv))


if __name__ == "__main__":
    main()
