"""Files and tasks for other evaluation harnesses, and the commands that run them: the flags of `--harness`.

Nothing is downloaded: the questions of a benchmark are a file that the user has.

Left out: running a harness, which needs another environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.fields import flag
from lightrlhf.cli.paths import check_file
from lightrlhf.data.splits import Row
from lightrlhf.evaluation.benchmarks import write_answers
from lightrlhf.evaluation.frame import PolicyEvaluationArgs, load_frozen, load_reward_model
from lightrlhf.evaluation.reward_bench import rewardbench
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.evaluation.tasks import inspect, lm_eval
from lightrlhf.models.names import holds_reward_model, resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.run_dir import is_experiment_dir, short_name
from lightrlhf.storage.writing import make_folder, writing

Column = tuple[Callable[[Any], bool], str]  # the check of a value, and the words for it
TEXT: Column = (lambda value: isinstance(value, str) and bool(value)), "a text"
TEXTS: Column = (lambda value: isinstance(value, list) and bool(value) and all(map(TEXT[0], value))), "a list of texts"
NUMBER_OR_TEXT: Column = (lambda value: isinstance(value, str | int)), "a number or a text"
HARNESSES: dict[str, tuple[Callable[[Subject], Written], dict[str, Column]]] = {  # writer, columns of the questions
    "lm_eval": (lm_eval, {}),
    "inspect": (inspect, {}),
    "alpaca_eval": (partial(write_answers, name="alpaca_eval"), {"instruction": TEXT}),
    "mt_bench": (partial(write_answers, name="mt_bench"), {"question_id": NUMBER_OR_TEXT, "turns": TEXTS}),
    "arena_hard": (partial(write_answers, name="arena_hard"), {"uid": NUMBER_OR_TEXT, "prompt": TEXT}),
    "rewardbench": (rewardbench, {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}),
}
GREEDY = ("lm_eval", "inspect")  # whose responses the harness itself generates


@dataclass(frozen=True, kw_only=True)
class HarnessArgs(PolicyEvaluationArgs):
    """Other harnesses."""

    harness: Literal["lm_eval", "inspect", "alpaca_eval", "mt_bench", "arena_hard", "rewardbench"] | None = flag(
        None, when=GREEDY, excludes={"stop_strings": ..., "eos_ids": ..., "repetition_penalty": ..., "dry_run": True}
    )
    """Write the files or the task of this harness and print its command, in place of the evaluation here."""
    harness_questions: str | None = flag(None, check=check_file, needs="harness")
    """File of the benchmark's questions (alpaca_eval, mt_bench, arena_hard), or of pairs (rewardbench)."""
    harness_dir: str | None = flag(None, needs="harness")
    """Folder of these files; by default `eval/{harness}` in the experiment dir."""

    def _check(self) -> None:
        if self.harness is None:
            return
        _, columns = HARNESSES[self.harness]
        if self.harness_questions is None and columns and self.harness != "rewardbench":
            raise ValueError(
                f"--harness {self.harness} needs --harness_questions: the benchmark's own file, of {', '.join(columns)}"
            )
        if self.harness_questions is not None and not columns:
            raise ValueError(
                f"--harness_questions {self.harness_questions}: --harness {self.harness} is a task of the held-out "
                "split; leave it out"
            )
        if self.harness_dir is not None and len(self.model_name) > 1:
            raise ValueError(f"--harness_dir {self.harness_dir} is for one --model_name; leave it out")
        for name in self.model_name:
            if self.harness_dir is None and not is_experiment_dir(name):
                raise ValueError(f"--harness {self.harness}: {name} is not an experiment dir; name a --harness_dir")
            check_output(harness_folder(self, name) / "any", "--harness_dir" if self.harness_dir else "--model_name")


def harness_folder(args: HarnessArgs, name: str) -> Path:
    """Folder of a model's files for the harness."""
    folder = Path(args.harness_dir) if args.harness_dir is not None else Path(name, "eval", str(args.harness))
    return folder.resolve()  # in files and commands that are read from other folders


def write_for(args: HarnessArgs, harness: str, data_dir: str, device: torch.device) -> list[dict[str, Any]]:
    """Write the files of `--harness` for each model and print its command; returns the results of the same rows.

    Raises: UsageError when the harness cannot evaluate the model or the data.
    """
    questions = read_questions(args.harness_questions, harness) if args.harness_questions else []
    rows = []
    for name in args.model_name:
        source = resolve(name, "--model_name")
        check_kind(harness, name, holds_reward_model(source))
        tokenizer = load_tokenizer(data_dir, name, verify=args.verify)
        if harness == "rewardbench":
            model: Any = load_reward_model(args, name, tokenizer, device)
        else:
            model = load_frozen(name, tokenizer, device)
        folder = harness_folder(args, name)
        with writing(folder):
            make_folder(folder)
        subject = Subject(
            args=args,
            name=name,
            source=str(Path(source).resolve()) if Path(source).is_dir() else source,
            model=model,
            tokenizer=tokenizer,
            data_dir=data_dir,
            folder=folder,
            questions=questions[: args.num_samples],
        )
        written = HARNESSES[harness][0](subject)
        show(written)
        rows.append({"model": short_name(name), **written.results})
    return rows


def check_kind(harness: str, name: str, is_reward_model: bool) -> None:
    """Raises: UsageError when a harness is for the other kind of model."""
    if harness == "rewardbench" and not is_reward_model:
        raise UsageError(
            f"--harness rewardbench: {name} holds a language model; give a reward model, or compare likelihoods of "
            "pairs with --harness lm_eval"
        )
    if harness != "rewardbench" and is_reward_model:
        raise UsageError(f"--harness {harness}: {name} holds a reward model; --harness rewardbench is for those")


def read_questions(path: str, harness: str) -> list[Row]:
    """Rows of a benchmark's file, JSONL or a JSON list. Raises: UsageError naming file, row and column."""
    if path.lower().endswith(".json"):
        try:
            rows = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as problem:
            raise UsageError(f"--harness_questions {path} cannot be read: {first_line(problem)}") from None
        if not isinstance(rows, list):
            raise UsageError(f"--harness_questions {path} holds no list but a {type(rows).__name__}")
    else:
        rows = read_jsonl(path)
    if not rows:
        raise UsageError(f"--harness_questions {path} has no rows")
    columns = HARNESSES[harness][1]
    for number, row in enumerate(rows, start=1):
        for name, (check, kind) in columns.items():
            if not isinstance(row, dict) or name not in row or not check(row[name]):
                found = repr(row[name])[:60] if isinstance(row, dict) and name in row else "no value"
                raise UsageError(
                    f"--harness_questions {path}: row {number} has under {name!r} {found}, not {kind}; "
                    f"--harness {harness} reads {', '.join(columns)}"
                )
    return rows


def show(written: Written) -> None:
    """Print the files, the results of their rows as computed here, and the command."""
    for file in written.files:
        print(f"written: {file}")
    for name, value in written.results.items():
        print(f"{name}: {value:.6f}")
    if written.note:
        print(f"note: {written.note}")
    if written.command:
        print(f"run: {written.command}")
