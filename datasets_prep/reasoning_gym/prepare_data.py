"""Procedural reasoning tasks with verifiers (reasoning-gym, Stojanovski et al. 2025, 2505.24760), without a download.

`prompts_*` has the columns `task`, `entry` (JSON of reasoning-gym's entry, for its scorer) and `answer`; `finetune_*`
demonstrates the answers, where a task states one. Sizes are items of each task; a question is in one split only, for
any seed and options (see `items`). The scorer, `lightrlhf.rewards.verifiers:reasoning_gym`, reads the last
`<answer>…</answer>` of a response, else its last line.

    python -m datasets_prep.reasoning_gym.prepare_data --tasks chain_sum gcd --destination_dir=data/sums \
        --tokenizer_name=Qwen/Qwen3-0.6B

Left out: reasoning-gym's curricula and its mixture `composite`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from datasets_prep.common import PrepareArgs, load_tokenizer, prepare
from datasets_prep.encoding import Dropped
from datasets_prep.reasoning_gym.items import Item, Items, Request, check_options, items_of, tasks_of
from lightrlhf.cli.errors import RunFailure, UsageError, first_line, one_line_errors
from lightrlhf.cli.fields import at_least
from lightrlhf.cli.parser import parse
from lightrlhf.storage.jsonl import Row

STAGES = ("finetune", "prompts")
INSTRUCTIONS = {"tags": "Give the final answer between <answer> and </answer>.", "alone": "Give the answer alone."}
ANSWERS = {"tags": "<answer>{}</answer>", "alone": "{}"}


@dataclass(frozen=True, kw_only=True)
class ReasoningGymArgs(PrepareArgs):
    """Write procedural reasoning tasks."""

    tasks: list[str]
    """Names of reasoning-gym's tasks, such as chain_sum; `all` for every one."""
    task_config: str | None = None
    """YAML or JSON file of options by task, such as `{chain_sum: {max_terms: 3}}`; others keep their defaults."""
    answer_format: Literal["tags", "alone"] = "tags"
    """Answers between <answer> and </answer>, after any reasoning, or alone (answers of one line only)."""
    instruction: str | None = None
    """Line below each question, which may be empty; by default it asks for the answer in the given format."""
    dataset_name: str = "reasoning_gym"
    """Name in the report; the items are generated, not read."""
    num_samples: int = 1000
    """Items of each task in the training split."""
    num_held_out: int = at_least(1, 100)
    """Items of each task in the validation and in the test split."""

    def _check(self) -> None:
        if not self.tasks:
            raise ValueError("--tasks needs at least one name, such as chain_sum")
        if self.stage not in ("all", *STAGES):
            raise ValueError(f"--stage {self.stage}: reasoning tasks have the stages finetune and prompts")


def read_options(path: str | None, tasks: list[str]) -> dict[str, Any]:
    """Options by task of `--task_config`. Raises: UsageError."""
    if path is None:
        return {}
    where = f"--task_config {path}"
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as problem:
        raise UsageError(f"{where} cannot be read: {first_line(problem)}") from None
    if not isinstance(options, dict):
        raise UsageError(f"{where} must hold options by task, such as {{chain_sum: {{max_terms: 3}}}}")
    check_options(tasks, options, where)
    return options


def rows(args: ReasoningGymArgs, tasks: list[str], options: dict[str, Any]) -> Iterator[Row | Dropped]:
    """Rows of all tasks, and a dropped one for each repeated or unusable item. Raises: RunFailure, UsageError."""
    shares = {"test": args.test_percentage, "validation": args.validation_percentage}
    shares = {split: share for split, share in shares.items() if share}
    sizes = {"train": args.num_samples} | dict.fromkeys(shares, args.num_held_out)
    unique = args.remove_same_inputs
    requests = [Request(task, options.get(task, {}), args.seed, sizes, shares, unique) for task in tasks]
    for items in items_of(requests, args.num_proc or os.cpu_count() or 1):
        for split, size in sizes.items():
            if items.count(split) < size:
                short(items, split, size)
        yield from (Dropped("same_question", source) for source in items.repeated)
        yield from (Dropped("own_answer_scores_below_1", source) for source in items.unscored)
        for item in items.kept:
            yield to_row(args, items.task, item)


def short(items: Items, split: str, size: int) -> None:
    """Say that a task has fewer questions than were asked for. Raises: RunFailure when it has none to train on."""
    count = items.count(split)
    if items.unscored and not items.kept:
        raise RunFailure(
            f"--tasks {items.task}: its scorer pays none of its own {len(items.unscored)} answers in full; leave it out"
        )
    if split == "train" and not count:
        raise RunFailure(f"--tasks {items.task} gave no item to train on; widen its options in --task_config")
    print(f"{items.task}: {count} items of {size} for {split}; {items.draws} draws gave no more questions")


def to_row(args: ReasoningGymArgs, task: str, item: Item) -> Row:
    """A row of both stages, or of prompts alone where a task states no answer. Raises: UsageError."""
    instruction = INSTRUCTIONS[args.answer_format] if args.instruction is None else args.instruction
    question = f"{item.question}\n{instruction}" if instruction else item.question
    columns = {"task": task, "entry": item.entry, "answer": item.answer}
    row = {"prompt": [{"role": "user", "content": question}], "columns": columns}
    row |= {"split": item.split, "source": item.source}
    if item.answer is None:
        return row
    answer = item.answer.strip()
    if args.answer_format == "alone" and "\n" in answer:
        raise UsageError(
            f"--answer_format alone: {item.source} has an answer of several lines; use tags, or leave it out"
        )
    return row | {"completion": ANSWERS[args.answer_format].format(answer)}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the tasks from the command line."""
    args = parse(ReasoningGymArgs, argv)
    tasks = tasks_of(args.tasks)
    options = read_options(args.task_config, tasks)
    tokenizer = load_tokenizer(args.tokenizer_name)
    question = (
        f"State the final answer to the following arithmetic problem: 4 + 3 =\n{INSTRUCTIONS[args.answer_format]}"
    )
    example = [{"role": "user", "content": question}]
    reward = "lightrlhf.rewards.verifiers:reasoning_gym"
    prepare(args, rows(args, tasks, options), tokenizer=tokenizer, reward=reward, example_prompt=example, stages=STAGES)


if __name__ == "__main__":
    main()
