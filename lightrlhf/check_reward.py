"""Try a reward function on the data before it trains a model: which wrong answers does it reward?

Each function scores, for the same prompts, the right answer, nothing, random words, a refusal, the prompt echoed, all
answers of the sample in a row, the right answer a hundred times, and the answer of another row. Each is scored alone,
in a process that can be killed, so that a function that hangs or crashes is found, too. Prints a table, one line for
each suspicious case with its worst row, and exits with status 1 if there is one. Data with a column `task` is judged
task by task.

A case is suspicious if the right answer is not scored, or does not have the highest score; if for any prompt text
without an answer scores more than a tenth of it, a wrong or hedged answer more than half of it on average, or repeating
it more than the answer alone; and if the function fails. Without right answers in the data, only the four cases that do
not need one are tried, and their scores are shown, not judged.

Left out: reward models (`lightrlhf.evaluate` has their accuracy), and attacks made for one function.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, positive, random_seed
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import DataArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import Row, check_data_dir, load_prompts
from lightrlhf.data.tokens import decode
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.functions import Failure, Response
from lightrlhf.rewards.workers import Workers
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.jsonl import to_json
from lightrlhf.storage.results import cell, print_table
from lightrlhf.storage.writing import write_text

ANSWERS = ("answer", "ground_truth", "solution", "completion")  # columns, the first that a row has is taken
REPEATS = 100
WORDS = ("stone", "quickly", "seven", "under", "blue", "maybe", "window", "is", "the", "river", "42", "not")
RIGHT = "right answer"
EPSILON = 1e-9


class Case(NamedTuple):
    """An answer given instead of the right one."""

    answer: Callable[[random.Random, Row, str, Sequence[str]], str | None]  # None: there is no such answer
    share: float  # of the right answer's pay above which it is suspicious, on average
    each: bool = False  # whether it is suspicious above it in any row
    in_format: bool = True  # whether `--answer_format` is put around it
    needs_answer: bool = True  # whether it is made of right answers


def _other(rng: random.Random, right: str, answers: Sequence[str]) -> str | None:
    others = [answer for answer in answers if answer != right]
    return rng.choice(others) if others else None


CASES = {
    RIGHT: Case(lambda rng, row, right, answers: right, math.inf),
    "nothing": Case(lambda rng, row, right, answers: "", 0.1, each=True, in_format=False, needs_answer=False),
    "random words": Case(
        lambda rng, row, right, answers: " ".join(rng.choices(WORDS, k=8)), 0.1, each=True, needs_answer=False
    ),
    "a refusal": Case(lambda rng, row, right, answers: "I do not know", 0.1, each=True, needs_answer=False),
    "the prompt": Case(
        lambda rng, row, right, answers: row["prompt"], 0.1, each=True, in_format=False, needs_answer=False
    ),
    "all answers": Case(lambda rng, row, right, answers: ", ".join(answers) if len(answers) > 1 else None, 0.5),
    f"answer x {REPEATS}": Case(lambda rng, row, right, answers: " ".join([right] * REPEATS), 1.0),
    "another answer": Case(lambda rng, row, right, answers: _other(rng, right, answers), 0.5),
}


def check_format(text: str, flag: str) -> None:
    """Raises: ValueError unless a text says once where the answer goes."""
    if text.count("{}") != 1:
        raise ValueError(f"{flag} {text} must contain {{}} once, for the answer")


@dataclass(frozen=True, kw_only=True)
class CheckRewardArgs(DataArgs):
    """Score right, wrong and empty answers to the prompts of the data, and report wrong ones that are rewarded."""

    reward_function: list[str] = flag(show="first")
    """Reward functions `package.module:name`, each checked separately."""
    split: Literal["train", "validation", "test"] = "train"
    """Split of the prompts."""
    num_prompts: int = at_least(1, 32)
    """Number of prompts to try, per task where the data has a column `task`."""
    answer_format: str = flag("{}", check=check_format)
    """Text of a response, with {} for the answer, such as `<answer>{}</answer>`."""
    reward_timeout: float = positive(10.0)
    """Timeout of a function per response, in seconds."""
    output_file: str | None = flag(None, check=check_output)
    """JSON file for the results."""
    seed: int = random_seed(42, show="rarely")
    """Seed of the choice of prompts and of random words."""

    def _check(self) -> None:
        if not self.reward_function:
            raise ValueError("--reward_function needs at least one function package.module:name")


def run(args: CheckRewardArgs) -> list[dict[str, Any]]:
    """Check reward functions; returns a row of results for each function, task and case.

    Raises: UsageError when a function cannot be imported.
    """
    check_args(args, CheckRewardArgs)
    for path in args.reward_function:
        load_function(path, "--reward_function")
    check_data_dir(args)
    groups = read_rows(args)
    for task in [task for task, rows in groups.items() if rows[0]["answer"] is None]:
        skipped = ", ".join(name for name, case in CASES.items() if case.needs_answer)
        print(f"skipped{task and ' for '}{task}: {skipped}; the data has no column {' or '.join(ANSWERS)}")
    results = []
    for path in args.reward_function:
        workers = Workers(path, args.reward_timeout)
        for task, rows in groups.items():
            results += summarize(check(args, workers, rows), {"reward_function": path, "task": task})
        workers.close()
    show(results)
    if args.output_file is not None:
        write_text(Path(args.output_file), to_json(results, indent=1))
        print(f"wrote {args.output_file}")
    return results


# ------------------------------------------------------------------------------------------------------------ the data
def read_rows(args: CheckRewardArgs) -> dict[str, list[Row]]:
    """`--num_prompts` random rows of each task, in their order; one group without a name where there are no tasks.

    A row has its prompt as text, its `columns` and the right `answer`, None without one. Rows without an answer are
    left out where others of their task have one.
    """
    tokenizer = load_tokenizer(args.data_dir, verify=args.verify)
    prompts = load_prompts(args.data_dir, args.split, args.verify)
    places: dict[str, tuple[array[int], array[int]]] = {}  # of all rows of a task, and of those with an answer
    for index, row in enumerate(prompts):
        every, answered = places.setdefault(str(row["columns"].get("task") or ""), (array("q"), array("q")))
        every.append(index)
        if answer_of(row) is not None:
            answered.append(index)
    rng = random.Random(args.seed)
    groups: dict[str, list[Row]] = {}
    for task, (every, answered) in places.items():
        members = answered or every
        chosen = rng.sample(range(len(members)), min(args.num_prompts, len(members)))
        groups[task] = []
        for index in (members[place] for place in sorted(chosen)):
            row = prompts[index]
            prompt = decode(tokenizer, [int(token) for token in row["input_ids"]])
            known = {"index": index, "prompt": prompt, "columns": row["columns"], "answer": answer_of(row)}
            groups[task].append(known)
    return groups


def answer_of(row: Row) -> str | None:
    """The right answer of a prompt, None without one."""
    given = (row["columns"].get(name) for name in ANSWERS)
    return next((str(value) for value in given if value is not None), None)


# ---------------------------------------------------------------------------------------------------------- the checks
def check(args: CheckRewardArgs, workers: Workers, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """For each case its responses: index of the row, response, score (None: not scored), failure, seconds of a call."""
    answers = list(dict.fromkeys(row["answer"] for row in rows if row["answer"] is not None))
    rng = random.Random(args.seed)
    found: dict[str, list[Row]] = {}
    for name, case in CASES.items():
        if case.needs_answer and not answers:
            continue
        texts = [case.answer(rng, row, row["answer"], answers) for row in rows]
        asked = [(row, text) for row, text in zip(rows, texts) if text is not None]
        responses = [
            Response(row["prompt"], args.answer_format.format(text) if case.in_format else text, None, row["columns"])
            for row, text in asked
        ]
        if not found and responses:
            workers.run(responses[:1])  # so that the start of the process is not counted as time of a call
        started = time.perf_counter()
        values = workers.run(responses)
        seconds = (time.perf_counter() - started) / max(len(responses), 1)
        found[name] = [
            {"index": row["index"], "response": response.completion, "seconds": seconds, **outcome(value)}
            for (row, _), response, value in zip(asked, responses, values)
        ]
    return found


def outcome(value: Any) -> dict[str, Any]:
    """A function's result as `score` (None if missing), and why it failed."""
    if isinstance(value, Failure):
        return {"score": None, "failure": value.kind, "reason": str(value)}
    if value is not None and not math.isfinite(value):
        return {"score": None, "failure": "errors", "reason": f"it returned {value}"}
    return {"score": value, "failure": None, "reason": ""}


