"""Run: the parts of a training loop besides its algorithm, each from its own file.

Processes (`ranks.py`), the order of the data (`order.py`), optimisers (`learners.py`), metrics (`metric_log.py`), files
and checkpoints (`run_files.py`), times, errors and signals (`phases.py`). A run is bitwise reproducible on a CPU at the
same thread and rank count: the order of an epoch follows from (seed, epoch), sampling noise from (seed, step), and
everything else is in `resume.pt`.

Left out: base trainers, and callbacks but `on_step`; the loops stay in the algorithm files.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import EvalIntervalArgs, TrainArgs
from lightrlhf.data.batch import Batch, Rollout
from lightrlhf.data.splits import Row
from lightrlhf.training.best import Best
from lightrlhf.training.distributed import check_same, launch, make_fabric
from lightrlhf.training.dry_run import DryRun
from lightrlhf.training.learners import Learners
from lightrlhf.training.memory import peak_memory
from lightrlhf.training.metric_log import MetricLog, Metrics, OnStep
from lightrlhf.training.order import Order
from lightrlhf.training.phases import Phases
from lightrlhf.training.progress import Progress
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.restarts import as_restarted
from lightrlhf.training.resume import restore_rng
from lightrlhf.training.run_files import Checkpoints, RunFiles
from lightrlhf.training.summary import print_end, run_banner

__all__ = ["Metrics", "OnStep", "Run"]
AnyArgs = TypeVar("AnyArgs", bound=TrainArgs)


class Run(Generic[AnyArgs]):
    """One training run: its experiment dir, logs, learners and checkpoints; how it stops and resumes.

    on_step: called with the step and its metrics wherever they are logged, on the first rank; see `call_on_step`. It
    may raise `StopTraining`. given: objects that `train` was called with (see `describe_given`), the same for a
    resumed run.
    data: path whose last two parts name the experiment dir; `--data_dir` when not given, of several the first one's
    parent and the names joined by +.
    Raises: UsageError when the experiment dir cannot be written, or there is nothing to resume from.
    """

    def __init__(
        self,
        args: AnyArgs,
        program: str,
        on_step: OnStep | None = None,
        given: dict[str, str] | None = None,
        data: str | None = None,
    ) -> None:
        from lightning.fabric import seed_everything

        if on_step is not None and not callable(on_step):
            raise UsageError(f"on_step is not a function f(step, metrics), but a {type(on_step).__name__}")
        fabric = launch(make_fabric(args), args)
        self.program, self.given, self.args = program, given or {}, as_restarted(fabric, args)
        args, self.ranks = self.args, Ranks(fabric, self.args)
        self.files = RunFiles(args, self.ranks, program, self.given, data)
        self.ranks.watch(self.files.last_good)
        check_same(fabric, args)
        seed_everything(args.seed, verbose=False)
        began, self.resumed = self.files.resume()
        resumed = self.resumed or {}
        self.dry = DryRun() if args.dry_run else None  # then nothing is written
        self.best = Best(args, resumed.get("best"))
        self.progress = Progress(resumed.get("step", 0), is_dry=args.dry_run, is_last=self.best.out_of_patience)
        self.order = Order(args, self.ranks, began, self.files.data_dirs)
        learning = (self.ranks, self.order, self.progress, self.files.last_good)
        self.learners = Learners(args, *learning, self.resumed, self.dry)
        logging = (self.ranks, self.progress, self.best, resumed.get("means"), self.learners.loss_scale)
        self.metric_log = MetricLog(args, *logging, on_step, self.dry)
        parts = (self.files, self.order, self.progress, self.learners)
        self.checkpoints = Checkpoints(args, *parts, self.metric_log, self.dry)
        self.phases = Phases(args, *parts, self.checkpoints)
        self.phase, self.save, self.keep = self.phases.phase, self.phases.save, self.checkpoints.keep
        self._take_verbs()
        self._eval_interval = args.eval_interval if isinstance(args, EvalIntervalArgs) else 0
        self._results: Metrics = {}  # of the last evaluation
        self._endings = ExitStack()  # of what the loop opened
        self._started = time.perf_counter()
        weakref.finalize(self, self.phases.signals.close)  # for a run that is refused before its loop

    def _take_verbs(self) -> None:
        """Let a loop state on the run itself what it does in each step."""
        learners, self.device, self.print0 = self.learners, self.ranks.device, self.ranks.print0
        self.freeze, self.autocast, self.accumulate = learners.freeze, learners.autocast, learners.accumulate
        self.backward, self.optimize = learners.backward, learners.optimize

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.progress.step

    def setup(self, name: str, module: nn.Module, learning_rate: float, num_updates: int) -> nn.Module:
        """Wrap a trainable module with its optimiser and schedule, which `optimize(name)` steps `num_updates` times."""
        with self.phase("setup"):
            return self.learners.setup(name, module, learning_rate, num_updates)

    # ------------------------------------------------------------------------------------------------------- steps
    def steps(self, num_steps: int) -> Iterator[int]:
        """Remaining step numbers, counted from 0, with a progress bar; `self.step` counts finished steps."""
        try:
            with self._endings:
                self._open(num_steps)
                yield from self._steps(num_steps)
        except BaseException as problem:
            self.phases.signals.close()
            if isinstance(problem, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise

    def _open(self, num_steps: int) -> None:
        self.learners.check_frozen()
        self.phases.signals.is_between, self.progress.num_steps = False, num_steps
        if not self.dry:
            self.files.open(self.order.began, self.best, self.step)
            if self.ranks.is_first:
                self.metric_log.open(self.files.directory, self.files.describe(), self.files.writing)
        parts = (self.learners.parameters, self.order, self.progress, self.best)
        self.print0(run_banner(self.args, self.given, *parts, self.files.directory))
        if self.resumed:  # after loading, which may draw numbers
            restore_rng(self.resumed, self.device, self.ranks.fabric.global_rank)

    def _steps(self, num_steps: int) -> Iterator[int]:
        progress, first = self.progress, self.step
        with self.metric_log.show_bar(self.program) as bar:
            while self.step < num_steps and not progress.is_last:
                if self.dry:
                    progress.is_last = self.dry.begin(progress.seconds, num_steps)
                progress.seconds.clear()
                self.phases.save_or_stop()
                self.checkpoints.begin_step()
                yield self.step
                bar.update(self.step - bar.n)
                self.metric_log.check_best(self.step - first, self._eval_interval)

    def on_end(self, end: Callable[[], None]) -> None:
        """Call a function when the loop over `steps` ends, however that is."""
        self._endings.callback(end)

    def end_step(
        self,
        metrics: Metrics,
        work: Batch | Sequence[Row] | int,
        evaluate: Callable[[], Metrics] | None = None,
        at_saves: bool = False,
    ) -> None:
        """Count a finished step and log its metrics; evaluate and save when due. Changes no weight and no gradient.

        work: this rank's samples or rows, whose tokens give `time/tokens_per_second`; a number of decisions gives
        `time/steps_per_second`. evaluate: returns metrics, none when nothing was measured; called every
        `--eval_interval` steps, with `at_saves` also before each checkpoint that is due.
        """
        self.progress.step += 1
        self.metric_log.rollout = work if isinstance(work, Rollout) else None
        self.metric_log.add_step({**metrics, **self.metric_log.speed(work), "train/lr": self.learners.learning_rate()})
        is_due = self.progress.due(self._eval_interval) or (at_saves and self.checkpoints.due)
        if evaluate and is_due:
            with self.phase("evaluation"):
                results = evaluate()
            if results:
                self._results = results
                self.metric_log.log(results)
        if self.checkpoints.due:
            self.save()

    def finish(self) -> Path:
        """Close the logs, print the run's table and its experiment dir; its model card gets the last evaluation.

        A dry run prints its report, and returns the folder that the run would have, which it did not make.
        """
        memory, signals = max(self.ranks.gather(peak_memory(self.device))), self.phases.signals
        is_stopped = bool(self.ranks.max(bool(signals.received)))
        self.ranks.close()
        if self.dry and self.ranks.is_first:  # alone, for it decodes
            self.print0(self.dry.report(self.args, self.progress.seconds, memory))
        if self.dry:
            self.phases.close()
            return self.files.directory
        if self.ranks.is_first:
            self.metric_log.close()
            self.metric_log.write_profile(self.learners.roles())
            if self._results:  # none when a finished run is resumed: its card keeps those it has
                self.files.write_card(self.step, self.order.data, self._results)
            print_end(self.program, self.files.directory, self.best, memory, time.perf_counter() - self._started)
        if is_stopped or (signals.interrupts and signals.received):
            self.phases.stop_by_signal()
        signals.close()
        self.files.upload_last()
        self.phases.close()
        return self.files.directory
