"""Score sampled responses and choose preference pairs among them.

Reads the JSONL of `lightrlhf.generate` and adds `rewards`, by a reward model with its own tokenizer and chat template,
a model that compares two responses (a tournament of all against all), Python functions, or the weighted sum of several.
A response without a valid score has null there, is counted, and is never chosen. With `--choose_type` one pair per
prompt is chosen and written to `preference_*.pt`, in the format of any prepared dataset, with the margin of the two
scores.

The choices are as in Online-RLHF (Dong et al. 2024, 2405.07863), with two of its faults corrected: `max_random`
draws the rejected response at random, and pairs of `max_min_p` keep the order of the penalised rewards. Left out:
several pairs per prompt, and keeping the rewards of several scorers apart.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, random_seed
from lightrlhf.cli.groups import DryRunArgs, RewardArgs, SealArgs
from lightrlhf.cli.groups.rewards import check_reward_model
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.cli.paths import check_file
from lightrlhf.data.responses import ROW, check_responses, read_responses
from lightrlhf.data.splits import Row, save_split, split_by_hash
from lightrlhf.data.tokens import marked_text
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.rewards import functions, loading
from lightrlhf.rewards.encoding import Encoding, samples_of_row
from lightrlhf.rewards.scorers import GroupScorer, with_rewards
from lightrlhf.storage import destinations, jsonl, locks, results, run_dir, seals
from lightrlhf.storage.lazy import Lazy
from lightrlhf.storage.writing import write_text, writing
from lightrlhf.training.provenance import describe_given

CHUNK = 256  # prompts scored between two writes
READ = ("prompt", "responses")  # of each row


def check_folder_of_pairs(folder: str, flag: str) -> None:
    """Raises: ValueError for a folder that cannot be written, or has the data of another program."""
    destinations.check_data_output(folder, flag, own="choose_type")


@dataclass(frozen=True, kw_only=True)
class AnnotateArgs(RewardArgs, SealArgs, DryRunArgs):
    """Score sampled responses, and choose preference pairs among them."""

    responses_file: str = flag(check=check_file)
    """JSONL file with a prompt and its responses per line, as `lightrlhf.generate` writes it."""
    output_file: str | None = None
    """JSONL file with `rewards` added; `{responses_file}.rewards.jsonl` when not given."""
    rm_experiment_dir: str | None = flag(None, check=check_reward_model, required=None)
    """Reward model or pair-preference model: experiment dir, checkpoint, or folder of a classifier."""
    rm_chat_template: bool = False
    """Wrap plain-text prompts as user messages of the reward model's chat template."""
    normalize_rewards: bool = flag(True, show="rarely")
    """Standardise scores by the mean and deviation stored with the reward model; soft labels need False."""
    reward_function: list[str] = flag([], required=None)
    """Reward functions `package.module:name`, one or several, instead of a reward model or in addition."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a reward model to run code from its folder."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Largest number of rows per pass of the reward model."""
    choose_type: Literal["max_random", "max_min", "max_max", "random", "max_min_p"] | None = flag(
        None, needs="output_dir"
    )
    """Pair of a prompt: the best with a random other, the worst or the second; any two; `max_min` after a penalty."""
    length_penalty: float = at_least(0, 0.0, needs={"choose_type": "max_min_p"})
    """Reward subtracted per token of length, for `max_min_p`."""
    output_dir: str | None = flag(None, check=check_folder_of_pairs, needs="choose_type")
    """Output folder for `preference_train.pt`, the tokenizer and a report."""
    data_dir: str | None = None
    """Folder of prepared data; its tokenizer encodes the pairs."""
    tokenizer_name: str | None = None
    """Tokenizer of the pairs, instead of `data_dir`'s: experiment dir, folder or hub name."""
    validation_percentage: float = at_least(0, 0.0, below=1, remedy="try 0.1")
    """Fraction of prompts held out for `preference_validation.pt`."""
    seed: int = random_seed(42)
    """Seed of random choices and of the validation split."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""

    def _check(self) -> None:
        if self.choose_type and not (self.data_dir or self.tokenizer_name):
            raise ValueError(f"--choose_type {self.choose_type} needs --data_dir or --tokenizer_name for its tokenizer")
        if self.output_file or self.has_rewards:  # else it is only read
            destinations.check_output(self.rewards_file, "--output_file")

    @property
    def rewards_file(self) -> Path:
        """The file with rewards."""
        return Path(self.output_file or Path(self.responses_file).with_suffix(".rewards.jsonl"))


def run(args: AnnotateArgs, *, reward: functions.RewardFunctions | None = None) -> str:
    """Score responses and choose pairs; returns the file with rewards, in a dry run the file of the responses.

    reward: replaces what the flags would load.
    """
    check_args(args, AnnotateArgs, {"reward": reward})
    rows: Sequence[Row] = read_responses(
        args.responses_file, READ, ("truncated", "prompt_ids", "response_ids", "rewards")
    )
    output = args.responses_file
    if args.dry_run:
        try_batch(args, rows, reward)
        return output
    if args.has_rewards or reward:
        output = str(args.rewards_file)
        rows = write_rewards(args, rows, Path(output), reward)
    elif any("rewards" not in row for row in rows):
        raise UsageError(f"{output} has no rewards yet; give --rm_experiment_dir or --reward_function")
    print(f"{output}: {describe(rows)}")
    if args.choose_type and args.output_dir:
        tokenizer = load_tokenizer(args.data_dir, args.tokenizer_name, verify=args.verify)
        pairs, counts = choose_pairs(args, args.choose_type, rows, tokenizer)
        print(write_pairs(args, Path(args.output_dir), pairs, counts, tokenizer))
    return output


def try_batch(args: AnnotateArgs, rows: Sequence[Row], reward: functions.RewardFunctions | None) -> None:
    """Score the responses of one batch, and print the first row and the first pair."""
    tried = rows[: max(1, args.rollout_mini_batch_size // max(len(rows[0]["responses"]), 1))] if rows else []
    if not tried:
        raise UsageError(f"{args.responses_file} has no rows")
    started, output = time.perf_counter(), Path(args.responses_file)
    if args.has_rewards or reward:
        tried, output = with_rewards(tried, make_scorer(args, reward)), args.rewards_file
    elif any("rewards" not in row for row in tried):
        raise UsageError(f"{output} has no rewards yet; give --rm_experiment_dir or --reward_function")
    seconds = time.perf_counter() - started
    if args.choose_type and args.output_dir:
        tokenizer = load_tokenizer(args.data_dir, args.tokenizer_name, verify=args.verify)
        output = Path(args.output_dir)
        pairs, counts = choose_pairs(args, args.choose_type, tried, tokenizer)
        for side in ("chosen", "rejected") if pairs else ():
            ids = pairs[0][f"{side}_input_ids"]
            print(f"{side}: {marked_text(tokenizer, ids, [(pairs[0]['prompt_len'], len(ids))])}")
        print(f"⟦ and ⟧ mark the trained tokens; {describe_counts(counts)}\n")
    results.show_trial(tried[0], len(tried), len(rows), "prompts", seconds, output)


# ---------------------------------------------------------------------------------------------------------- rewards
def make_scorer(args: AnnotateArgs, reward: functions.RewardFunctions | None) -> GroupScorer:
    """The scorer of a prompt's responses."""
    device = find_device(args.accelerator)
    settings = (args, device, args.rollout_mini_batch_size, reward)
    wraps, standardise = args.rm_chat_template, args.normalize_rewards
    return loading.load_rewards(*settings, wrap_prompts=wraps, grouped=True, standardise=standardise).of_groups


