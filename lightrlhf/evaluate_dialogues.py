"""Evaluate language models in dialogues of several turns: scores and win rates after each turn.

All models hold dialogues with the same user, from the same openings and with the same sampling noise. After each turn
the dialogues so far are scored by a reward model or the judge of the data; win rates are against the first model, with
95% intervals. Writes `eval/{split}_by_turn.json`, `.jsonl` and `.png`, and for `lightrlhf.judge` the dialogues up to
each turn as `eval/{split}/turn-{h}.jsonl`.

Left out: scores of single turns (a score is of the whole dialogue so far).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import check_args, flag
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups.rewards import check_reward_model
from lightrlhf.cli.parser import parse
from lightrlhf.evaluation import frame
from lightrlhf.evaluation.answers import PART
from lightrlhf.evaluation.responses import Mean
from lightrlhf.generation import dialogues as talks
from lightrlhf.generation.dialogues import Dialogue
from lightrlhf.generation.users import UserArgs, load_user
from lightrlhf.maths.ops import win_rate
from lightrlhf.models.loading import find_device
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import FunctionScorer, GroupScorer
from lightrlhf.storage.jsonl import Row, write_jsonl
from lightrlhf.storage.results import check_results, new_figure, print_table, save_figure
from lightrlhf.storage.run_dir import read_arg, short_name


@dataclass(frozen=True, kw_only=True)
class EvaluateDialoguesArgs(frame.PolicyEvaluationArgs, UserArgs):
    """Evaluate language models in dialogues of several turns, turn by turn."""

    model_name: list[str] = flag([], required="a model")
    """Experiment dirs or checkpoints; win rates are against the first model."""
    rm_experiment_dir: str | None = flag(None, check=check_reward_model)
    """Reward model that scores the dialogues; by default the judge of the data."""

    def _check(self) -> None:
        check_results(self.model_name, f"{self.split}_by_turn")


def run(args: EvaluateDialoguesArgs) -> list[dict[str, Any]]:
    """Evaluate models turn by turn; returns one row per model: mean scores and win rates with 95% intervals.

    A dry run takes as many openings as a batch has, and prints the first dialogue in place of writing.
    """
    check_args(args, EvaluateDialoguesArgs)
    args = frame.first_rows(args, args.rollout_mini_batch_size)
    device, data_dir = find_device(args.accelerator), args.data_folder
    scorer, user = turn_scorer(args, data_dir, device), load_user(args, device, args.rollout_mini_batch_size)
    openings = talks.load_dialogues(data_dir, args.split, args.verify)[: args.num_samples]
    rows: list[dict[str, Any]] = []
    baseline: list[array[float]] = []  # scores of the first model
    files: dict[str, Path] = {}  # of results, without their suffixes
    for name in args.model_names:
        records, scores, lengths = frame.records_of(args, name), [array("d") for _ in range(args.num_turns)], Mean()
        lost = 0  # openings
        for dialogues in hold_dialogues(args, name, data_dir, openings, user, device):
            found = talks.score_turns(scorer, dialogues)
            lost += sum(not turns for turns in found)
            for own, turn in zip(scores, by_turn(found, args.num_turns)):
                own.extend(turn)
            for start, end in (span for dialogue in dialogues for span in dialogue.turn_spans):
                lengths.add(end - start)
            records.extend({"scores": turns, **talks.as_row(dialogue)} for turns, dialogue in zip(found, dialogues))
        baseline = baseline or scores
        mean_length = lengths.total / lengths.count if lengths.count else math.nan
        results = results_by_turn(scores, baseline) | {"mean_length": mean_length}
        if lost:
            results["without_room"] = lost
            print(f"{lost:,} of {len(openings):,} openings leave {name} no room for a reply and are left out")
        rows.append({"model": short_name(name)} | results)
        if file := frame.write(args, name, f"{args.split}_by_turn", rows[-1], records):
            files[name] = file
            write_turns(file.with_name(file.name.replace("_by_turn", "", 1)), records, args.num_turns)
    show(rows)
    if args.dry_run:
        print(f"of {len(openings)} openings; nothing was written; leave --dry_run out to evaluate all")
    elif (first := files.get(args.model_name[0])) and len(rows) > 1:
        print(f"picture: {draw(rows, first.with_name(f'{first.name}.png'))}")
    return rows


def hold_dialogues(
    args: EvaluateDialoguesArgs, name: str, data_dir: str, openings: Sequence[Dialogue], user: Any, device: torch.device
) -> Iterator[list[Dialogue]]:
    """Yields dialogues of `num_turns` turns between a model and the user, one from each opening, some at a time."""
    policy, tokenizer = frame.load_evaluated(args, name, data_dir, device)
    talks.check_embedded(openings, policy, data_dir)
    rolled = partial(talks.roll_out, policy, tokenizer, num_turns=args.num_turns, user=user, args=args, seed=args.seed)
    for start in range(0, len(openings), PART):
        part = [row.before(0) for row in openings[start : start + PART]]
        yield rolled(dialogues=part, num_slots=args.rollout_mini_batch_size)


def turn_scorer(args: EvaluateDialoguesArgs, data_dir: str, device: torch.device) -> GroupScorer:
    """The scorer of dialogues: the reward model of `--rm_experiment_dir`, else the judge of the data."""
    if args.rm_experiment_dir:
        return load_scorer(args.rm_experiment_dir, device, args.rollout_mini_batch_size, "--rm_experiment_dir")
    judge = read_arg(data_dir, "judge")
    if judge is None:
        raise UsageError(f"--rm_experiment_dir is required: the args.json of {data_dir} names no judge")
    return FunctionScorer(load_function(judge, "the judge of the data"), f"the judge {judge}")


def by_turn(scores: Sequence[Sequence[float | None]], num_turns: int) -> list[array[float]]:
    """Scores of dialogues after each turn, NaN where missing; one that ended before a turn has its last score."""
    last = [[one[min(turn, len(one) - 1)] if one else None for one in scores] for turn in range(num_turns)]
    return [array("d", (math.nan if score is None else score for score in turn)) for turn in last]


def results_by_turn(scores: Sequence[array[float]], others: Sequence[array[float]]) -> dict[str, list[Any]]:
    """Mean score after each turn, win rate over the others' scores (ties half), its interval, and the count.

    scores, others: see `by_turn`. A pair with a missing score does not count.
    """
    results: dict[str, list[Any]] = {name: [] for name in ("score_by_turn", "win_rate", "win_rate_interval", "count")}
    for ours, theirs in zip(scores, others):
        rate, interval = win_rate(zip(ours, theirs))
        mean = Mean()
        for one, two in zip(ours, theirs):
            mean.add(None if math.isnan(one) or math.isnan(two) else one)
        results["score_by_turn"].append(mean.total / mean.count if mean.count else math.nan)
        results["win_rate"].append(rate)
        results["win_rate_interval"].append(interval)
        results["count"].append(mean.count)
    return results


# ---------------------------------------------------------------------------------------------------------- results
def write_turns(folder: Path, records: Iterable[Row], num_turns: int) -> None:
    """Write `turn-{h}.jsonl`: the opening as prompt, and the dialogue from there to turn h as response, if any."""

    def rows(turn: int) -> Iterator[Row]:
        for index, record in enumerate(records):
            dialogue = talks.from_row({name: value for name, value in record.items() if name != "scores"}, index, {})
            if not dialogue.num_turns:  # without room for a reply
                continue
            opening = dialogue.before(0).messages
            messages = dialogue.through(min(turn, dialogue.num_turns - 1))[len(opening) :]
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
            yield {"index": index, "prompt": opening, "response": text}

    for turn in range(num_turns):
        write_jsonl(folder / f"turn-{turn + 1}.jsonl", rows(turn))


def show(rows: list[dict[str, Any]]) -> None:
    """Print mean scores and win rates turn by turn."""
    columns = ["", *(f"h = {turn + 1}" for turn in range(len(rows[0]["score_by_turn"]))), "mean"]
    scores = [[row["model"], *map("{:.3f}".format, with_mean(row["score_by_turn"]))] for row in rows]
    print_table("score after each turn", columns, scores)
    lines = []
    for row in rows[1:]:
        *rates, mean = map("{:.3f}".format, with_mean(row["win_rate"]))
        cells = [f"{rate} [{low:.3f}, {high:.3f}]" for rate, (low, high) in zip(rates, row["win_rate_interval"])]
        lines.append([row["model"], *cells, mean])
    if lines:
        print_table(f"win rate over {rows[0]['model']}", columns, lines)


def with_mean(values: list[float]) -> list[float]:
    """The values, and their mean as the last one."""
    return [*values, sum(values) / len(values)]


def draw(rows: list[dict[str, Any]], output: Path) -> Path:
    """Draw win rates over the first model by turn, with their intervals."""
    figure, (axis,) = new_figure(5, 3.4)
    for row in rows[1:]:
        turns = range(1, len(row["win_rate"]) + 1)
        errors = [[abs(w - side[i]) for w, side in zip(row["win_rate"], row["win_rate_interval"])] for i in (0, 1)]
        axis.errorbar(turns, row["win_rate"], yerr=errors, fmt="o-", ms=3, capsize=2, label=row["model"])
    axis.axhline(0.5, color="grey", lw=0.8)
    axis.set_xlabel("turn")
    axis.set_ylabel(f"win rate over {rows[0]['model']}, 95%", fontsize=8)
    axis.legend(fontsize=8)
    save_figure(figure, output)
    return output


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns one row of results per model."""
    return run(parse(EvaluateDialoguesArgs, argv))


if __name__ == "__main__":
    main()
