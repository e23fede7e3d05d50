"""Votes from `lightrlhf.demo` as preference pairs.

A pair of answers becomes one row, by majority vote. Dropped and counted are pairs that were only skipped, that end in a
tie, whose raters are divided, or with a truncated answer: a row ends with an end token, which that answer did not
produce. The columns are the model of each answer, the number of votes and the share of them that prefers the chosen
one; `group` is the rater, or `several`, so that `lightrlhf.evaluate` reports a reward model's accuracy for each.

    python -m datasets_prep.feedback.prepare_data --destination_dir=data/cafe/feedback \\
        --dataset_name=votes.jsonl --tokenizer_name=data/cafe/tiny/tokenizer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets_prep.common import Dropped, PrepareArgs, prepare
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.demo.votes import Vote, majority, read_votes, sides, winner

STAGES = ("finetune", "preference", "prompts")


@dataclass(frozen=True, kw_only=True)
class FeedbackArgs(PrepareArgs):
    """Prepare people's votes on pairs of answers."""

    dataset_name: str
    """JSONL file of votes written by `lightrlhf.demo`, or a folder of several."""
    validation_percentage: float = 0.2
    """Share of prompts in the validation split; larger than elsewhere, since votes are few."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt; by default a prompt may have pairs of several models."""

    def _check(self) -> None:
        if not files_of(self.dataset_name):
            raise ValueError(f"--dataset_name {self.dataset_name} is neither a .jsonl file nor a folder with one")


def files_of(name: str) -> list[Path]:
    """The file, or those of a folder sorted by name."""
    path = Path(name)
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []


def rows(files: list[Path]) -> Iterator[dict[str, Any] | Dropped]:
    """One row per pair of answers, in the order of their first votes."""
    by_pair: dict[str, list[Vote]] = {}
    raters: set[tuple[str, str]] = set()
    for file in files:
        for vote in read_votes(file):
            if (vote["pair"], vote["rater"]) not in raters:
                by_pair.setdefault(vote["pair"], []).append({**vote, "source": f"{file}: pair {vote['pair']}"})
                raters.add((vote["pair"], vote["rater"]))
    for votes in by_pair.values():
        yield row_of(votes)


def row_of(votes: list[Vote]) -> dict[str, Any] | Dropped:
    """The row of all votes on one pair."""
    source, cast = votes[0]["source"], [vote for vote in votes if vote["verdict"] != "skip"]
    best = majority(cast)
    cut = any(votes[0].get("cut", []))
    if best is None or cut:
        winners = {winner(vote) for vote in cast}
        undecided = "skipped" if not cast else "tie" if winners == {None} else "raters_are_divided"
        reason = "an_answer_was_cut" if cut else undecided
        return Dropped(reason, source, row={"prompt": votes[0]["prompt"], "responses": votes[0]["responses"]})
    answers = sides(votes[0])
    (good, chosen), (bad, rejected) = answers[best], answers[1 - best]
    columns = {"model_chosen": good, "model_rejected": bad, "votes": len(cast)}
    columns["agree"] = sum(winner(vote) == best for vote in cast) / len(cast)
    columns["group"] = cast[0]["rater"] if len(cast) == 1 else "several"
    return {
        "prompt": votes[0]["prompt"],
        "chosen": chosen,
        "rejected": rejected,
        "columns": columns,
        "source": source,
    }


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the votes from the command line."""
    args = parse(FeedbackArgs, argv)
    votes = list(rows(files_of(args.dataset_name)))  # read before a model is converted for its tokenizer
    prepare(args, votes, stages=STAGES)
    if args.dry_run:
        return
    if args.stage in ("all", "preference") and not (Path(args.destination_dir) / "preference_validation.pt").is_file():
        print("the validation split is empty, and lightrlhf.rm requires one; try --validation_percentage 0.4")


if __name__ == "__main__":
    main()
