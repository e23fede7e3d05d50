"""Items of reasoning-gym's procedural tasks, each in the split that its question hashes to.

A question is in one split for any seed, size and configuration, so neither two preparations nor a model's pretraining
data can leak held-out questions. Items of reasoning-gym come from `seed + index`: two neighbouring seeds share nearly
all of them, hence a seed of its own for each task and seed. Five tasks depend on Python's hashes of texts, so items are
made in other processes, with a fixed `PYTHONHASHSEED`.

Left out: `composite`, which mixes other tasks, and curricula.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from difflib import get_close_matches
from typing import Any, NamedTuple

from lightrlhf.cli.errors import RunFailure, UsageError, first_line, one_line_errors
from lightrlhf.cli.packages import needs_package
from lightrlhf.data.entries import entry_text, read_entry
from lightrlhf.data.splits import SPLITS, split_by_hash

MIXTURE = "composite"
PATIENCE = 1000  # draws without a new question, after which a task is taken to have no more


class Item(NamedTuple):
    """A question of a task."""

    split: str
    source: str
    question: str
    answer: str | None  # None: any solution is right, and the task's scorer checks it
    entry: str  # JSON of what the scorer reads


class Items(NamedTuple):
    """What a task gave."""

    task: str
    kept: list[Item]
    repeated: list[str]  # sources of items whose question an earlier item had
    unscored: list[str]  # sources of items whose own answer the task's scorer does not pay in full
    draws: int

    def count(self, split: str) -> int:
        """Items of a split."""
        return sum(item.split == split for item in self.kept)


class Request(NamedTuple):
    """Items to be made."""

    task: str
    options: dict[str, Any]
    seed: int
    sizes: dict[str, int]  # by split
    shares: dict[str, float]  # of questions, of the held-out splits
    unique: bool  # each question once


def tasks_of(names: Sequence[str]) -> list[str]:
    """The tasks that `names` stand for; `all` for every one. Raises: UsageError."""
    known = _tasks()
    if list(names) == ["all"]:
        return sorted(known)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--tasks all takes every one"
            hint = "it mixes tasks; name them instead" if name == MIXTURE else hint
            raise UsageError(f"--tasks {name} is no task of reasoning-gym that can be prepared; {hint}")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice:
        raise UsageError(f"--tasks {twice} is given twice; name it once")
    return list(names)


def check_options(tasks: Sequence[str], options: Mapping[str, Any], where: str) -> None:
    """Raises: UsageError, beginning with `where`, unless reasoning-gym accepts `options`, by task."""
    known = _tasks()
    for task, values in options.items():
        if task not in tasks:
            raise UsageError(f"{where}: {task} is not among --tasks {' '.join(tasks)}")
        if not isinstance(values, dict):
            raise UsageError(f"{where}: {task} needs options such as {{max_terms: 3}}, not {values!r}")
        config_class = known[task][1]
        names = sorted({*config_class.__dataclass_fields__} - {"seed", "size"})
        for name in values:
            if name in ("seed", "size"):
                raise UsageError(f"{where}: {task}'s {name} is set by --seed, --num_samples and --num_held_out")
            if name not in names:
                raise UsageError(f"{where}: {task} has no option {name}; it has {', '.join(names)}")
        try:
            config = config_class(**values, seed=0, size=1)
            config.validate()
        except Exception as problem:  # asserts, and whatever a value of another type makes of them
            raise UsageError(f"{where}: {task} refuses {json.dumps(values)}: {first_line(problem)}") from None


def items_of(requests: Sequence[Request], num_proc: int) -> list[Items]:
    """What each request gives. Raises: RunFailure when a task raises."""
    count = min(num_proc, len(requests))
    with ThreadPoolExecutor(count) as threads:
        parts = list(threads.map(made_elsewhere, [requests[i::count] for i in range(count)]))
    return [parts[i % count][i // count] for i in range(len(requests))]


def made_elsewhere(requests: Sequence[Request]) -> list[Items]:
    """What `make` gives in a process that hashes texts alike in every run. Raises: RunFailure."""
    search = os.pathsep.join(os.getcwd() if entry == "" else entry for entry in sys.path)
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": search}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"the process was killed, status {done.returncode}"])[-1]
        raise RunFailure(f"--tasks {' '.join(request.task for request in requests)}: {last.removeprefix('error: ')}")
    made = [json.loads(line) for line in done.stdout.splitlines()]
    return [Items(**result | {"kept": [Item(*item) for item in result["kept"]]}) for result in made]


def make(request: Request) -> Items:
    """The items of one task."""
    from reasoning_gym.factory import create_dataset, get_score_answer_fn

    task, _, _, sizes, shares, unique = request
    seed = random.Random(f"{request.seed} {task}").randrange(2**31)
    random.seed(seed)  # for a task that draws from the global generator
    limit = PATIENCE + 4 * max(
        round(size / shares.get(split, 1 - sum(shares.values()))) for split, size in sizes.items()
    )
    kept: list[Item] = []
    repeated: list[str] = []
    unscored: list[str] = []
    seen: set[str] = set()
    missing, since = dict(sizes), 0
    index = -1
    dataset = create_dataset(task, **request.options, seed=seed, size=limit)
    score = get_score_answer_fn(task)
    while any(missing.values()) and since < PATIENCE and index + 1 < limit:
        index += 1
        entry = dataset[index]
        source = f"{task} item {index}"
        key = " ".join(entry["question"].split()).casefold()  # as `datasets_prep.splits` compares prompts
        split = split_by_hash(f"{task}/{key}".encode(), shares)
        since = 0 if key not in seen else since + 1
        if not missing[split]:
            seen.add(key)
            continue
        if unique and key in seen:
            repeated.append(source)
            continue
        seen.add(key)
        text = scorable(entry, score)
        if text is None:
            unscored.append(source)
            continue
        kept.append(Item(split, source, entry["question"], entry["answer"], text))
        missing[split] -= 1
    order = {split: place for place, split in enumerate(SPLITS)}
    kept.sort(key=lambda item: order[item.split])  # stable
    return Items(task, kept, repeated, unscored, index + 1)


def scorable(entry: dict[str, Any], score: Callable[[str, dict[str, Any]], float]) -> str | None:
    """An entry as JSON, plain if its own answer is right by it; None if it never is."""
    texts = (entry_text(entry, keep_tuples) for keep_tuples in (False, True))
    if entry["answer"] is None:
        return next(texts)
    return next((text for text in texts if score(entry["answer"].strip(), read_entry(text)) == 1), None)


def _tasks() -> dict[str, Any]:
    """(dataset class, config class) of each task. Raises: UsageError where the package is missing."""
    try:
        import reasoning_gym  # noqa: F401  # registers its tasks
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError(needs_package("datasets_prep.reasoning_gym", "reasoning_gym")) from None
    return {name: classes for name, classes in DATASETS.items() if name != MIXTURE}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Answer the requests on standard input, one line of JSON each."""
    for values in json.load(sys.stdin):
        request = Request(*values)
        with redirect_stdout(sys.stderr):  # some tasks print
            try:
                items = make(request)
            except Exception as problem:  # whatever a task raises
                raise RunFailure(f"reasoning-gym's {request.task} fails: {first_line(problem)}") from None
        print(json.dumps(items._asdict()))


if __name__ == "__main__":
    main()
