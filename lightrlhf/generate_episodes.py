"""Play episodes of several turns with tools or an environment, and write the good ones as data that `sft` trains on.

`--output_dir` gets all episodes as `episodes.jsonl`: messages, calls, scores, rewards by turn, why each ended, and its
rows of ids as they were read and sampled. Of those whose score is at least `--min_reward` the rows are in
`finetune_train.pt`: what was sampled is the target, what tools and environment said is not, and nothing is tokenised
again. So `lightrlhf.sft --data_dir` of that folder imitates them: rejection sampling, a first step where a small model
hardly ever solves a task, and a start for `grpo --env`.

The same command goes on after a kill; with another `--min_reward` it chooses anew among the episodes it has.
`lightrlhf.generate` calls this program for `--env`, `--tools` and `--mcp`. Left out: servers, and several devices.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag
from lightrlhf.cli.groups import DryRunArgs, FrozenArgs
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.data import prompts
from lightrlhf.data.splits import IGNORE_INDEX, check_vocabulary, save_split, split_by_hash
from lightrlhf.data.tokens import marked_text
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs.episode_sampler import make_pool, rows_of
from lightrlhf.envs.player import PlayArgs, Played, Player
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.rewards.loading import load_rewards
from lightrlhf.storage import destinations, jsonl, locks, results, seals, shards
from lightrlhf.storage.jsonl import Row
from lightrlhf.storage.writing import write_text, writing

# flags that leave episodes as they are
NO_EFFECT = {"output_dir", "min_reward", "validation_percentage", "accelerator", "verify", "dry_run", "env_workers"}


def check_output_dir(folder: str, flag: str) -> None:
    """Raises: ValueError for a folder that cannot be written, or has the data of another program."""
    destinations.check_data_output(folder, flag, own="min_reward")


@dataclass(frozen=True, kw_only=True)
class GenerateEpisodesArgs(prompts.PromptArgs, PlayArgs, DryRunArgs):
    """Play episodes of several turns, and write the good ones as data for sft."""

    model_name: str = flag(show="first", positional=True)
    """Experiment dir, checkpoint, folder or hub name of the model."""
    split: Literal["train", "validation", "test"] = "train"
    """Split of `data_dir`."""
    output_dir: str = flag(check=check_output_dir, show="first")
    """Output folder for all episodes, the splits of the chosen ones, the tokenizer and a report."""
    min_reward: float | None = flag(None, show="first")
    """Lowest score of an episode to imitate. Default: all without a fault are."""
    validation_percentage: float = at_least(0, 0.0, below=1, remedy="try 0.1")
    """Fraction of prompts held out for `finetune_validation.pt`."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""

    def _check(self) -> None:
        if self.min_reward is not None and not (self.env or self.has_rewards):
            raise ValueError(f"--min_reward {self.min_reward}: tools give no reward; add --reward_function")


