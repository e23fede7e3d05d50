"""Scores and preference pairs for sampled responses.

Reads the JSON lines of `lightrlhf.generate` and adds `rewards`, by a reward model with its own tokenizer and chat
template, a model that compares two responses (a tournament of all against all), or a Python function. A response
without a valid score has null there, is counted, and is never chosen. With `--choose_type` one pair a prompt is chosen
and written as `preference_*.pt`, in the format of any prepared data set, with the margin of the two scores.

The ways to choose are those of Online-RLHF (Dong et al. 2024, 2405.07863), with two of its slips mended: `max_random`
draws the other one truly at random, and pairs of `max_min_p` keep the order that the length penalty gave them. Left
out: several pairs a prompt, and merging annotations of several scorers.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.data.splits import Row, save_split
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import make_scorer
from lightrlhf.rewards.scorers import ROW, Encoding, Sample, score_rows
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl

CHUNK = 256  # prompts between two writes


@dataclass(frozen=True, kw_only=True)
class AnnotateArgs:
    """Score sampled responses, and choose preference pairs among them."""

    responses_file: str
    """JSONL file with a prompt and its responses a line, as `lightrlhf.generate` writes it."""
    output_file: str | None = None
    """JSONL file with `rewards` added; `{responses_file}.rewards.jsonl` when not given."""
    rm_experiment_dir: str | None = None
    """Reward model or pair-preference model: experiment dir, checkpoint, or folder of a classifier."""
    rm_chat_template: bool = False
    """Show a prompt that is plain text to the reward model as a user message of its chat template."""
    reward_function: str | None = None
    """Python function by `package.module:function` instead: f(prompts, completions, **columns) -> list of floats."""
    trust_remote_code: bool = False
    """Let a reward model run the code of its own folder."""
    mini_batch_size: int = 64
    """At most so many rows per pass of the reward model."""
    choose_type: Literal["max_random", "max_min", "max_max", "random", "max_min_p"] | None = None
    """Pair of a prompt: the best against a random other, the worst, the second; any two; `max_min` after a penalty."""
    length_penalty: float = 0.0
    """Reward taken off per token or character of length, for `max_min_p`."""
    length_unit: Literal["tokens", "characters"] = "tokens"
    """What the length penalty counts."""
    destination_dir: str | None = None
    """Folder that gets `preference_train.pt`, the tokenizer and a report."""
    data_dir: str | None = None
    """Folder of prepared data whose tokenizer the pairs are written with."""
    tokenizer_name: str | None = None
    """Tokenizer of the pairs, instead of that of `data_dir`: experiment dir, folder or hub name."""
    validation_percentage: float = 0.0
    """Share of prompts whose pairs go into `preference_validation.pt`."""
    seed: int = 42
    """Seed of random choices and of the validation split."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""

    def __post_init__(self) -> None:
        check_at_least(self, "mini_batch_size", 1)
        check_at_least(self, "length_penalty", 0)
        find_device(self.accelerator)
        if not Path(self.responses_file).is_file():
            raise ValueError(f"--responses_file {self.responses_file} does not exist; write it by lightrlhf.generate")
        if self.rm_experiment_dir and self.reward_function:
            raise ValueError("--rm_experiment_dir and --reward_function both score; give one of them")
        if self.rm_experiment_dir and not Path(self.rm_experiment_dir).is_dir():
            raise ValueError(f"--rm_experiment_dir {self.rm_experiment_dir} does not exist")
        if not 0 <= self.validation_percentage < 1:
            raise ValueError(f"--validation_percentage {self.validation_percentage} must lie in [0, 1), such as 0.1")
        if self.length_penalty and self.choose_type != "max_min_p":
            raise ValueError(f"--length_penalty {self.length_penalty} is read by --choose_type max_min_p only")
        if self.choose_type and not self.destination_dir:
            raise ValueError(f"--choose_type {self.choose_type} needs --destination_dir, where the pairs go")
        if self.choose_type and not (self.data_dir or self.tokenizer_name):
            raise ValueError(f"--choose_type {self.choose_type} needs --data_dir or --tokenizer_name for its tokenizer")
        if self.destination_dir and not self.choose_type:
            raise ValueError(f"--destination_dir {self.destination_dir} gets pairs; say how by --choose_type max_min")