def write_rewards(
    args: AnnotateArgs, rows: Sequence[Row], output: Path, reward: functions.RewardFunctions | None = None
) -> Sequence[Row]:
    """Write the rows with `rewards`, resuming after the complete rows of the file; returns them."""
    with jsonl.JsonlWriter(output, settings_of(args) | describe_given(reward=reward)) as writer:
        check_responses(writer.rows, output, (*READ, "rewards"))
        if len(writer.rows) < len(rows):
            writer.extend(rows, CHUNK, partial(with_rewards, scorer=make_scorer(args, reward)), "annotate")
        return writer.rows


def settings_of(args: AnnotateArgs) -> Row:
    """Settings that determine the rewards, stored to detect files made with different ones."""
    names = ("rm_chat_template", "rollout_mini_batch_size")
    model = args.rm_experiment_dir and resolve(args.rm_experiment_dir, "--rm_experiment_dir")
    content = seals.sha256(Path(args.responses_file))
    settings = {"rm": model, "responses_sha256": content, "reward_function": args.reward_function}
    new = {name: value for name in ("reward_weights", "reward_timeout") if (value := getattr(args, name))}
    new |= {} if args.normalize_rewards else {"normalize_rewards": False}
    return settings | {name: getattr(args, name) for name in names} | new


def describe(rows: Sequence[Row]) -> str:
    """A line on the rewards of rows."""
    missing, valid = 0, list[float]()
    for row in rows:
        valid += [reward for reward in row["rewards"] if reward is not None]
        missing += row["rewards"].count(None)
    mean = f", mean {sum(valid) / len(valid):.3f}" if valid else ""
    return f"{len(rows):,} prompts, {len(valid):,} rewards{mean}, {missing:,} without a valid score"


# ------------------------------------------------------------------------------------------------------------ pairs
Choice = tuple[int, int]


