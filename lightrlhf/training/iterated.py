"""Iterated programs: iterations of stages, each of which leaves files.

A finished stage is not repeated, so an interrupted run resumes in its experiment dir. An iteration that has its
`policy/` is finished. A program has its stages, its evaluation and its report; `Iterated` does them in order, tries
them in a dry run, logs samples and resumes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightrlhf.cli.errors import StopTraining
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.loading import find_device
from lightrlhf.models.saving import upload
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.checkpoint import checkpoints, final_checkpoint
from lightrlhf.storage.curves import columns
from lightrlhf.storage.jsonl import finite_metrics, to_json, write_jsonl
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.results import in_words
from lightrlhf.storage.run_dir import read_logged
from lightrlhf.storage.writing import write_text
from lightrlhf.training import iterated_dir, launch
from lightrlhf.training.dry_run import texts_of_sample
from lightrlhf.training.iterated_dir import IteratedArgs
from lightrlhf.training.memory import peak_memory
from lightrlhf.training.metric_log import call_on_step
from lightrlhf.training.next_steps import print_next
from lightrlhf.training.rollout_log import write_iteration
from lightrlhf.training.run import Metrics, OnStep
from lightrlhf.training.signals import StopSignals
from lightrlhf.training.summary import print_summary

ON_STEP = "on_step.json"  # in an iteration's folder, the metrics that `on_step` returned
Args = TypeVar("Args", bound=IteratedArgs)
ProgramArgs = TypeVar("ProgramArgs")


@dataclasses.dataclass(frozen=True)
class Iteration(Generic[Args]):
    """An iteration, as its stages and evaluation see it.

    args: the run's, in a dry run its short iteration's; number: from 1, or 0 to evaluate the initial policy;
    policy: folder of the policy to start from, or to evaluate; initial: folder of the run's initial policy; data_dir:
    None where the rows were given.
    """

    args: Args
    number: int
    folder: Path
    policy: str
    initial: str
    data_dir: str | None
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Stage(Generic[Args]):
    """A stage of an iteration.

    path: its result in the iteration's folder; work: does what is left of it; samples: the first so many samples as
    rows of `rollouts.jsonl`, after the stage that scores them.
    """

    name: str
    path: str
    work: Callable[[Iteration[Args]], None]
    samples: Callable[[Iteration[Args], int], list[Row]] | None = None


@dataclasses.dataclass
class Iterated(Generic[Args]):
    """A run of an iterated program. Its methods are called within `open`.

    data_dir: None where the rows were given; size: number of prompts or dialogues (`unit`) of an iteration, which
    `size_flag` sets; tokenizer: loaded when not given; work, given, rows: see `iterated_dir.open_directory`.
    """

    args: Args
    program: str
    data_dir: str | None
    size: int
    unit: str
    size_flag: str
    work: str
    given: Mapping[str, str]
    rows: Sequence[Any] | None
    tokenizer: Tokenizer | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context manager: locks the experiment dir, new or resumed; a dry run has a temporary folder.

        SIGTERM and SIGUSR1 end the stages, whose files a resumed run reuses. (A training run inside a stage has its own
        handlers, which save it.) Raises: see `iterated_dir.open_directory`.
        """
        self._started, self._left = time.perf_counter(), ""  # stages and iterations that were not done, in words
        args, data = self.args, self.data_dir or f"given/{self.unit}"
        with ExitStack() as stack:
            if args.dry_run:
                trial = iterated_dir.trial_directory(args, self.program, data, self.work)
                self.directory, self.initial = stack.enter_context(trial)
                tried = min(args.mini_batch_size * args.devices, self.size)  # as many as a step of training has
                fewer: dict[str, Any] = {self.size_flag: tried, "epochs": None, "max_steps": args.num_steps(self.size)}
                self.args = dataclasses.replace(args, **fewer)
            else:
                opened = iterated_dir.open_directory(args, self.program, data, self.work, self.given, self.rows)
                self.directory, self.initial = opened
                stack.callback(StopSignals(f"; go on by --resume_from {self.directory}").close)
                stack.enter_context(lock_folder(self.directory))
            self.tokenizer = self.tokenizer or load_tokenizer(self.data_dir, self.initial, verify=args.verify)
            yield

    def iteration(self, number: int, policy: str) -> Iteration[Args]:
        """The iteration of this number; policy: see `Iteration`."""
        assert self.tokenizer is not None
        folder = self.directory / f"iteration-{number:02d}"
        return Iteration(self.args, number, folder, policy, self.initial, self.data_dir, self.tokenizer)

    def do(
        self,
        stages: Sequence[Stage[Args]],
        evaluate: Callable[[Iteration[Args]], Metrics | None],
        report: Callable[[Iterated[Args]], Metrics],
        on_step: OnStep | None = None,
        only: str = "all",
    ) -> None:
        """Run the remaining iterations, or one stage of the first unfinished one; in a dry run try the first.

        A stage ends the run by `StopTraining`, whose message is printed. evaluate: returns the results for
        `evaluation.json`, None without held-out rows; report: writes the run's files, returns the last metrics;
        on_step: called with (iteration, metrics), may return more metrics and raise `StopTraining`; only: name of the
        stage to do.
        """
        policy = self.initial
        if self.args.dry_run:
            self._do_stages(self.iteration(1, policy), stages)
            return
        with iterated_dir.keep_if_started(self.args, self.directory):
            self._evaluate(self.iteration(0, policy), evaluate)
        for number in range(1, self.args.iterations + 1):
            iteration = self.iteration(number, policy)
            is_new = not (iteration.folder / "policy").is_dir()
            if is_new:
                print(f"\niteration {number} of {self.args.iterations}", flush=True)
                try:
                    self._do_stages(iteration, [stage for stage in stages if only in ("all", stage.name)])
                except StopTraining as problem:
                    print(f"{problem}; iteration {number - 1} is the last", flush=True)
                    return
            if not (iteration.folder / "policy").is_dir():
                break  # a single stage before training
            policy = str(final_checkpoint(iteration.folder / "policy"))
            iterated_dir.link_checkpoint(self.directory, number, policy)
            self._evaluate(self.iteration(number, policy), evaluate)
            metrics = report(self)
            try:
                if on_step is not None and is_new and only == "all":
                    self._add_metrics(iteration, call_on_step(on_step, number, metrics))
            except StopTraining:
                break
            if is_new and only != "all":
                break
        self._left = self._list_unfinished(stages)

    def _do_stages(self, iteration: Iteration[Args], stages: Sequence[Stage[Args]]) -> None:
        """Do stages, and log samples after the one that scores them; a dry run prints the first one instead."""
        for stage in stages:
            stage.work(iteration)
            if stage.samples and self.args.dry_run:
                self._print_trial(stage.samples(iteration, 1)[0])
            elif stage.samples and self.args.log_rollouts:
                write_iteration(self.directory, iteration.number, stage.samples(iteration, self.args.log_rollouts))

    def _print_trial(self, sample: Row) -> None:
        """Print the first sample of a dry run, and the time that the sampling of an iteration should take."""
        assert self.tokenizer is not None
        print("\n".join(texts_of_sample(sample, self.tokenizer)))
        tried, number = min(self.args.mini_batch_size * self.args.devices, self.size), self.args.iterations
        seconds = time.perf_counter() - self._started
        whole = seconds * self.size / tried
        print(
            f"\nsampling and scoring took {seconds:.1f} s for {tried:,} {self.unit}, loading included; the "
            f"{self.size:,} of an iteration take {in_words(whole)} or less, {number:,} iterations "
            f"{in_words(number * whole)}, without evaluations\n",
            flush=True,
        )

    def _evaluate(self, iteration: Iteration[Args], evaluate: Callable[[Iteration[Args]], Metrics | None]) -> None:
        path = iteration.folder / "evaluation.json"
        if not path.is_file() and (results := evaluate(iteration)) is not None:
            write_text(path, to_json(results, indent=1))

    def write_results(self, results: Sequence[Row], metrics: Sequence[Metrics]) -> Metrics:
        """Write `results.json` and `metrics.jsonl`, a row per iteration; returns the metrics of the last one."""
        write_text(self.directory / "results.json", to_json(results, indent=1))
        self._metrics = metrics
        self._write_metrics()
        return {name: value for name, value in metrics[-1].items() if name != "step"} if metrics else {}

    def _add_metrics(self, iteration: Iteration[Args], metrics: Metrics) -> None:
        """Keep metrics of `on_step` with an iteration, and write them to its row of `metrics.jsonl`."""
        if metrics:
            write_text(iteration.folder / ON_STEP, to_json(finite_metrics(metrics), indent=1))
            self._write_metrics()

    def _write_metrics(self) -> None:
        rows = []
        for row in self._metrics:
            path = self.iteration(int(row["step"]), "").folder / ON_STEP
            rows.append({**row, **(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})})
        write_jsonl(self.directory / "metrics.jsonl", rows)

    def finish(self, with_table: bool = False) -> Path:
        """Upload the last policy if requested, and print that the run is finished, or in one line what is left of it.

        with_table: of `metrics.jsonl`. Returns the experiment dir. Raises: RunFailure when the upload fails.
        """
        args, done = self.args, len(checkpoints(self.directory))
        if args.dry_run:
            return iterated_dir.path_of(args, self.data_dir or f"given/{self.unit}")
        if self._left:
            resume = f"--resume_from {self.directory} does them"
            print(f"{done} of {args.iterations} iterations done, left: {self._left}; {resume}")
            return self.directory
        memory = peak_memory(find_device(args.accelerator)) if args.devices == 1 else 0.0  # else of other processes
        logged = columns(read_logged(self.directory / "metrics.jsonl")) if with_table else {}
        print_summary("policies of the iterations", self.directory, logged, memory, logged)
        print(f"finished in {time.perf_counter() - self._started:.0f} s: {self.directory}", flush=True)
        print_next(self.program, self.directory)
        if args.push_to_hub and done:
            policy = checkpoints(self.directory)[-1].resolve()
            upload(policy, args.push_to_hub)
            print(f"uploaded {policy} to {args.push_to_hub}")
        return self.directory

    def _list_unfinished(self, stages: Sequence[Stage[Args]]) -> str:
        """Stages and iterations that were not done, such as `rank, tokenize and train of iteration 1, iteration 2`."""
        folders = [self.iteration(number, "").folder for number in range(1, self.args.iterations + 1)]
        left = [number for number, folder in enumerate(folders, start=1) if not (folder / "policy").is_dir()]
        if not left:
            return ""
        names = [stage.name for stage in stages if not (folders[left[0] - 1] / stage.path).exists()]
        first = f"iteration {left[0]}"
        if len(names) < len(stages):
            first = " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) + f" of {first}"
        return ", ".join([first, *(f"iteration {number}" for number in left[1:])])


