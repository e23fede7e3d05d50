"""Log of metrics: `metrics.jsonl`, the logger and `on_step`, and what follows from a value: the best step, early stops.

Left out: the files of samples (`rollout_log.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import StopTraining, UsageError
from lightrlhf.cli.functions import parameters_of
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.batch import Batch, Rollout, row_length
from lightrlhf.data.splits import Row
from lightrlhf.storage.jsonl import append_jsonl, finite_metrics
from lightrlhf.storage.results import USUAL_METRICS
from lightrlhf.training.best import Best
from lightrlhf.training.dry_run import DryRun
from lightrlhf.training.faults import quiet_event_writer
from lightrlhf.training.loggers import Logger, make_logger
from lightrlhf.training.loss_scale import LossScale
from lightrlhf.training.means import StepMeans
from lightrlhf.training.progress import Progress
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.roofline import Step, write_profile

IN_PROGRESS_BAR = USUAL_METRICS[:4]
TIMED = ("rollout", "score", "resample", "update")  # phases of a step whose times are metrics
Metrics = dict[str, float]
OnStep = Callable[..., Mapping[str, float] | None]  # of step, metrics and, if it has this parameter, rollout
Writing = Callable[[str], AbstractContextManager[None]]


class MetricLog:
    """Where the metrics of a run go. on_step: see `Run`; means: state of the means of a resumed run."""

    def __init__(
        self,
        args: TrainArgs,
        ranks: Ranks,
        progress: Progress,
        best: Best,
        means: Mapping[str, list[float]] | None = None,
        loss_scale: LossScale | None = None,
        on_step: OnStep | None = None,
        dry: DryRun | None = None,
    ) -> None:
        self.args, self.ranks, self.progress, self.best = args, ranks, progress, best
        self.means, self.loss_scale, self.on_step, self.dry = StepMeans(means), loss_scale, on_step, dry
        self.names: dict[str, None] = {}  # of the metrics, in order
        self.profiled: list[Step] = []
        self.bar: Any = None
        self.rollout: Rollout | None = None  # of the current step, for `on_step`
        self._logger: Logger | None = None  # of the first rank
        self._infinite: set[str] = set()  # infinite metrics that a note has named
        self._seconds = 0.0  # spent on logs since the last row of metrics

    def open(self, directory: Path, described: Mapping[str, Any], writing: Writing) -> None:
        """Open the logger of the first rank. described: the content of `args.json`; writing: see `RunFiles.writing`."""
        self._path, self._writing = directory / "metrics.jsonl", writing
        quiet_event_writer()
        with writing("logs"):
            self._logger = make_logger(self.args, directory, described, self.progress.step)

    def close(self) -> None:
        """Finish the logger's files, if it is open."""
        if self._logger:
            with self._writing("logs"):
                self._logger.close()
            self._logger = None

    def write_profile(self, roles: Mapping[str, Any]) -> None:
        """Write the profile of the steps, if there are any. roles: the trained models."""
        if self.profiled:
            with self._writing("logs"):
                write_profile(self._path.parent, self.profiled, roles, self.args, self.ranks.device)

    @contextmanager
    def show_bar(self, title: str) -> Iterator[Any]:
        """Show a progress bar of the run's steps on the first rank, with the newest metrics."""
        from tqdm import tqdm

        steps = {"total": self.progress.num_steps, "initial": self.progress.step}
        with tqdm(**steps, desc=title, disable=not self.ranks.is_first, mininterval=0.5) as self.bar:
            yield self.bar

    # ---------------------------------------------------------------------------------------------------- metrics
    def add_step(self, metrics: Metrics) -> None:
        """Add the metrics of this step, and log the means since the previous row every `--log_interval` steps."""
        self.means.add(metrics)
        if self.progress.due(self.args.log_interval):
            self.log(self.means.end())

    def speed(self, work: Batch | Sequence[Row] | int) -> Metrics:
        """Seconds of the step's phases, and tokens without padding (or decisions) per second, over all ranks."""
        seconds = self.progress.seconds
        times = {f"time/{name}": seconds[name] for name in TIMED if name in seconds}
        unit = "tokens"
        if isinstance(work, Batch):
            number = int(work.attention_mask.sum())
        elif isinstance(work, int):
            unit, number = "steps", work
        else:
            number = sum(map(row_length, work))
        if self.args.profile:
            self.profiled.append(Step.of({name: seconds[name] for name in TIMED if name in seconds}, work))
        return {**times, f"time/{unit}_per_second": self.ranks.total(number) / sum(times.values())}

    def log(self, metrics: Metrics) -> None:
        """Log metrics after the current step, and those that `on_step` returns.

        NaN, a mean over nothing, is not written. Raises: UsageError when `on_step` returns anything but metrics.
        """
        if not all(name.startswith("val/") for name in metrics):
            more = self.loss_scale.metrics() if self.loss_scale else {}
            metrics = {**metrics, **more, "time/logging": self._seconds}
            self._seconds = 0.0
        if self.on_step is not None:
            metrics = {**metrics, **self._call_on_step(metrics)}
        if self.dry:
            self.dry.log({name: float(value) for name, value in metrics.items()}, self.progress.seconds)
        elif self.ranks.is_first:
            with self.time_writing():
                self._write(metrics)
        self._compare(metrics)

    def _compare(self, metrics: Metrics) -> None:
        """Compare with the best value of the metric of `--keep_best`; all ranks take the first one's."""
        self.names.update(dict.fromkeys(metrics))
        best, step = self.best, self.progress.step
        if best.metric not in metrics:
            return
        best.update(self.ranks.broadcast(float(metrics[best.metric])), step)
        if best.out_of_patience:
            self.progress.is_last = True
            self.ranks.print0(f"stopped at step {step} after {best.since} values without improvement: {best}")

    def _call_on_step(self, metrics: Metrics) -> Metrics:
        """What the first rank's `on_step` returns, on all ranks; the step is the last one if it asks to stop."""
        more: Metrics = {}
        stop = False
        if self.ranks.is_first and self.on_step is not None:
            try:
                more = call_on_step(self.on_step, self.progress.step, metrics, self.rollout)
            except StopTraining:
                stop = True
                self.ranks.print0(f"stopped by on_step at step {self.progress.step}")
        more, stop = self.ranks.broadcast((more, stop))
        self.progress.is_last |= stop
        return more

    def _write(self, metrics: Metrics) -> None:
        step, values = self.progress.step, {name: float(value) for name, value in metrics.items()}
        for name in sorted(name for name, value in values.items() if math.isinf(value) and name not in self._infinite):
            self._infinite.add(name)
            self.ranks.print0(
                f"note: {name} is {values[name]} at step {step}; infinite values are not in metrics.jsonl"
            )
        row: dict[str, Any] = {"step": step, **finite_metrics(values)}
        with self._writing("logs"):
            append_jsonl(self._path, [row])
            assert self._logger is not None
            self._logger.log_metrics({k: v for k, v in row.items() if k != "step"}, step)
        shown = [name for name in IN_PROGRESS_BAR if name in row]
        if shown and self.bar is not None:
            self.bar.set_postfix({name.partition("/")[2]: f"{row[name]:.3f}" for name in shown}, refresh=False)

    def check_best(self, num_steps: int, eval_interval: int) -> None:
        """Check the metric of `--keep_best` once this process, begun num_steps ago, has logged every metric.

        Raises: UsageError when it is not logged.
        """
        is_done = self.progress.step >= self.progress.num_steps or (self.progress.is_dry and self.progress.is_last)
        if is_done or num_steps >= max(self.args.log_interval, eval_interval):
            self.best.check_logged(self.names)

    # ------------------------------------------------------------------------------------------- texts and times
    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Pass the first samples of a step to the logger (first rank only)."""
        with self._writing("logs"):
            assert self._logger is not None
            self._logger.log_texts(name, rows, step)

    @contextmanager
    def time_writing(self) -> Iterator[None]:
        """Time what is written to logs; `time/logging` is its sum since the row of metrics before."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started


def call_on_step(on_step: OnStep, step: int, metrics: Mapping[str, float], rollout: Rollout | None = None) -> Metrics:
    """Call `on_step` with numbers, and with the rollout if it has a parameter of this name; returns its metrics.

    Raises: UsageError when it returns anything but None or numbers by name; whatever it raises.
    """
    takes_rollout = any(parameter.name == "rollout" for parameter in parameters_of(on_step) or ())
    given = {"rollout": rollout} if takes_rollout else {}
    returned = on_step(step, {name: float(value) for name, value in metrics.items()}, **given)
    try:
        return {str(name): float(value) for name, value in ({} if returned is None else returned).items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(f"on_step returned {returned!r:.80}; return numbers by name, or None") from None