def run(args: AnnotateArgs) -> str:
    """Score responses and choose pairs; returns the file with rewards."""
    rows = read_jsonl(args.responses_file, needs=("prompt", "responses"))
    if not rows:
        raise UsageError(f"--responses_file {args.responses_file} holds no rows")
    output = args.responses_file
    if args.rm_experiment_dir or args.reward_function:
        output = args.output_file or str(Path(args.responses_file).with_suffix(".rewards.jsonl"))
        rows = write_rewards(args, rows, Path(output))
    elif any("rewards" not in row for row in rows):
        raise UsageError(f"{output} has no rewards yet; give --rm_experiment_dir or --reward_function")
    print(f"{output}: {describe(rows)}")
    if args.choose_type:
        tokenizer = load_tokenizer(args.data_dir, args.tokenizer_name)
        pairs, counts = choose_pairs(args, rows, tokenizer)
        print(write_pairs(args, pairs, counts, tokenizer))
    return output


# ---------------------------------------------------------------------------------------------------------- rewards
def write_rewards(args: AnnotateArgs, rows: Sequence[Row], output: Path) -> list[Row]:
    """The rows with `rewards`, written to `output`, going on behind those that an earlier start left there."""
    from tqdm import tqdm

    with JsonlWriter(output, settings_of(args)) as writer:
        if len(writer.rows) < len(rows):
            scorer = make_scorer(args, find_device(args.accelerator), args.mini_batch_size)
            bar = tqdm(total=len(rows), initial=len(writer.rows), desc="annotate", unit=" prompts")
            while len(writer.rows) < len(rows):
                start = len(writer.rows) // CHUNK * CHUNK  # a chunk that was cut is scored again in the same batches
                chunk = rows[start : start + CHUNK]
                known = len(writer.rows) - start
                scored = [{**row, "rewards": r} for row, r in zip(chunk, score_rows(scorer, chunk))]
                writer.append(*scored[known:])
                bar.update(len(chunk) - known)
            bar.close()
        return writer.rows


def settings_of(args: AnnotateArgs) -> Row:
    """What the rewards depend on."""
    names = ("reward_function", "rm_chat_template", "mini_batch_size")
    model = args.rm_experiment_dir and resolve(args.rm_experiment_dir, "--rm_experiment_dir")
    content = hashlib.sha256(Path(args.responses_file).read_bytes()).hexdigest()
    return {"rm": model, "responses_sha256": content, **{name: getattr(args, name) for name in names}}


def describe(rows: Sequence[Row]) -> str:
    """A line on the rewards of rows."""
    rewards = [reward for row in rows for reward in row["rewards"]]
    valid = [reward for reward in rewards if reward is not None]
    mean = f", mean {sum(valid) / len(valid):.3f}" if valid else ""
    return f"{len(rows):,} prompts, {len(valid):,} rewards{mean}, {len(rewards) - len(valid):,} without a valid score"


# ------------------------------------------------------------------------------------------------------------ pairs
Choice = tuple[int, int]


def choose(scores: Sequence[float | None], choose_type: str, rng: random.Random) -> Choice | str:
    """Indices of the chosen and the rejected response by their scores; else why there is no pair.

    max_random: the best and any other; max_min: best and worst; max_max: best and second; random: any two.
    """
    valid = [k for k, score in enumerate(scores) if score is not None]
    if len(valid) < 2:
        return "fewer than two valid scores"
    ordered = sorted(valid, key=lambda k: -scores[k])
    if choose_type == "random":
        chosen, rejected = sorted(rng.sample(valid, 2), key=lambda k: -scores[k])
    elif choose_type == "max_random":
        chosen, rejected = ordered[0], rng.choice(ordered[1:])
    else:
        chosen, rejected = ordered[0], ordered[1 if choose_type == "max_max" else -1]
    return (chosen, rejected) if scores[chosen] > scores[rejected] else "tie"


def penalised(scores: Sequence[float | None], lengths: Sequence[int], penalty: float) -> list[float | None]:
    """Scores less `penalty` per unit of length."""
    return [None if score is None else score - penalty * length for score, length in zip(scores, lengths)]