# ---------------------------------------------------------------------------------------------- helpers of programs
def shared_flags(args: Any, args_class: type) -> dict[str, Any]:
    """The flags that `args_class` has too, with their values in `args`."""
    names = {field.name for field in dataclasses.fields(args_class)}
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.name in names}


def train_policy(
    iteration: Iteration[Any], program: Callable[[ProgramArgs], Path], args_class: type[ProgramArgs], **changes: Any
) -> None:
    """Train on the `pairs/` of an iteration; the run is in `training/` until it is finished, then `policy/`.

    program: `train` of a program with this class of args; changes: flags that differ from the iteration's.
    """
    folder, args = iteration.folder, iteration.args
    own = {
        "data_dir": str(folder / "pairs"),
        "log_dir": str(folder),
        "experiment_name": "training",
        "output_dir": None,
        "push_to_hub": None,
        "resume_from": iterated_dir.find_started_run(folder),
    }
    training = args_class(**shared_flags(args, args_class) | own | changes)
    launch.run_on_devices(program, training, args.devices)
    if not args.dry_run:
        iterated_dir.keep_policy(folder)


def read_json(path: Path) -> Row:
    """The object in a JSON file; empty when there is no file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def mean(values: Iterable[float]) -> float:
    """Mean of numbers; NaN of none."""
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else math.nan