def run(args: GenerateEpisodesArgs) -> str:
    """Play episodes; returns the folder of the data."""
    check_args(args, GenerateEpisodesArgs)
    folder, rows = Path(args.output_dir), prompts.load_prompt_rows(args)
    tokenizer = load_tokenizer(args.data_dir, args.model_name, verify=args.verify)
    output, total = folder / "episodes.jsonl", len(rows) * args.num_generations
    if args.dry_run:
        player = load_player(args, tokenizer, rows)
        first = rows[: max(1, args.rollout_mini_batch_size // args.num_generations)]
        each = [row for row in first for _ in range(args.num_generations)]
        tried = results.try_first(partial(play_rows, player), each, total, "episodes", folder)
        for row in finetune_rows(tried[0]):
            print(marked(tokenizer, row))
        return args.output_dir
    settings = settings_of(args, rows)
    if not shards.is_complete(output, settings, total):
        write_episodes(args, load_player(args, tokenizer, rows), rows, output, settings)
    print(write_data(args, folder, output, rows, tokenizer))
    return args.output_dir


def load_player(args: GenerateEpisodesArgs, tokenizer: Tokenizer, rows: Sequence[Row]) -> Player:
    """The model, the environments and the rewards. Raises: UsageError."""
    pool, device = make_pool(args), find_device(args.accelerator)
    models = FrozenArgs(trust_remote_code=args.trust_remote_code)
    policy = load_policy(args.model_name, models, tokenizer).eval().to(device)
    ids = [prompts.ids_of_prompt(tokenizer, row) for row in rows]
    check_vocabulary([{"input_ids": one} for one in ids], vocabulary_size(policy), "the prompts")
    rewards = load_rewards(args, device, args.rollout_mini_batch_size)
    return Player(args, policy, tokenizer, pool, rewards, scored=args.min_reward is not None)


# --------------------------------------------------------------------------------------------------------- episodes
def settings_of(args: GenerateEpisodesArgs, rows: Sequence[Row]) -> Row:
    """Settings that determine the episodes, stored to detect files made with different ones."""
    settings = {name: value for name, value in dataclasses.asdict(args).items() if name not in NO_EFFECT}
    return {**settings, "model_name": resolve(args.model_name), "prompts_sha256": prompts.digest(rows)}


def write_episodes(
    args: GenerateEpisodesArgs, player: Player, rows: Sequence[Row], output: Path, settings: Row
) -> None:
    """Write all episodes, resuming after the complete rows of the file."""
    k = args.num_generations
    each = [row for row in rows for _ in range(k)]
    chunk = k * max(1, args.rollout_mini_batch_size // k)
    with jsonl.JsonlWriter(output, settings) as writer:
        writer.extend(each, chunk, partial(play_rows, player), "generate", " episodes")


def play_rows(player: Player, each: Sequence[Row]) -> Iterator[Row]:
    """The episodes as they are written; each: the prompt rows, K times each."""
    k, tokenizer, tools = player.args.num_generations, player.tokenizer, player.pool.tools
    asked = [
        {"row": row["index"], "input_ids": prompts.ids_of_prompt(tokenizer, row), "columns": columns_of(row)}
        for row in each[::k]
    ]
    for number, (row, played) in enumerate(zip(each, player(asked))):
        shown = {"index": row["index"] * k + number % k, "prompt": row["index"], "columns": columns_of(row)}
        yield shown | ({"tools": tools} if tools else {}) | episode_row(played)


def columns_of(row: Row) -> Row:
    """The data's own columns of a prompt."""
    return {name: value for name, value in row.items() if name not in ("index", "prompt", "prompt_ids")}


def episode_row(played: Played) -> Row:
    """An episode as it is written: what was said, its scores, and its rows of ids, as far as they were sampled.

    `spans`: [start, end) of each sampled turn in its row.
    """
    one, rows = played.episode, []
    for number, (ids, _, _) in enumerate(rows_of(one)):
        spans = [[turn.start, turn.end] for turn in one.conversation.turns if turn.row == number]
        if spans:
            rows.append({"input_ids": ids, "spans": spans})
    told = {"messages": one.messages, "score": played.score, "rewards": played.rewards}
    return {**told, "episode": one.facts(), "rows": rows}


# ------------------------------------------------------------------------------------------------------ data for sft
def finetune_rows(row: Row) -> Iterator[Row]:
    """The rows of an episode with what was sampled as targets."""
    for one in row["rows"]:
        ids, targets = one["input_ids"], [IGNORE_INDEX] * len(one["input_ids"])
        for start, end in one["spans"]:
            targets[start:end] = ids[start:end]
        yield {"prompt_len": one["spans"][0][0], "input_ids": ids, "targets": targets}


def marked(tokenizer: Tokenizer, row: Row) -> str:
    """A row's text with marks around what is trained."""
    spans = [(place, place + 1) for place, target in enumerate(row["targets"]) if target != IGNORE_INDEX]
    return f"⟦ and ⟧ mark the trained tokens:\n{marked_text(tokenizer, row['input_ids'], spans)}"


def why_not(row: Row, least: float | None) -> str:
    """Why an episode is not imitated; empty if it is."""
    if row["episode"]["fault"]:
        return "without a reward, by a fault"
    if not row["rows"]:
        return "without a turn"
    if least is None:
        return ""
    return "without a score" if row["score"] is None else "below --min_reward" if row["score"] < least else ""


def write_data(
    args: GenerateEpisodesArgs, folder: Path, output: Path, rows: Sequence[Row], tokenizer: Tokenizer
) -> str:
    """Write the splits of the chosen episodes, the tokenizer and the report; returns a line on them.

    Raises: UsageError when no episode is left to train on.
    """
    counts: Counter[str] = Counter()
    chosen: dict[str, list[Row]] = {"train": [], "validation": []}
    best = []
    for row in jsonl.open_jsonl(output):
        best += [] if row["score"] is None else [row["score"]]
        reason = why_not(row, args.min_reward)
        counts[reason or "chosen"] += 1
        if not reason:
            chosen[split_of(args, rows[row["prompt"]])] += finetune_rows(row)
    told = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    if not chosen["train"]:
        highest = f"; the highest score is {max(best):g}" if best else ""
        remedy = "; lower --validation_percentage" if chosen["validation"] else ""
        raise UsageError(f"{output}: no episode is left to train on ({told}{highest}){remedy}")
    score = f", mean score {sum(best) / len(best):.3f}" if best else ""
    with writing(folder), locks.lock_folder(folder, "--output_dir"):
        for split, members in chosen.items():
            if members:
                save_split(folder, "finetune", split, members)
            else:
                (folder / f"finetune_{split}.pt").unlink(missing_ok=True)
        store_tokenizer(tokenizer, folder)
        report = {"counts": dict(counts), "rows": {split: len(members) for split, members in chosen.items()}}
        write_text(folder / "report.json", jsonl.to_json(report, indent=1))
        write_text(folder / "args.json", json.dumps(to_dict(args), indent=1))
        seals.seal(folder, ["args.json"])
    return f"{folder}: {sum(counts.values()):,} episodes{score}: {told}; {len(chosen['train']):,} rows to train on"


def split_of(args: GenerateEpisodesArgs, prompt: Mapping[str, Any]) -> str:
    """train or validation; depends on the prompt, with its columns, and the seed alone."""
    key = repr((args.seed, {name: value for name, value in prompt.items() if name != "index"})).encode()
    return split_by_hash(key, {"validation": args.validation_percentage})


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the folder of the data."""
    return run(parse(GenerateEpisodesArgs, argv))


if __name__ == "__main__":
    main()