def choose_pairs(args: AnnotateArgs, rows: Sequence[Row], tokenizer: Any) -> tuple[list[Row], Counter[str]]:
    """Preference rows, at most one a prompt, and how many prompts gave a pair or why none.

    A pair's `columns` are those of the data with `chosen_score, rejected_score` and their `margin`; of `max_min_p` they
    are the penalised ones, which put the pair in its order.
    """
    encoding = Encoding(tokenizer)
    pairs: list[Row] = []
    counts: Counter[str] = Counter()
    for number, row in enumerate(rows):
        encoded = [encoding.prompt_and_response(sample) if sample else None for sample in samples_of(row)]
        scores = row["rewards"]
        if args.choose_type == "max_min_p":
            scores = penalised(scores, lengths_of(args, row, encoded), args.length_penalty)
        choice = choose(scores, args.choose_type, random.Random(f"{args.seed} {number}"))
        if isinstance(choice, str):
            counts[choice] += 1
            continue
        (prompt, chosen), (_, rejected) = (encoded[k] for k in choice)
        if chosen == rejected:
            counts["the same response twice"] += 1
            continue
        counts["pairs"] += 1
        better, worse = (float(scores[k]) for k in choice)
        known = {name: value for name, value in row.items() if name not in ROW}
        pairs.append(
            {
                "prompt_len": len(prompt),
                "chosen_input_ids": [*prompt, *chosen],
                "rejected_input_ids": [*prompt, *rejected],
                "columns": {**known, "chosen_score": better, "rejected_score": worse, "margin": better - worse},
            }
        )
    return pairs, counts


def samples_of(row: Row) -> list[Sample | None]:
    """The responses of a row, None where there is none."""
    ids = row.get("response_ids") or [None] * len(row["responses"])
    cut = row.get("truncated") or [False] * len(row["responses"])
    return [
        None if text is None else Sample(row["prompt"], text, bool(end), row.get("prompt_ids"), own)
        for text, end, own in zip(row["responses"], cut, ids)
    ]


def lengths_of(args: AnnotateArgs, row: Row, encoded: Sequence[tuple[list[int], list[int]] | None]) -> list[int]:
    """Lengths of a row's responses in `--length_unit`."""
    if args.length_unit == "characters":
        return [len(text or "") for text in row["responses"]]
    return [len(pair[1]) if pair else 0 for pair in encoded]


def write_pairs(args: AnnotateArgs, pairs: Sequence[Row], counts: Counter[str], tokenizer: Any) -> str:
    """Write the splits, the tokenizer and the report into `--destination_dir`; returns what is to be told.

    Raises: UsageError when there is no pair.
    """
    if not pairs:
        raise UsageError(f"{args.responses_file} gives no pair: {told(counts)}")
    destination = Path(args.destination_dir)
    held_out = [is_held_out(row, args) for row in pairs]
    splits = {"train": [p for p, held in zip(pairs, held_out) if not held]}
    splits["validation"] = [p for p, held in zip(pairs, held_out) if held]
    for split, members in splits.items():
        if members:
            save_split(destination, "preference", split, members)
        else:
            (destination / f"preference_{split}.pt").unlink(missing_ok=True)
    tokenizer.save_pretrained(destination / "tokenizer")
    margins = sorted(row["columns"]["margin"] for row in pairs)
    report = {"counts": dict(counts), "rows": {split: len(members) for split, members in splits.items()}}
    report["margin"] = {"mean": sum(margins) / len(margins), "median": margins[len(margins) // 2]}
    write_text(destination / "report.json", json.dumps(report, indent=1))
    write_text(destination / "args.json", json.dumps({**to_dict(args), "judge": judge_of(args)}, indent=1))
    return f"{destination}: {told(counts)}, mean margin {report['margin']['mean']:.3f}"


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "no prompts"


def is_held_out(row: Row, args: AnnotateArgs) -> bool:
    """Whether a pair belongs to the validation split: by its prompt and the seed alone."""
    prompt = repr((args.seed, row["chosen_input_ids"][: row["prompt_len"]])).encode()
    return int.from_bytes(hashlib.sha256(prompt).digest()[:8], "big") / 2**64 < args.validation_percentage


def judge_of(args: AnnotateArgs) -> str | None:
    """The judge of the data that the prompts came from."""
    path = Path(args.data_dir or "", "args.json")
    return json.loads(path.read_text(encoding="utf-8")).get("judge") if args.data_dir and path.is_file() else None


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the file with rewards."""
    return run(parse(AnnotateArgs, argv))


if __name__ == "__main__":
    main()
