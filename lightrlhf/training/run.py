"""Run: the services of a training loop.

Ranks, seeds, the experiment dir, metrics, optimisers, the order of the data, checkpoints and resuming. A run is bitwise
reproducible on a CPU at the same thread and rank count: the order of an epoch follows from (seed, epoch), sampling
noise from (seed, step), and everything else is in `resume.pt`.

Left out: base trainers and callbacks but `on_step`. The loops stay in the algorithm files; this file has no loop over
steps.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import TrainArgs
from lightrlhf.cli.errors import NotFinite, RunFailure, ServersGone, UsageError
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.batch import Batch
from lightrlhf.data.splits import Row
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.saving import export, upload
from lightrlhf.storage.checkpoint import (
    BEST,
    CHECKPOINT,
    checkpoints,
    drop_lost_best,
    last_good,
    link_best,
    save_checkpoint,
    save_pickled,
    set_aside,
    write_text,
)
from lightrlhf.storage.hub import shown
from lightrlhf.storage.locks import Lock, lock_folder
from lightrlhf.storage.run_dir import (
    check_parent,
    check_vacant,
    is_stage,
    link_latest,
    make_parent,
    new_run_dir,
    read_logged,
    resumed_dir,
    stored_args,
    whole_run,
)
from lightrlhf.storage.seals import seal
from lightrlhf.storage.temporary import remove_left
from lightrlhf.storage.writing import writing
from lightrlhf.training.beginning import Beginning
from lightrlhf.training.best import Best
from lightrlhf.training.distributed import check_same, launch, make_fabric
from lightrlhf.training.dry_run import DryRun, checkpoint_bytes, planned_results
from lightrlhf.training.faults import quiet_event_writer
from lightrlhf.training.learners import Learners
from lightrlhf.training.memory_advice import is_out_of_memory, memory_advice
from lightrlhf.training.metric_log import MetricLog, Metrics, OnStep
from lightrlhf.training.model_card import model_card
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.provenance import git_commit, versions
from lightrlhf.training.ranks import Item, Ranks
from lightrlhf.training.restarts import as_restarted, note_run
from lightrlhf.training.resume import (
    StepStart,
    forget_rows_after,
    read_state,
    restore_rng,
    rng_states,
    step_start,
    without_stored,
)
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
        folders = data or getattr(args, "data_dir", program)
        self.data_dirs: list[str] = folders if isinstance(folders, list) else [str(folders)]
        self.fabric = make_fabric(args)
        launch(self.fabric, args)
        self.args = args = as_restarted(self.fabric, args)
        self.ranks = Ranks(self.fabric, args)
        self.dry = DryRun() if args.dry_run else None  # then nothing is written
        self.directory = self._choose_directory()  # created by `steps`, so that a refused run leaves none
        if self.ranks.num_processes > 1:
            self.ranks.watchdog = RankWatchdog(self.fabric, args.ddp_timeout, self._last_good)
            check_same(self.fabric, args)
        seed_everything(args.seed, verbose=False)
        self._damaged: list[Path] = []  # checkpoints newer than the one that the run is resumed from
        self._lock = self._locked() if args.resume_from and self.directory.is_dir() else None
        try:
            self.resumed = self._read_resume_state()
        except BaseException:
            if self._lock:
                self._lock.release()
            raise
        self.order = Order(args, self.ranks, self.began, self.data_dirs)
        resumed = self.resumed or {}
        self.best = Best(args, resumed.get("best"))
        self.progress = Progress(resumed.get("step", 0), is_dry=args.dry_run, is_last=self.best.out_of_patience)
        self.learners = Learners(args, self.ranks, self.order, self.progress, self._last_good, self.resumed, self.dry)
        self.loss_scale = self.learners.loss_scale
        self.metric_log = MetricLog(
            args, self.ranks, self.progress, self.best, resumed.get("means"), self.loss_scale, on_step, self.dry
        )
        self._endings = ExitStack()  # of what the loop opened
        self._started = self._saved_at = time.perf_counter()
        self._saved_step = self.step if self.resumed else 0  # the last step that is saved, or 0
        self._begun: StepStart | None = None
        self._saved: tuple[Any, Any] = (None, None)  # the model and its tokenizer
        self._state: Callable[[], dict[str, Any]] = dict
        self._files: Callable[[], dict[str, str]] = dict
        self._results: Metrics = {}  # of the last evaluation
        self._signals = StopSignals(self._nothing_to_save(), interrupts=self.ranks.num_processes == 1)
        weakref.finalize(self, self._signals.close)  # for a run that is refused before its loop

    # -------------------------------------------------------------------------------------------------- ranks
    @property
    def device(self) -> torch.device:
        return self.ranks.device

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
            raise RunFailure(f"{problem}, in {where}{rows}{self._last_good()}") from None
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                advice = memory_advice(
                    self.args, name, problem, self.learners.num_trainable(), self.world_size, self.device
                )
                raise RunFailure(f"out of memory in {where}: {advice}{self._last_good()}") from None
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
        """Context manager around writes to the experiment dir. Raises: RunFailure naming the last good checkpoint."""
        return writing(self.directory / name, kept=lambda: last_good(self.directory))

    def _locked(self) -> Lock | None:
        """The lock of the experiment dir, held by the first rank for all. Raises: UsageError naming its holder."""
        return lock_folder(self.directory) if self.is_first else None

    def _last_good(self) -> str:
        saved = checkpoints(self.directory)
        return f"; the last good checkpoint is {saved[-1]}" if saved else "; no checkpoint had been written yet"

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
        self._open_directory()
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
                self._begun = step_start(self.step, self.device, self._state())
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
        self._saved, self._state, self._files = (module, tokenizer), state, files

    def save(self) -> None:
        """Write `checkpoint-{step}`: the model as a Hugging Face folder, and the state that a resumed run needs.

        Within a step that has not changed a weight yet, the random state and the loop's state are those of its start.
        Raises: RunFailure, naming the last good checkpoint, when it cannot be written, or a weight, an optimiser's
        state or the loop's own is not finite.
        """
        module, tokenizer = self._saved
        began = self._begun if self._begun and self._begun.step == self.step else None
        start = began or step_start(self.step, self.device, self._state())
        files: dict[str, str] = {}
        if not self.dry:
            with self.phase("evaluation"):  # a file may hold what an evaluation measures
                files = self._files()
        with self.phase("saving"), self.ranks.waiting():
            self.learners.check_finite(module, start.extra)
            if self.dry:
                self.dry.tokenizer = tokenizer
                self.dry.checkpoint = checkpoint_bytes(module, self.learners.by_name, self.args)
                return
            self._save(module, tokenizer, start, files)

    def _save_or_stop(self) -> None:
        """Before a step, save if `--save_minutes` have passed, and end the run after a signal, alike on all ranks."""
        minutes = (time.perf_counter() - self._saved_at) / 60
        is_late = 0 < self.args.save_minutes <= minutes and self.step != self._saved_step
        wish = self.ranks.max(2 if self._signals.received else int(is_late))
        if wish == 2:
            self._stop_by_signal()
        elif wish and not self.dry:
            self.save()

    def _stop_by_signal(self) -> NoReturn:
        """Save steps that are not saved yet, and end the run after a signal. Raises: Terminated."""
        if not self._signals.is_closed:
            if self.step != self._saved_step and not self.dry:
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
        if self.step != self._saved_step:
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
        if self._lock:
            self._lock.release()
        self._signals.close()

    def _save(self, module: Policy | ScalarModel, tokenizer: Any, start: StepStart, files: dict[str, str]) -> None:
        started = time.perf_counter()
        full = self.full(module)
        learned = self.learners.trained()
        state = {
            "step": self.step,
            **rng_states(start.rng, self.ranks.num_processes),
            "python_rng": start.python_rng,
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.num_processes,
            "extra": start.extra,
            "best": self.best.state(),
            "means": self.metric_log.means.state(),
            **self.learners.state(),
        }

        def write(folder: Path) -> None:
            merge, dtype = getattr(self.args, "merge", False), getattr(torch, self.args.save_dtype)
            export(full, folder, self.directory / "base", merge, dtype)
            tokenizer.save_pretrained(folder)
            rest, stored = without_stored(learned, folder)
            save_pickled(folder / "resume.pt", {**state, "learned": rest, "stored": stored})
            for name, text in {"README.md": self._card(), **files}.items():
                (folder / name).write_text(text, encoding="utf-8")

        if self.is_first:
            saved = save_checkpoint(self.directory, self.step, write, self.args.keep_last, self.best.step)
            with self.writing():
                write_text(self.directory / "README.md", self._card())
            self.print0(f"saved {saved} in {time.perf_counter() - started:.1f} s")
        self.best.unsaved, self._saved_step, self._saved_at = False, self.step, time.perf_counter()
        self.fabric.barrier()

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
            with self.writing("logs"):
                if self.metric_log.rows_for_profile:
                    self._write_profile()
                if results:  # none when a finished run is resumed: its card keeps those it has
                    write_text(self.directory / "README.md", self._card(results))
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
        if self.is_first and self.args.push_to_hub:
            last, dtype = checkpoints(self.directory)[-1], getattr(torch, self.args.save_dtype)
            upload(last, self.args.push_to_hub, dtype)
            self.print0(f"uploaded {last} to {self.args.push_to_hub}")
        self._close()
        return self.directory

    def _write_profile(self) -> None:
        from lightrlhf.training.roofline import write_profile

        rows = self.metric_log.rows_for_profile
        write_profile(self.directory, rows, self.learners.roles(), self.args, self.device, self.world_size)

    def _card(self, results: Metrics | None = None) -> str:
        data = " + ".join(map(shown, self.order.data.split(" + ")))
        summary = f"Trained by `lightrlhf.{self.program}` for {self.step} steps on `{data}`."
        title = self.args.experiment_name
        return model_card(title, self.program, summary, to_dict(self.args), results or {}, self.given)

    def _read_resume_state(self) -> dict[str, Any] | None:
        if not self.args.resume_from:
            self.began = Beginning(self.args, self.world_size, self.given)
            return None
        state, damaged = read_state(Path(self.args.resume_from), self.program, self.given)
        before = stored_args(self.args.resume_from)
        self.began = Beginning(self.args, self.world_size, self.given, before)
        self._damaged = [folder for folder, _ in damaged]
        for folder, problem in damaged:
            self.fabric.print(f"note: {folder} is damaged ({problem}); going on from step {state['step']} before it")
        data_dir = before.get("data_dir")
        if data_dir is not None and data_dir != getattr(self.args, "data_dir", data_dir):
            self.fabric.print(f"note: this run began on {data_dir} and goes on with {' + '.join(self.data_dirs)}")
        for what, now in (("threads", torch.get_num_threads()), ("world_size", self.ranks.num_processes)):
            if state[what] != now:
                self.fabric.print(f"note: {what} was {state[what]} and is {now}: results will differ in the last bits")
        return state

    def _choose_directory(self) -> Path:
        args, make = self.args, check_parent if self.dry else make_parent
        if args.resume_from:
            return resumed_dir(args.resume_from, args.output_dir)
        if args.output_dir:
            if Path(args.output_dir).is_dir():
                check_vacant(Path(args.output_dir))
            return make(Path(args.output_dir), f"--output_dir {args.output_dir}")
        folders = [Path(folder).resolve() for folder in self.data_dirs]
        name = "+".join(folder.name for folder in folders)[:200]
        parent = Path(args.log_dir) / args.experiment_name / folders[0].parent.name / name
        return make(parent, f"--log_dir {args.log_dir}")

    def _open_directory(self) -> None:
        if self.dry:
            return
        if self.is_first and self.resumed:
            with self.writing():
                for folder in self._damaged:
                    self.print0(f"note: the damaged checkpoint is kept as {set_aside(folder)}")
                remove_left(self.directory)
                if self._lock and self._lock.handle is not None:  # no other machine saves here now
                    remove_left(self.directory, CHECKPOINT, of_any_host=True)
                for name in ("metrics", "samples", "rollouts"):
                    forget_rows_after(self.directory / f"{name}.jsonl", self.step)
                link_best(self.directory, self.best.step)  # a kill may have come before it
                if lost := drop_lost_best(self.directory):
                    self.print0(
                        f"note: the best checkpoint, {lost}, was deleted; there is none until a better one is saved"
                    )
        elif self.is_first:
            if not self.args.output_dir:
                self.directory = new_run_dir(self.directory, f"--log_dir {self.args.log_dir}")
            self._lock = self._locked()
            if self.args.output_dir:
                check_vacant(self.directory)  # another run may have come first
            note_run(self.directory)
            stored = {**self._described(), "began": self.began.noted()}
            write_text(self.directory / "args.json", json.dumps(stored, indent=1))
            seal(self.directory, ["args.json"])
        if self.is_first and not is_stage(self.directory):
            link_latest(self.directory, resumed=self.resumed is not None)
        self.directory = Path(self.fabric.broadcast(str(self.directory)))
        if self.is_first:
            quiet_event_writer()
            self.metric_log.open(self.directory, self._described(), self.writing)

    def _described(self) -> dict[str, Any]:
        """The arguments with the program, the versions of its packages and the given objects."""
        described = {**to_dict(self.args), "program": self.program, "versions": versions()}
        return described | {"git_commit": git_commit()} | ({"given": self.given} if self.given else {})
