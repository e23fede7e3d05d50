"""Files of a run: its experiment dir, `args.json`, the state that it is resumed from, and its checkpoints.

Left out: metrics (`metric_log.py`) and samples (`rollout_log.py`), which are appended to while a run goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from lightrlhf.cli.groups import DataArgs, DataSetsArgs, TrainArgs
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.saving import export, upload
from lightrlhf.storage.checkpoint import (
    CHECKPOINT,
    checkpoints,
    drop_lost_best,
    last_good,
    link_best,
    save_checkpoint,
    set_aside,
)
from lightrlhf.storage.hub import shorten_paths
from lightrlhf.storage.locks import Lock, lock_folder
from lightrlhf.storage.run_dir import (
    check_parent,
    check_vacant,
    find_resumed_dir,
    is_stage,
    link_latest,
    make_parent,
    new_run_dir,
    read_args,
)
from lightrlhf.storage.seals import seal
from lightrlhf.storage.temporary import remove_left
from lightrlhf.storage.writing import save_pickled, write_text, writing
from lightrlhf.training.beginning import Beginning
from lightrlhf.training.best import Best
from lightrlhf.training.dry_run import DryRun
from lightrlhf.training.learners import Learners
from lightrlhf.training.memory import checkpoint_bytes
from lightrlhf.training.metric_log import MetricLog, Metrics
from lightrlhf.training.model_card import model_card
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.provenance import git_commit, versions
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.restarts import note_run
from lightrlhf.training.resume import StepStart, forget_rows_after, read_state, rng_states, step_start, without_stored


class RunFiles:
    """The experiment dir, locked by the first rank. given, data: see `Run`.

    Raises: UsageError when the dir cannot be written.
    """

    def __init__(
        self, args: TrainArgs, ranks: Ranks, program: str, given: Mapping[str, str], data: str | None = None
    ) -> None:
        self.args, self.ranks, self.program, self.given = args, ranks, program, given
        self.data_dir = args.data_dir if isinstance(args, DataArgs | DataSetsArgs) else None
        folders = data or self.data_dir or program
        self.data_dirs: list[str] = folders if isinstance(folders, list) else [str(folders)]
        self.directory = self._choose()  # created by `open`, so that a refused run leaves none
        self._lock: Lock | None = None
        self._damaged: list[Path] = []  # checkpoints newer than the one that the run is resumed from

    def _choose(self) -> Path:
        args, make = self.args, check_parent if self.args.dry_run else make_parent
        if args.resume_from:
            return find_resumed_dir(args.resume_from, args.output_dir)
        if args.output_dir:
            if Path(args.output_dir).is_dir():
                check_vacant(Path(args.output_dir))
            return make(Path(args.output_dir), f"--output_dir {args.output_dir}")
        folders = [Path(folder).resolve() for folder in self.data_dirs]
        name = "+".join(folder.name for folder in folders)[:200]
        parent = Path(args.log_dir) / args.experiment_name / folders[0].parent.name / name
        return make(parent, f"--log_dir {args.log_dir}")

    # --------------------------------------------------------------------------------------------------- resuming
    def resume(self) -> tuple[Beginning, dict[str, Any] | None]:
        """What the run must have in common with its beginning, and the state it is resumed from, None of a new run.

        Raises: UsageError when there is nothing to resume from, another process writes there, or what the run began
        with has changed.
        """
        if not self.args.resume_from:
            return Beginning(self.args, self.ranks.world_size, self.given), None
        if self.directory.is_dir():
            self._take_lock()
        try:
            return self._read_state(Path(self.args.resume_from))
        except BaseException:
            self.release()
            raise

    def _read_state(self, folder: Path) -> tuple[Beginning, dict[str, Any]]:
        state, damaged = read_state(folder, self.program, self.given)
        before, note = read_args(str(folder)), self.ranks.print0
        began = Beginning(self.args, self.ranks.world_size, self.given, before)
        self._damaged = [checkpoint for checkpoint, _ in damaged]
        for checkpoint, problem in damaged:
            note(f"note: {checkpoint} is damaged ({problem}); going on from step {state['step']} before it")
        data_dir = before.get("data_dir")
        if None not in (data_dir, self.data_dir) and data_dir != self.data_dir:
            note(f"note: this run began on {data_dir} and continues with {' + '.join(self.data_dirs)}")
        for what, now in (("threads", torch.get_num_threads()), ("world_size", self.ranks.num_processes)):
            if state[what] != now:
                note(f"note: {what} was {state[what]} and is {now}: results will differ in the last bits")
        return began, state

    def _take_lock(self) -> None:
        """Lock the experiment dir for all ranks. Raises: UsageError naming the process that has the lock."""
        self._lock = lock_folder(self.directory) if self.ranks.is_first else None

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._lock:
            self._lock.release()

    # ---------------------------------------------------------------------------------------------------- opening
    def open(self, began: Beginning, best: Best, step: int) -> None:
        """Create the experiment dir, or drop the rows after this step, to be written again. Not in a dry run."""
        is_resumed = self.args.resume_from is not None
        if self.ranks.is_first:
            if is_resumed:
                self._clean(best, step)
            else:
                self._create(began)
            if not is_stage(self.directory):
                link_latest(self.directory, resumed=is_resumed)
        self.directory = Path(self.ranks.broadcast(str(self.directory)))

    def _create(self, began: Beginning) -> None:
        if not self.args.output_dir:
            self.directory = new_run_dir(self.directory, f"--log_dir {self.args.log_dir}")
        self._take_lock()
        if self.args.output_dir:
            check_vacant(self.directory)  # another run may have come first
        note_run(self.directory)
        stored = {**self.describe(), "began": began.as_stored()}
        write_text(self.directory / "args.json", json.dumps(stored, indent=1))
        seal(self.directory, ["args.json"])

    def _clean(self, best: Best, step: int) -> None:
        with self.writing():
            for folder in self._damaged:
                self.ranks.print0(f"note: the damaged checkpoint is kept as {set_aside(folder)}")
            remove_left(self.directory)
            if self._lock and self._lock.handle is not None:  # no other machine saves here now
                remove_left(self.directory, CHECKPOINT, of_any_host=True)
            for name in ("metrics", "samples", "rollouts"):
                forget_rows_after(self.directory / f"{name}.jsonl", step)
            link_best(self.directory, best.step)  # a kill may have come before it
            if lost := drop_lost_best(self.directory):
                self.ranks.print0(
                    f"note: the best checkpoint, {lost}, was deleted; a better one takes its place when it is saved"
                )

    def describe(self) -> dict[str, Any]:
        """The arguments with the program, the versions of its packages and the given objects."""
        described = {**to_dict(self.args), "program": self.program, "versions": versions()}
        return described | {"git_commit": git_commit()} | ({"given": self.given} if self.given else {})

    # ---------------------------------------------------------------------------------------------------- writing
    def writing(self, name: str = "") -> AbstractContextManager[None]:
        """Context manager around writes to the experiment dir. Raises: RunFailure naming the last good checkpoint."""
        return writing(self.directory / name, kept=lambda: last_good(self.directory))

    def last_good(self) -> str:
        """The last good checkpoint, as the end of an error."""
        saved = checkpoints(self.directory)
        return f"; the last good checkpoint is {saved[-1]}" if saved else "; no checkpoint had been written yet"

    def write_card(self, step: int, data: str, results: Metrics | None = None) -> None:
        """Write the model card of the run. data: names of its sets; results: of the last evaluation."""
        with self.writing():
            write_text(self.directory / "README.md", self.card(step, data, results))

    def card(self, step: int, data: str, results: Metrics | None = None) -> str:
        """The model card after this step."""
        names, title = " + ".join(map(shorten_paths, data.split(" + "))), self.args.experiment_name
        summary, flags = f"Trained by `lightrlhf.{self.program}` for {step} steps on `{names}`.", to_dict(self.args)
        return model_card(title, self.program, summary, flags, results or {}, dict(self.given))

    def upload_last(self) -> None:
        """Upload the last checkpoint to the repository of `--push_to_hub`, if there is one (first rank only)."""
        if self.ranks.is_first and self.args.push_to_hub:
            last = checkpoints(self.directory)[-1]
            upload(last, self.args.push_to_hub)
            self.ranks.print0(f"uploaded {last} to {self.args.push_to_hub}")


class Checkpoints:
    """What the checkpoints of a run hold, and when the last one was written."""

    def __init__(
        self,
        args: TrainArgs,
        files: RunFiles,
        order: Order,
        progress: Progress,
        learners: Learners,
        metric_log: MetricLog,
        dry: DryRun | None = None,
    ) -> None:
        self.args, self.files, self.ranks, self.order, self.progress = args, files, files.ranks, order, progress
        self.learners, self.metric_log, self.best, self.dry = learners, metric_log, metric_log.best, dry
        self.module: Any = None
        self.tokenizer: Tokenizer  # set by `keep`
        self.state: Callable[[], dict[str, Any]] = dict
        self.others: list[Callable[[], dict[str, Any]]] = []  # state of parts that the loop does not see
        self.texts: Callable[[], dict[str, str]] = dict
        self.saved_step = progress.step  # the last step that is saved, or 0
        self.saved_at = time.perf_counter()
        self._begun: StepStart | None = None

    def keep(
        self,
        module: Policy | ScalarModel,
        tokenizer: Tokenizer,
        state: Callable[[], dict[str, Any]] = dict,
        files: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Declare before the loop the content of a checkpoint, since a timer or a signal may cause a save.

        state: returns the loop's own state as plain values that later steps do not change; files: further text files by
        name.
        """
        self.module, self.tokenizer, self.state, self.texts = module, tokenizer, state, files

    def whole_state(self) -> dict[str, Any]:
        """State of the loop and of its other parts."""
        return self.state() | {name: value for other in self.others for name, value in other().items()}

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due after the current step: by `--save_interval`, or as the best so far."""
        return self.best.unsaved or self.progress.due(self.args.save_interval)

    @property
    def is_late(self) -> bool:
        """Whether `--save_minutes` have passed, and a step since the last checkpoint."""
        minutes = (time.perf_counter() - self.saved_at) / 60
        return 0 < self.args.save_minutes <= minutes and self.progress.step != self.saved_step

    def begin_step(self) -> None:
        """Keep the random state and the loop's state at the start of a step, which may be interrupted."""
        self._begun = step_start(self.progress.step, self.ranks.device, self.whole_state())

    def start(self) -> StepStart:
        """The state to save: the start of the current step, in which no weight has changed yet, or the present one."""
        if self._begun and self._begun.step == self.progress.step:
            return self._begun
        return step_start(self.progress.step, self.ranks.device, self.whole_state())

    def save(self, start: StepStart, texts: Mapping[str, str]) -> None:
        """Write the checkpoint of the finished steps; texts: further files by name. A dry run notes its size.

        Raises: RunFailure when it cannot be written, or a weight or a state is not finite.
        """
        self.learners.check_finite(self.module, start.extra)
        if self.dry:
            self.dry.tokenizer = self.tokenizer
            only_adapters = self.args.finetune_mode == "lora"
            self.dry.checkpoint = checkpoint_bytes(self.module, self.learners.by_name, only_adapters)
            return
        started, step, files = time.perf_counter(), self.progress.step, self.files
        full, learned = self.learners.full(self.module), self.learners.gather_trained()
        state = self._resume_state(start)

        def write(folder: Path) -> None:
            export(full, folder, files.directory / "base")
            self.tokenizer.save_pretrained(folder)
            rest, stored = without_stored(learned, folder)
            save_pickled(folder / "resume.pt", {**state, "learned": rest, "stored": stored})
            for name, text in {"README.md": files.card(step, self.order.data), **texts}.items():
                (folder / name).write_text(text, encoding="utf-8")

        if self.ranks.is_first:
            saved = save_checkpoint(files.directory, step, write, self.args.keep_last, self.best.step)
            files.write_card(step, self.order.data)
            self.ranks.print0(f"saved {saved} in {time.perf_counter() - started:.1f} s")
        self.best.unsaved, self.saved_step, self.saved_at = False, step, time.perf_counter()
        self.ranks.fabric.barrier()

    def _resume_state(self, start: StepStart) -> dict[str, Any]:
        """`resume.pt` but for the trained weights."""
        return {
            "step": self.progress.step,
            **rng_states(start.rng, self.ranks.num_processes),
            "python_rng": start.python_rng,
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.num_processes,
            "extra": start.extra,
            "best": self.best.state(),
            "means": self.metric_log.means.state(),
            **self.learners.state(),
        }