def summarize(found: dict[str, list[Row]], names: dict[str, str]) -> list[dict[str, Any]]:
    """A row of results for each case that has responses, with what is suspicious about it, if anything."""
    scores = [row["score"] for rows in found.values() for row in rows if row["score"] is not None]
    top, floor = max(scores, default=0.0), min([0.0, *scores])
    own = [row["score"] for row in found.get(RIGHT, ()) if row["score"] is not None]
    pay = sum(own) / len(own) if own else floor
    results = []
    for case, rows in found.items():
        if not rows:
            continue
        scored = [row for row in rows if row["score"] is not None]
        values = [row["score"] for row in scored]
        mean = sum(values) / len(values) if values else None
        failed = [row for row in rows if row["failure"]]
        reasons, worst = [], max(scored, key=lambda row: row["score"], default=rows[0])
        if case == RIGHT:
            worst = min(scored, key=lambda row: row["score"], default=rows[0])
            below = sum(value < top - EPSILON for value in values)
            if values and pay <= floor + EPSILON:
                reasons.append("it is not paid")
            elif below:
                reasons.append(f"{below} of {len(values)} get less than the highest score, {top:.3g}")
            if len(scored) < len(rows):
                reasons.append(f"{len(rows) - len(scored)} of {len(rows)} are not scored")
                worst = next(row for row in rows if row["score"] is None)
        elif mean is not None and RIGHT in found:
            each, allowed = CASES[case].each, CASES[case].share * (pay - floor) + EPSILON
            if (worst["score"] if each else mean) - floor > allowed:
                highest = f", {worst['score']:.3g} at most" if each else ""
                reasons.append(f"it gets {mean:.3g} on average{highest}, the right answer {pay:.3g}")
        if failed:
            reasons.append(f"the function fails on {len(failed)} of {len(rows)}: {failed[0]['reason']}")
            worst = worst if len(reasons) > 1 else failed[0]
        results.append(
            {
                **names,
                "case": case,
                "mean": mean,
                "min": min(values, default=None),
                "max": max(values, default=None),
                "top_share": sum(value >= top - EPSILON for value in values) / len(rows),
                "unscored": len(rows) - len(scored) - len(failed),
                **{kind: sum(row["failure"] == kind for row in failed) for kind in ("errors", "crashes", "timeouts")},
                "seconds": rows[0]["seconds"],
                "suspicious": "; ".join(reasons),
                "example": {name: worst[name] for name in ("index", "response", "score")},
            }
        )
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table for each function and task, and a line for each suspicious case."""
    columns = ("mean", "min", "max", "top_share", "unscored", "errors", "crashes", "timeouts", "seconds")
    for path, task in dict.fromkeys((row["reward_function"], row["task"]) for row in results):
        own = [row for row in results if (row["reward_function"], row["task"]) == (path, task)]
        shown = [[row["case"], *("" if row[name] is None else cell(row, name) for name in columns)] for row in own]
        print_table(f"{path} {task}".strip(), ("case", *columns), shown, width=120)
    for row in results:
        if row["suspicious"]:
            where = f"{row['reward_function']} {row['task']}".strip()
            example = row["example"]
            response = json.dumps(example["response"][:80], ensure_ascii=False)
            print(
                f"suspicious: {where}: {row['case']}: {row['suspicious']} (row {example['index']}: {response} got "
                f"{example['score']})"
            )


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; exits with status 1 when a case is suspicious, else returns the results."""
    results = run(parse(CheckRewardArgs, argv))
    if any(row["suspicious"] for row in results):
        sys.exit(1)
    return results


if __name__ == "__main__":
    main()
