"""Phases of a run's steps: timed, named in errors, and where a signal or the loss of all servers ends the run.

Left out: the signals and their handlers (`signals.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightrlhf.cli.errors import NotFinite, RunFailure, ServersGone
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.storage.checkpoint import last_good
from lightrlhf.storage.run_dir import whole_run
from lightrlhf.training.learners import Learners
from lightrlhf.training.memory import is_out_of_memory, memory_advice
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.run_files import Checkpoints, RunFiles
from lightrlhf.training.signals import StopSignals, Terminated

HELD = ("update", "evaluation", "saving", "writing of rollouts")  # phases that a signal does not interrupt
NOTHING_TO_SAVE = " before the first step was finished: there is nothing to save"


class Phases:
    """The phases of a run, and how it stops between them or within one."""

    def __init__(
        self,
        args: TrainArgs,
        files: RunFiles,
        order: Order,
        progress: Progress,
        learners: Learners,
        checkpoints: Checkpoints,
    ) -> None:
        self.args, self.ranks, self.files, self.order, self.progress = args, files.ranks, files, order, progress
        self.learners, self.checkpoints = learners, checkpoints
        self.signals = StopSignals(self._nothing_to_save(), interrupts=self.ranks.num_processes == 1)

    @contextmanager
    def phase(self, name: str, rows: Iterable[int] = ()) -> Iterator[None]:
        """Time a part of a step and name it in errors. rows: numbers of the rows that this rank samples with.

        Raises: RunFailure when memory runs out, sampling meets logits that are not finite, or all servers are gone;
            Terminated after a signal. After the last two the run is saved first.
        """
        started, watchdog = time.perf_counter(), self.ranks.watchdog
        where = f"{name} of step {self.progress.step + 1}"
        if watchdog:
            watchdog.where = where
        try:
            with self.signals.phase(name not in HELD) as may_stop:
                yield
            if may_stop and self.ranks.max(bool(self.signals.received)):
                raise Terminated
        except Terminated:
            self.stop_by_signal()
        except KeyboardInterrupt:
            whole = whole_run(self.files.directory)
            left = last_good(whole) if whole == self.files.directory else f"go on by --resume_from {whole}"
            self.ranks.print0(f"interrupted in {where}" + ("" if self.args.dry_run else f"; {left}"))
            raise
        except ServersGone as problem:
            self._stop_without_servers(problem)
        except NotFinite as problem:
            named = "" if name == "evaluation" else self.order.describe(problem.rows or rows)
            raise RunFailure(f"{problem}, in {where}{named}{self.files.last_good()}") from None
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                sizes = self.learners.num_trainable(), self.ranks.world_size, self.ranks.device
                advice = memory_advice(self.args, name, problem, *sizes)
                raise RunFailure(f"out of memory in {where}: {advice}{self.files.last_good()}") from None
            if watchdog:
                watchdog.explain(problem)
            raise
        finally:
            self.progress.seconds[name] = time.perf_counter() - started

    # ----------------------------------------------------------------------------------------------------- saving
    def save(self) -> None:
        """Write `checkpoint-{step}`: the model as a Hugging Face folder, and the state that a resumed run needs.

        Within a step that has not changed a weight yet, the random state and the loop's state are as at its start.
        Raises: RunFailure, naming the last good checkpoint, when it cannot be written, or a weight, an optimiser's
        state or the loop's own is not finite.
        """
        start, texts = self.checkpoints.start(), {}
        if not self.args.dry_run:
            with self.phase("evaluation"):  # a file may hold what an evaluation measures
                texts = self.checkpoints.texts()
        with self.phase("saving"), self.ranks.waiting():
            self.checkpoints.save(start, texts)

    def _save_if_new(self) -> None:
        if self.progress.step != self.checkpoints.saved_step and not self.args.dry_run:
            self.save()

    # --------------------------------------------------------------------------------------------------- stopping
    def save_or_stop(self) -> None:
        """Before a step, save if `--save_minutes` have passed, and end the run after a signal, on all ranks."""
        wish = self.ranks.max(2 if self.signals.received else int(self.checkpoints.is_late))
        if wish == 2:
            self.stop_by_signal()
        elif wish:
            self._save_if_new()

    def stop_by_signal(self) -> NoReturn:
        """Save steps that are not saved yet, and end the run after a signal. Raises: Terminated."""
        if not self.signals.is_closed:
            self._save_if_new()
            done = f" after step {self.progress.step}; go on by --resume_from {whole_run(self.files.directory)}"
            where = done if self.progress.step and not self.args.dry_run else self._nothing_to_save()
            self.ranks.print0(f"stopped by {self.signals.received or 'a signal'}{where}")
            self.close()
        raise Terminated

    def _stop_without_servers(self, problem: ServersGone) -> NoReturn:
        """Save steps that are not saved yet; an interrupted evaluation is not repeated. Raises: RunFailure."""
        if not self.progress.step:
            raise RunFailure(f"{problem}; no step was finished, start again") from None
        self._save_if_new()
        raise RunFailure(f"{problem}; mend that, then resume with --resume_from {self.files.directory}") from None

    def _nothing_to_save(self) -> str:
        """Message after a signal before the first step: an iteration's training starts again."""
        whole = whole_run(self.files.directory)
        return NOTHING_TO_SAVE if whole == self.files.directory else f"; go on by --resume_from {whole}"

    def close(self) -> None:
        """Close the logs, the lock, the signal handlers and the watchdog of a run, on all ranks."""
        self.ranks.close()
        self.checkpoints.metric_log.close()
        self.files.release()
        self.signals.close()