def choose(scores: Sequence[float | None], choose_type: str, rng: random.Random) -> Choice | str:
    """Indices of the chosen and the rejected response by their scores, or the reason why there is no pair.

    max_random: the best and any other; max_min: best and worst; max_max: best and second; random: any two.
    """
    valid = {k: score for k, score in enumerate(scores) if score is not None}
    if len(valid) < 2:
        return "fewer than two valid scores"
    ordered = sorted(valid, key=lambda k: -valid[k])
    if choose_type == "random":
        chosen, rejected = sorted(rng.sample(list(valid), 2), key=lambda k: -valid[k])
    elif choose_type == "max_random":
        chosen, rejected = ordered[0], rng.choice(ordered[1:])
    else:
        chosen, rejected = ordered[0], ordered[1 if choose_type == "max_max" else -1]
    return (chosen, rejected) if valid[chosen] > valid[rejected] else "tie"


def penalize_lengths(scores: Sequence[float | None], lengths: Sequence[int], penalty: float) -> list[float | None]:
    """Scores less `penalty` per token of length."""
    return [None if score is None else score - penalty * length for score, length in zip(scores, lengths)]


def choose_pairs(
    args: AnnotateArgs, choose_type: str, rows: Sequence[Row], tokenizer: Tokenizer
) -> tuple[Lazy[Row], Counter[str]]:
    """Preference rows, at most one per prompt, and the number of pairs and of each reason for having none.

    A pair's `columns` are the data's with `chosen_score, rejected_score` and their `margin`; with `max_min_p`
    these are the penalised scores, which determine the order. A pair is made again whenever it is read.
    """
    encoding = Encoding(tokenizer)

    def pair_of(number: int) -> Row | str:
        row = rows[number]
        encoded = [encoding.prompt_and_response(sample) if sample else ([], []) for sample in samples_of_row(row)]
        scores = row["rewards"]
        if choose_type == "max_min_p":
            scores = penalize_lengths(scores, [len(response) for _, response in encoded], args.length_penalty)
        choice = choose(scores, choose_type, random.Random(f"{args.seed} {number}"))
        if isinstance(choice, str):
            return choice
        (prompt, chosen), (_, rejected) = (encoded[k] for k in choice)
        if chosen == rejected:
            return "the same response twice"
        better, worse = (float(scores[k]) for k in choice)
        columns = {name: value for name, value in row.items() if name not in ROW}
        return {
            "prompt_len": len(prompt),
            "chosen_input_ids": [*prompt, *chosen],
            "rejected_input_ids": [*prompt, *rejected],
            "columns": {**columns, "chosen_score": better, "rejected_score": worse, "margin": better - worse},
        }

    counts: Counter[str] = Counter()
    places = []
    for number in range(len(rows)):
        found = pair_of(number)
        counts[found if isinstance(found, str) else "pairs"] += 1
        if not isinstance(found, str):
            places.append(number)
    return Lazy(places, lambda number: cast(Row, pair_of(number))), counts


def write_pairs(
    args: AnnotateArgs, folder: Path, pairs: Sequence[Row], counts: Counter[str], tokenizer: Tokenizer
) -> str:
    """Write the splits, the tokenizer and the report into `folder`; returns a line on them.

    Raises: UsageError when there is no pair.
    """
    if not pairs:
        raise UsageError(f"{args.responses_file} gives no pair: {describe_counts(counts)}")
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    margins = []
    for place, row in enumerate(pairs):
        splits[split_of(row, args)].append(place)
        margins.append(row["columns"]["margin"])
    margins.sort()
    mean = sum(margins) / len(margins)
    report = {"counts": dict(counts), "rows": {split: len(members) for split, members in splits.items()}}
    report["margin"] = {"mean": mean, "median": margins[len(margins) // 2]}
    judge = run_dir.read_arg(args.data_dir, "judge") if args.data_dir else None
    with writing(folder), locks.lock_folder(folder, "--output_dir"):
        for split, members in splits.items():
            if members:
                save_split(folder, "preference", split, Lazy(members, pairs.__getitem__))
            else:
                (folder / f"preference_{split}.pt").unlink(missing_ok=True)
        store_tokenizer(tokenizer, folder)
        write_text(folder / "report.json", jsonl.to_json(report, indent=1))
        write_text(folder / "args.json", json.dumps({**to_dict(args), "judge": judge}, indent=1))
        seals.seal(folder, ["args.json"])
    return f"{folder}: {describe_counts(counts)}, mean margin {mean:.3f}"


def describe_counts(counts: Counter[str]) -> str:
    """How many pairs there are, and how many prompts without one for each reason."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def split_of(row: Row, args: AnnotateArgs) -> str:
    """train or validation; depends on the prompt and the seed alone."""
    key = repr((args.seed, row["chosen_input_ids"][: row["prompt_len"]])).encode()
    return split_by_hash(key, {"validation": args.validation_percentage})


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the file with rewards."""
    return run(parse(AnnotateArgs, argv))


if __name__ == "__main__":
    main()
