"""Run: the services of a training loop.

Ranks, seeds, the experiment dir, metrics, optimisers, the order of the data, checkpoints and resuming. A run is bitwise
reproducible on a CPU at the same thread and rank count: the order of an epoch follows from (seed, epoch), sampling
noise from (seed, step), and everything else is in `resume.pt`.

Left out: base trainers and callbacks but `on_step`. The loops stay in the algorithm files; this file has no loop over
steps.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import NotFinite, RunFailure, ServersGone, UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.batch import Batch
from lightrlhf.data.splits import Row
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.storage.checkpoint import (
    BEST,
)
from lightrlhf.storage.run_dir import (
    is_stage,
    read_logged,
    whole_run,
)
from lightrlhf.training.best import Best
from lightrlhf.training.distributed import check_same, launch, make_fabric
from lightrlhf.training.dry_run import DryRun, planned_results
from lightrlhf.training.faults import quiet_event_writer
from lightrlhf.training.learners import Learners
from lightrlhf.training.memory_advice import is_out_of_memory, memory_advice
from lightrlhf.training.metric_log import MetricLog, Metrics, OnStep
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.ranks import Item, Ranks
from lightrlhf.training.restarts import as_restarted
from lightrlhf.training.resume import (
    restore_rng,
)
from lightrlhf.training.run_files import Checkpoints, RunFiles
from lightrlhf.training.signals import StopSignals, Terminated
from lightrlhf.training.summary import (
    describe_device,
    describe_model,
    describe_steps,
    lines,
    peak_memory,
    print_summary,
)
from lightrlhf.training.watchdog import RankWatchdog

__all__ = ["Metrics", "OnStep", "Run"]
HELD = ("update", "evaluation", "saving", "writing of rollouts")  # phases that a signal does not interrupt
NOTHING_TO_SAVE = " before the first step was finished: there is nothing to save"
AnyArgs = TypeVar("AnyArgs", bound=TrainArgs)


class Run(Generic[AnyArgs]):
    """One training run: its experiment dir, logs, learners and checkpoints; how it stops and resumes.

    on_step: called with the step and its metrics wherever they are logged, on the first rank; it may raise
    `StopTraining`. given: objects that `train` was called with, by name (see `given_objects`); a resumed run requires
    the same. data: path whose last two parts name the experiment dir; `--data_dir` when not given, of several the first
    one's parent and the names joined by +.
    Raises: UsageError when the experiment dir cannot be written, there is nothing to resume from, or the given objects
    are not those the run began with.
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
        self.program, self.given = program, given or {}
        self.fabric = make_fabric(args)
        launch(self.fabric, args)
        self.args = args = as_restarted(self.fabric, args)
        self.ranks = Ranks(self.fabric, args)
        self.dry = DryRun() if args.dry_run else None  # then nothing is written
        self.files = RunFiles(args, self.ranks, program, self.given, data)
        if self.ranks.num_processes > 1:
            self.ranks.watchdog = RankWatchdog(self.fabric, args.ddp_timeout, self.files.last_good)
            check_same(self.fabric, args)
        seed_everything(args.seed, verbose=False)
        began, self.resumed = self.files.resume()
        self.order = Order(args, self.ranks, began, self.files.data_dirs)
        resumed = self.resumed or {}
        self.best = Best(args, resumed.get("best"))
        self.progress = Progress(resumed.get("step", 0), is_dry=args.dry_run, is_last=self.best.out_of_patience)
        self.learners = Learners(
            args, self.ranks, self.order, self.progress, self.files.last_good, self.resumed, self.dry
        )
        self.loss_scale = self.learners.loss_scale
        self.metric_log = MetricLog(
            args, self.ranks, self.progress, self.best, resumed.get("means"), self.loss_scale, on_step, self.dry
        )
        parts = (self.order, self.progress, self.learners, self.metric_log)
        self.checkpoints = Checkpoints(args, self.files, *parts, self.dry)
        self._endings = ExitStack()  # of what the loop opened
        self._started = time.perf_counter()
        self._results: Metrics = {}  # of the last evaluation
        self._signals = StopSignals(self._nothing_to_save(), interrupts=self.ranks.num_processes == 1)
        weakref.finalize(self, self._signals.close)  # for a run that is refused before its loop

    # -------------------------------------------------------------------------------------------------- ranks
    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def directory(self) -> Path:
        return self.files.directory

    @property
    def data_dirs(self) -> list[str]:
        return self.files.data_dirs

    @property
    def step(self) -> int:
        return self.progress.step

    @step.setter
    def step(self, step: int) -> None:
        self.progress.step = step

    @property
    def seconds(self) -> dict[str, float]:
        return self.progress.seconds

    @property
    def precision(self) -> str:
        return self.args.precision

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def is_first(self) -> bool:
        return self.ranks.is_first

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return self.ranks.sum(value)

    def total(self, value: float) -> float:
        return self.ranks.total(value)

    def gather(self, value: Item) -> list[Item]:
        return self.ranks.gather(value)

    def once(self, work: Callable[[], Item]) -> Item:
        return self.ranks.once(work)

    def broadcast(self, value: Any) -> Any:
        return self.ranks.broadcast(value)

    def shard(self, rows: Sequence[Item] | Tensor) -> list[Any]:
        return self.ranks.shard(rows)

    def pad_passes(self, parts: Iterable[Item]) -> list[Any]:
        return self.ranks.pad_passes(parts)

    def generator(self, *key: int) -> torch.Generator:
        return self.ranks.generator(*key)

    def noise(self, num_rows: int, width: int, *key: int) -> Tensor:
        return self.ranks.noise(num_rows, width, *key)

    def print0(self, text: str) -> None:
        self.ranks.print0(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of a step and name it in errors.

        Raises: RunFailure when memory runs out, sampling meets logits that are not finite, or all servers are gone;
            Terminated after a signal. After the last two the run is saved first.
        """
        started = time.perf_counter()
        where = f"{name} of step {self.step + 1}"
        if self.ranks.watchdog:
            self.ranks.watchdog.where = where
        try:
            with self._signals.phase(name not in HELD) as may_stop:
                yield
            if may_stop and self.ranks.max(bool(self._signals.received)):
                raise Terminated
        except Terminated:
            self._stop_by_signal()
        except ServersGone as problem:
            self._stop_without_servers(problem)
        except NotFinite as problem:
            rows = "" if name == "evaluation" else self.order.of_rows(problem.rows or None)
            raise RunFailure(f"{problem}, in {where}{rows}{self.files.last_good()}") from None
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                advice = memory_advice(
                    self.args, name, problem, self.learners.num_trainable(), self.world_size, self.device
                )
                raise RunFailure(f"out of memory in {where}: {advice}{self.files.last_good()}") from None
            if self.ranks.watchdog:
                self.ranks.watchdog.explain(problem)
            raise
        finally:
            self.seconds[name] = time.perf_counter() - started

    # ------------------------------------------------------------------------------------------------- learning
    def setup(self, name: str, module: nn.Module, learning_rate: float, num_updates: int) -> nn.Module:
        with self.phase("setup"):
            return self.learners.setup(name, module, learning_rate, num_updates)

    def freeze(self, module: nn.Module) -> nn.Module:
        return self.learners.freeze(module)

    def autocast(self) -> AbstractContextManager[None]:
        return self.learners.autocast()

    def accumulate(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self.learners.accumulate(module, enabled)

    def backward(self, loss: Tensor, places: Sequence[int] | Tensor | None = None) -> None:
        self.learners.backward(loss, places)

    def optimize(self, name: str) -> float:
        return self.learners.optimize(name)

    def skip_updates(self, number: int) -> None:
        self.learners.skip_updates(number)

    def learning_rate(self, name: str) -> float:
        return self.learners.learning_rate(name)

    def writing(self, name: str = "") -> AbstractContextManager:
        return self.files.writing(name)

    # ----------------------------------------------------------------------------------------------------- data
    def num_steps(self, rows: Sequence[Any], batch_size: int) -> int:
        return self.order.num_steps(rows, batch_size)

    def mix(self, sizes: Sequence[int]) -> None:
        self.order.mix(sizes)

    def global_batch(self, rows: Sequence[Item], step: int, batch_size: int) -> list[Item]:
        return self.order.global_batch(rows, step, batch_size)

    def name_batch(self, names: Sequence[Any], kind: str = "training rows", own: Sequence[Any] | None = None) -> None:
        self.order.name_batch(names, kind, own)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Remaining step numbers, counted from 0, with a progress bar; `self.step` counts finished steps."""
        try:
            with self._endings:
                yield from self._steps(num_steps)
        except BaseException:
            self._signals.close()
            raise

    def _steps(self, num_steps: int) -> Iterator[int]:
        from tqdm import tqdm

        self._signals.is_between = False
        self.progress.num_steps = num_steps
        if not self.dry:
            self.files.open(self.order.began, self.best, self.step)
            if self.is_first:
                quiet_event_writer()
                self.metric_log.open(self.directory, self.files.described(), self.files.writing)
        self.print0(self._banner(num_steps))
        if self.resumed:
            restore_rng(self.resumed, self.device, self.fabric.global_rank)  # after loading, which may draw numbers
        first = self.step
        if self.resumed and first >= num_steps:
            self.print0(f"this run has done its {first} steps; raise --max_steps or --epochs to go on")
        if self.progress.is_last and first < num_steps:
            self.print0(f"--early_stop_patience {self.best.patience} ended this run at step {first}; raise it to go on")
        bar = tqdm(total=num_steps, initial=self.step, desc=self.program, disable=not self.is_first, mininterval=0.5)
        self.metric_log.bar = bar
        try:
            while self.step < num_steps and not self.progress.is_last:
                if self.dry:
                    self.progress.is_last = self.dry.begin(self.seconds, num_steps)
                self.seconds.clear()
                self._save_or_stop()
                self.checkpoints.begin_step()
                yield self.step
                bar.update(self.step - bar.n)
                round_of_metrics = max(self.args.log_interval, getattr(self.args, "eval_interval", 0))
                is_done = self.step >= num_steps or (self.dry and self.progress.is_last)
                if is_done or self.step - first >= round_of_metrics:
                    self.best.check_logged(self.metric_log.names)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
        finally:
            bar.close()

    def _banner(self, num_steps: int) -> str:
        """What is trained on what, where and for how long; of an iteration's training only what is its own."""
        args, order = self.args, self.order
        resumed_at = self.step if self.resumed else None
        samples = getattr(args, "num_generations", 1)
        fields = {
            "model": describe_model(args, self.given, self.learners.parameters),
            "data": order.data if order.ends else f"{order.data}, {order.num_rows:,} rows",  # several sets have theirs
            "device": describe_device(self.device, args, self.ranks.num_processes),
            "steps": describe_steps(num_steps, order.batch_size, self.world_size, samples, resumed_at),
            "results": planned_results(args, self.directory) if self.dry else str(self.directory),
        }
        own = ("model", "steps") if is_stage(self.directory) else fields
        return lines({name: fields[name] for name in own})

    def on_end(self, end: Callable[[], None]) -> None:
        """Call a function when the loop over `steps` ends, however that is."""
        self._endings.callback(end)

    def due(self, interval: int, num_steps: int) -> bool:
        return self.progress.due(interval)

    def save_due(self, num_steps: int = 0) -> bool:
        """Whether a checkpoint is due after the current step: by `--save_interval`, or as the best so far."""
        return self.best.unsaved or self.progress.due(self.args.save_interval)

    @property
    def eval_iters(self) -> int | None:
        return self.order.eval_iters

    def eval_rows(self, rows: Sequence[Item], batch_size: int) -> list[Item]:
        return self.order.eval_rows(rows, batch_size)

    # --------------------------------------------------------------------------------------------------- metrics
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
        self.step += 1
        rate = {"train/lr": self.learners.learning_rate()}
        self.metric_log.add_step({**metrics, **self.metric_log.speed(work), **rate})
        is_due = self.progress.due(getattr(self.args, "eval_interval", 0)) or (at_saves and self.save_due())
        if evaluate and is_due:
            with self.phase("evaluation"):
                results = evaluate()
            if results:
                self._results = results
                self.metric_log.log(results)
        if self.save_due():
            self.save()

    def log_step(self, metrics: Metrics, num_steps: int) -> None:
        self.metric_log.add_step(metrics)

    def log(self, metrics: Metrics) -> None:
        self.metric_log.log(metrics)

    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        self.metric_log.log_texts(name, rows, step)

    def logging(self) -> AbstractContextManager[None]:
        return self.metric_log.timed()

    # ------------------------------------------------------------------------------------------------ checkpoints
    def keep(
        self,
        module: Policy | ScalarModel,
        tokenizer: Any,
        state: Callable[[], dict[str, Any]] = dict,
        files: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Declare before the loop what a checkpoint holds, since a timer or a signal may cause a save.

        state: returns the loop's own state as plain values that later steps do not change; files: further text files by
        name.
        """
        self.checkpoints.keep(module, tokenizer, state, files)

    def save(self) -> None:
        """Write `checkpoint-{step}`: the model as a Hugging Face folder, and the state that a resumed run needs.

        Within a step that has not changed a weight yet, the random state and the loop's state are those of its start.
        Raises: RunFailure, naming the last good checkpoint, when it cannot be written, or a weight, an optimiser's
        state or the loop's own is not finite.
        """
        start = self.checkpoints.start()
        files: dict[str, str] = {}
        if not self.dry:
            with self.phase("evaluation"):  # a file may hold what an evaluation measures
                files = self.checkpoints.texts()
        with self.phase("saving"), self.ranks.waiting():
            self.checkpoints.save(start, files)

    def _save_or_stop(self) -> None:
        """Before a step, save if `--save_minutes` have passed, and end the run after a signal, alike on all ranks."""
        wish = self.ranks.max(2 if self._signals.received else int(self.checkpoints.is_late))
        if wish == 2:
            self._stop_by_signal()
        elif wish and not self.dry:
            self.save()

    def _stop_by_signal(self) -> NoReturn:
        """Save steps that are not saved yet, and end the run after a signal. Raises: Terminated."""
        if not self._signals.is_closed:
            if self.step != self.checkpoints.saved_step and not self.dry:
                self.save()
            done = f" after step {self.step}; go on by --resume_from {whole_run(self.directory)}"
            where = done if self.step and not self.dry else self._nothing_to_save()
            self.print0(f"stopped by {self._signals.received or 'a signal'}{where}")
            self._close()
        raise Terminated

    def _stop_without_servers(self, problem: ServersGone) -> NoReturn:
        """Save steps that are not saved yet; an interrupted evaluation is not repeated. Raises: RunFailure."""
        if not self.step:
            raise RunFailure(f"{problem}; no step was finished, start again") from None
        if self.step != self.checkpoints.saved_step:
            self.save()
        raise RunFailure(f"{problem}; mend that, then resume with --resume_from {self.directory}") from None

    def _nothing_to_save(self) -> str:
        """What is said after a signal before the first step: the training of an iteration is begun again."""
        whole = whole_run(self.directory)
        return NOTHING_TO_SAVE if whole == self.directory else f"; go on by --resume_from {whole}"

    def _close(self) -> None:
        """Close the logs, the lock, the signal handlers and the watchdog of a run, on all ranks."""
        self.ranks.close()
        self.metric_log.close()
        self.files.release()
        self._signals.close()

    def full(self, module: Any) -> Any:
        return self.learners.full(module)

    def finish(self, results: Metrics | None = None) -> Path:
        """Close the logs, print the run's table and its experiment dir; its model card gets the last evaluation.

        A dry run prints what it has seen, and returns where the run would be, a folder that it did not make.
        """
        results = results or self._results
        memory = max(self.gather(peak_memory(self.device)))
        is_stopped = bool(self.ranks.max(bool(self._signals.received)))
        self.ranks.close()
        if self.dry:
            if self.is_first:  # alone, for it decodes
                self.print0(self.dry.report(self.args, self.seconds, memory))
            self._close()
            return self.directory
        if self.is_first:
            self.metric_log.close()
            if self.metric_log.rows_for_profile:
                self._write_profile()
            if results:  # none when a finished run is resumed: its card keeps those it has
                self.files.write_card(self.step, self.order.data, results)
            if not is_stage(self.directory):
                rows = read_logged(self.directory / "metrics.jsonl") or []
                print_summary(f"lightrlhf.{self.program}", self.directory, rows, memory)
            if self.best.step is not None:
                link = self.directory / BEST
                self.print0(f"{self.best}: {link if link.exists() else 'its checkpoint was deleted'}")
            self.print0(f"finished in {time.perf_counter() - self._started:.0f} s: {self.directory}")
        if is_stopped or (self._signals.interrupts and self._signals.received):
            self._stop_by_signal()
        self._signals.close()
        self.files.upload_last()
        self._close()
        return self.directory

    def _write_profile(self) -> None:
        from lightrlhf.training.roofline import write_profile

        rows, roles = self.metric_log.rows_for_profile, self.learners.roles()
        with self.files.writing("logs"):
            write_profile(self.directory, rows, roles, self.args, self.device, self.world_size)
