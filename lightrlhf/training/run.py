"""Run: what a training loop keeps beside its maths.

Seeds, the experiment dir, metrics, optimisers, the order of the data, checkpoints and resuming.
A run is bitwise repeatable on CPU at the same thread and rank count: the order of an epoch follows from (seed, epoch),
sampling noise from (seed, step), and everything else is in `resume.pt`.

Left out: base trainers and callbacks. The loops stay in the algorithm files; this file has no loop over steps.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import TrainArgs
from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.batch import epoch_order, row_length
from lightrlhf.data.splits import Row
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.saving import export, self_contained
from lightrlhf.models.sharding import full_tensors, is_sharded, materialize, meta_copy, shard_like
from lightrlhf.storage.checkpoint import MANIFEST, checkpoints, newest_checkpoint, save_checkpoint, write_text
from lightrlhf.training.distributed import check_same, launch, make_fabric
from lightrlhf.training.memory_advice import allocation, gib, is_out_of_memory, memory_flags
from lightrlhf.training.watchdog import RankWatchdog

VERSIONED = ("lightrlhf", "torch", "lightning", "transformers", "peft", "tokenizers", "jsonargparse")


Metrics = dict[str, float]
AnyArgs = TypeVar("AnyArgs", bound=TrainArgs)
Item = TypeVar("Item")


class Learner(NamedTuple):
    """A model that learns, with its optimiser and learning-rate schedule."""

    module: Any  # as Fabric wrapped it
    optimizer: Any
    scheduler: Any


class Run(Generic[AnyArgs]):
    """One training run: where it lives, what it logs, and how it stops and goes on.

    Raises: UsageError when the experiment dir cannot be written or there is nothing to resume from.
    """

    def __init__(self, args: AnyArgs, program: str) -> None:
        from lightning.fabric import seed_everything

        self.args, self.program = args, program
        self.fabric = make_fabric(args)
        launch(self.fabric, args)
        self.directory = self._choose_directory()  # created by `steps`: what is refused before leaves none behind
        self.watch = RankWatchdog(self.fabric, args.ddp_timeout, self._last_good) if self.world_size > 1 else None
        if self.watch:
            check_same(self.fabric, args)
        seed_everything(args.seed, verbose=False)
        self.resumed = self._read_resume_state()
        self.step: int = self.resumed["step"] if self.resumed else 0
        self.learners: dict[str, Learner] = {}
        self._timed: list[dict[str, Any]] = []  # for --profile: times of the logged steps and how much they did
        self.meta_copies: dict[str, nn.Module] = {}  # what a split model is put together in
        self.seconds: dict[str, float] = {}  # spent in each phase of the current step
        self._started = time.perf_counter()

    # -------------------------------------------------------------------------------------------------- ranks
    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def rank(self) -> int:
        return self.fabric.global_rank

    @property
    def world_size(self) -> int:
        return self.fabric.world_size

    @property
    def is_first(self) -> bool:
        return self.fabric.is_global_zero

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Sum of a tensor over all ranks; the tensor itself on one."""
        if self.world_size == 1:
            return value
        with self._meeting():
            return self.fabric.all_reduce(value, reduce_op="sum")

    def total(self, value: float) -> float:
        """Sum of a number over all ranks."""
        return float(self.sum_over_ranks(torch.tensor(float(value), dtype=torch.float64, device=self.device)))

    def shard(self, rows: Sequence[Item]) -> list[Item]:
        """This rank's part of the rows of a global batch, contiguous and as even as can be."""
        start, end = (len(rows) * r // self.world_size for r in (self.rank, self.rank + 1))
        return list(rows[start:end])

    def pad_passes(self, parts: Iterable[Item]) -> list[Any]:
        """This rank's micro-batches; with empty ones behind under `fsdp`, so that all ranks have equally many.

        There every pass gathers weights from all ranks, who wait for each other.
        """
        parts = list(parts)
        if self.args.strategy != "fsdp" or self.world_size == 1:
            return parts
        with self._meeting():
            most = self.fabric.all_reduce(torch.tensor(len(parts), device=self.device), reduce_op="max")
        return parts + [[]] * (int(most) - len(parts))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step, for messages and timing. Raises: RunFailure, naming it, when memory runs out."""
        started = time.perf_counter()
        where = f"{name} of step {self.step + 1}"
        if self.watch:
            self.watch.where = where
        try:
            yield
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                raise RunFailure(f"out of memory in {where}: {self._memory_advice(name, problem)}") from None
            if self.watch:
                self.watch.explain(problem)
            raise
        finally:
            self.seconds[name] = time.perf_counter() - started

    def _memory_advice(self, phase: str, problem: Exception) -> str:
        modules = [learner.module for learner in self.learners.values()]
        learning = sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)
        wanted = allocation(problem)
        flags = memory_flags(self.args, phase, wanted, learning, self.world_size)
        held = ""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            held = f", {gib(torch.cuda.memory_allocated(self.device))} of {gib(total)} are in use"
        return f"{gib(wanted)} more were asked for{held}; what helps: {', '.join(flags)}{self._last_good()}"

    def _meeting(self, counted: bool = True) -> AbstractContextManager:
        return self.watch.waiting(counted) if self.watch else nullcontext()

    def generator(self, *key: int) -> torch.Generator:
        """A generator whose numbers follow from the run's seed and `key` alone, on every rank alike."""
        mixed = self.args.seed
        for part in key:
            mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
        return torch.Generator().manual_seed(mixed)

    # ------------------------------------------------------------------------------------------------- learning
    def setup(self, name: str, module: nn.Module, learning_rate: float, num_updates: int) -> nn.Module:
        """Wrap a learning module with its optimiser and schedule; `optimize(name, …)` steps them."""
        from transformers import get_scheduler

        args = self.args
        if self.resumed:
            self._load_learned(name, module)
        with self.phase("setup"):
            if args.strategy == "fsdp":
                self.meta_copies[name] = meta_copy(module)
            if args.strategy == "deepspeed":
                if self.learners:
                    raise UsageError("--strategy deepspeed trains one model at a time; use --strategy fsdp")
                wrapped, optimizer = self.fabric.setup(module, self._optimizer(module, learning_rate))
            else:
                wrapped = self.fabric.setup_module(module)  # first, for splitting replaces the parameters
                optimizer = self.fabric.setup_optimizers(self._optimizer(module, learning_rate))
        wrapped.train()
        warmup = args.lr_warmup_steps
        if args.lr_warmup_ratio is not None:
            warmup = math.ceil(args.lr_warmup_ratio * num_updates)
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer.optimizer, warmup, num_updates)
        if self.resumed:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(shard_like(self.resumed["optimizers"][name], parameters))
            scheduler.load_state_dict(self.resumed["schedulers"][name])
            for group, rate, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas):
                group["lr"] = rate * factor(scheduler.last_epoch)  # of a run that now has more steps
        self.learners[name] = Learner(wrapped, optimizer, scheduler)
        return wrapped

    def _optimizer(self, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        args = self.args
        learning = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in learning if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
        ]
        options: dict[str, Any] = {"betas": (args.optimizer_beta1, args.optimizer_beta2), "eps": args.optimizer_eps}
        if hasattr(torch.optim, args.optimizer):
            optimizer_class = getattr(torch.optim, args.optimizer)
            options["fused"] = True  # a sixth of the time, on a CPU too
        else:
            optimizer_class = bitsandbytes_optimizer(args.optimizer)
        return optimizer_class([group for group in groups if group["params"]], lr=learning_rate, **options)

    def freeze(self, module: nn.Module) -> nn.Module:
        """A frozen module in eval mode, whole on this rank's device; never wrapped for gradients, never split."""
        return module.requires_grad_(False).eval().to(self.device)

    def autocast(self) -> AbstractContextManager:
        """The run's precision, for passes that do not go through a wrapped module."""
        return self.fabric.autocast()

    @contextmanager
    def accumulate(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Around the passes of one micro-batch; while `enabled`, gradients are not yet summed over ranks."""
        with self._meeting(counted=False):
            if enabled and self.world_size > 1:
                with self.fabric.no_backward_sync(module):
                    yield
            else:
                yield

    def backward(self, loss: Tensor) -> None:
        """Backward of a sum that was divided by its global count; undoes the ranks' averaging of gradients.

        Raises: RunFailure, naming the step, when the loss is not finite.
        """
        if not torch.isfinite(loss):
            raise RunFailure(f"loss is {float(loss.detach())} at step {self.step + 1}{self._last_good()}")
        self.fabric.backward(loss * self.world_size)

    def optimize(self, name: str) -> float:
        """Clip, check and step the optimiser and schedule of `name`; returns the gradient norm before clipping.

        Raises: RunFailure, naming the step, when a gradient is not finite; weights are then as before.
        """
        module, optimizer, scheduler = self.learners[name]
        with self._meeting():
            norm = full_tensors(
                nn.utils.clip_grad_norm_(
                    [p for p in module.parameters() if p.grad is not None], self.args.gradient_clip_val or math.inf
                )
            )
        if not torch.isfinite(norm):
            raise RunFailure(f"{name} gradient norm is {float(norm)} at step {self.step + 1}{self._last_good()}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return float(norm)

    def learning_rate(self, name: str) -> float:
        return self.learners[name].scheduler.get_last_lr()[0]

    def _last_good(self) -> str:
        found = checkpoints(self.directory)
        return f"; the last good checkpoint is {found[-1]}" if found else "; no checkpoint had been written yet"

    # ----------------------------------------------------------------------------------------------------- data
    def num_steps(self, num_rows: int, batch_size: int) -> int:
        """Steps of the whole run at `batch_size` rows per device and step; the last of an epoch may be smaller."""
        per_epoch = math.ceil(num_rows / (batch_size * self.world_size))
        steps = per_epoch * self.args.epochs
        return min(steps, self.args.max_steps) if self.args.max_steps else steps

    def global_batch(self, rows: Sequence[Item], step: int, batch_size: int) -> list[Item]:
        """All ranks' rows of one step (counted from 0), in the seeded order of its epoch."""
        per_epoch = math.ceil(len(rows) / (batch_size * self.world_size))
        epoch, index = divmod(step, per_epoch)
        order = epoch_order(len(rows), self.args.seed, epoch)
        size = batch_size * self.world_size
        chosen = order[index * size : (index + 1) * size]
        if len(chosen) < self.world_size:  # a tail too short to give every rank a row borrows from the epoch's start
            chosen += order[: self.world_size - len(chosen)]
        return [rows[i] for i in chosen]

    def steps(self, num_steps: int) -> Iterator[int]:
        """Step numbers still to do, counted from 0, under a progress bar; `self.step` counts the finished ones."""
        from tqdm import tqdm

        self._open_directory()
        if self.resumed:
            self._restore_rng()  # as late as this: a new head or adapter draws numbers while it is loaded
        bar = tqdm(total=num_steps, initial=self.step, desc=self.program, disable=not self.is_first, mininterval=0.5)
        self._bar = bar
        try:
            while self.step < num_steps:
                yield self.step
                bar.update(self.step - bar.n)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
        finally:
            bar.close()

    def due(self, interval: int, num_steps: int) -> bool:
        """Whether after the current step something with this interval is to be done; always after the last step."""
        return interval > 0 and (self.step % interval == 0 or self.step == num_steps)

    # --------------------------------------------------------------------------------------------------- metrics
    def log(self, metrics: dict[str, float]) -> None:
        """Write one row of metrics of the current step to every log (first rank only)."""
        if not self.is_first:
            return
        row = {"step": self.step, **{name: float(value) for name, value in metrics.items()}}
        if self.args.profile and "time/rollout" in row:
            self._timed.append(row)
        with (self.directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._logger.log_metrics({k: v for k, v in row.items() if k != "step"}, self.step)
        shown = [
            name for name in ("train/loss", "rewards/accuracies", "objective/score", "objective/kl") if name in row
        ]
        if shown and hasattr(self, "_bar"):
            self._bar.set_postfix({name.partition("/")[2]: f"{row[name]:.3f}" for name in shown}, refresh=False)

    def speed(self, rows: Sequence[Row], started: float) -> dict[str, float]:
        """Seconds of a step that began at `started`, and real tokens (no padding) per second over all ranks."""
        seconds = time.perf_counter() - started
        tokens = self.total(sum(map(row_length, rows)))
        if self.args.profile:
            self._timed.append({"time/update": seconds, "rows": list(rows)})
        return {"time/update": seconds, "time/tokens_per_second": tokens / seconds}

    def log_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        """Append texts of the current step to `samples.jsonl` (first rank only)."""
        if self.is_first:
            with (self.directory / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": self.step, **row}, ensure_ascii=False) + "\n" for row in samples)

    def print0(self, text: str) -> None:
        """Print a line on the first rank, above the progress bar."""
        if self.is_first:
            from tqdm import tqdm

            tqdm.write(text)

    # ------------------------------------------------------------------------------------------------ checkpoints
    def save(
        self,
        module: Policy | ScalarModel,
        tokenizer: Any,
        extra: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
    ) -> None:
        """Write `checkpoint-{step}`: the model as a Hugging Face folder, and all a resumed run needs.

        `extra` holds the loop's own state as plain values, `files` more texts by name.
        Raises: RunFailure, with the last good checkpoint.
        """
        with self.phase("saving"), self._meeting():
            self._save(module, tokenizer, extra, files)

    def _save(
        self, module: nn.Module, tokenizer: Any, extra: dict[str, Any] | None, files: dict[str, str] | None
    ) -> None:
        module = self._put_together(module)
        state = {
            "step": self.step,
            **self._rng_states(),
            "python_rng": random.getstate(),
            "threads": torch.get_num_threads(),
            "world_size": self.world_size,
            "learned": {
                name: learned_state(learner.module.module, self.is_first) for name, learner in self.learners.items()
            },
            "optimizers": {
                name: full_tensors(learner.optimizer.state_dict(), self.is_first)
                for name, learner in self.learners.items()
            },
            "schedulers": {name: learner.scheduler.state_dict() for name, learner in self.learners.items()},
            "extra": extra or {},
        }

        def write(folder: Path) -> None:
            export(module, folder, self.directory / "base", self.args.merge)
            tokenizer.save_pretrained(folder)
            torch.save(state, folder / "resume.pt")
            for name, text in {"README.md": self._card(), **(files or {})}.items():
                (folder / name).write_text(text, encoding="utf-8")

        if self.is_first:
            saved = save_checkpoint(self.directory, self.step, write, self.args.keep_last)
            write_text(self.directory / "README.md", self._card())
            self.print0(f"saved {saved}")
        self.fabric.barrier()

    def _put_together(self, module: nn.Module) -> nn.Module:
        """The module itself, or a copy of a split one that is whole."""
        for name, meta_copies in self.meta_copies.items():
            if self.learners[name].module.module is module and is_sharded(module):
                return materialize(meta_copies, module, keep=self.is_first)
        return module

    def _rng_states(self) -> dict[str, Tensor]:
        """The state of torch's generators on all ranks: (ranks, bytes) each."""
        states = {"rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        found = [states]
        if self.world_size > 1:
            found = [states] * self.world_size
            torch.distributed.all_gather_object(found, states)
        return {name: torch.stack([theirs[name] for theirs in found]) for name in states}

    def finish(self, results: dict[str, float] | None = None) -> Path:
        """Close the logs and tell where the run is; `results` go into its model card."""
        if self.watch:
            self.watch.close()
        if self.is_first:
            self._logger.finalize("success")
            if self._timed:
                self._write_profile()
            if results:  # none when a finished run is resumed: its card keeps those it has
                write_text(self.directory / "README.md", self._card(results))
            self.print0(f"finished in {time.perf_counter() - self._started:.0f} s: {self.directory}")
            if self.args.push_to_hub:
                self._push_to_hub(self.args.push_to_hub)
        return self.directory

    def _write_profile(self) -> None:
        from lightrlhf.training import roofline

        dtype = torch.bfloat16 if self.args.precision == "bf16-mixed" else torch.float32
        ceilings = roofline.measure_ceilings(self.device, dtype)
        roles = {name: learner.module.module for name, learner in self.learners.items()}
        shapes = {name: roofline.Shape.of(role.model, role) for name, role in roles.items()}
        phases = roofline.profile(self._timed, shapes, self.args, ceilings, self.world_size)
        write_text(self.directory / "profile.json", json.dumps({"phases": phases, **ceilings._asdict()}, indent=1))
        write_text(self.directory / "profile.md", roofline.table(phases, ceilings))

    def _push_to_hub(self, repository: str) -> None:
        """Upload the last checkpoint, less what only a resumed run reads. Raises: RunFailure; the run is kept."""
        from huggingface_hub import HfApi

        folder = checkpoints(self.directory)[-1]
        try:
            api = HfApi()
            api.create_repo(repository, private=True, exist_ok=True)
            with self_contained(folder) as whole:
                api.upload_folder(repo_id=repository, folder_path=whole, ignore_patterns=["resume.pt", MANIFEST])
        except Exception as problem:  # the hub client, the network and the login raise their own
            said = first_line(problem)
            raise RunFailure(f"--push_to_hub {repository} failed: {said}; the checkpoint is {folder}") from problem
        self.print0(f"uploaded {folder} to {repository}")

    def _card(self, results: dict[str, float] | None = None) -> str:
        lines = [
            "---",
            "library_name: transformers",
            f"tags: [lightrlhf, {self.program}]",
            "---",
            f"# {self.args.experiment_name}",
            "",
            f"Trained by `lightrlhf.{self.program}` for {self.step} steps on `{self.args.data_dir}`.",
            "",
            "| argument | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in to_dict(self.args).items() if value is not None),
        ]
        if results:
            lines += ["", "| result | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in results.items())]
        return "\n".join(lines) + "\n"

    def _read_resume_state(self) -> dict[str, Any] | None:
        if not self.args.resume_from:
            return None
        directory = Path(self.args.resume_from)
        try:
            stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UsageError(f"--resume_from {directory} is no experiment dir: no readable args.json") from None
        if stored.get("program") != self.program:
            raise UsageError(f"--resume_from {directory} is a run of {stored.get('program')}, not of {self.program}")
        path = newest_checkpoint(directory, "--resume_from") / "resume.pt"
        state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")  # ranks share its pages
        for what, now in (("threads", torch.get_num_threads()), ("world_size", self.world_size)):
            if state[what] != now:
                self.fabric.print(f"note: {what} was {state[what]} and is {now}: results will differ in the last bits")
        return state

    def _restore_rng(self) -> None:
        rank = min(self.rank, len(self.resumed["rng"]) - 1)
        torch.set_rng_state(self.resumed["rng"][rank].clone())
        if self.device.type == "cuda" and "cuda_rng" in self.resumed:
            torch.cuda.set_rng_state(self.resumed["cuda_rng"][rank].clone(), self.device)
        random.setstate(self.resumed["python_rng"])

    def _load_learned(self, name: str, module: nn.Module) -> None:
        learned, now = self.resumed["learned"][name], dict(module.named_parameters())
        for key, value in learned.items():
            if key not in now or now[key].shape != value.shape:
                raise UsageError(f"--resume_from {self.args.resume_from} was trained with another model: {key}")
        module.load_state_dict(learned, strict=False)

    def _choose_directory(self) -> Path:
        args = self.args
        if args.resume_from:
            return Path(args.resume_from)
        data = Path(args.data_dir).resolve()
        parent = Path(args.log_dir) / args.experiment_name / data.parent.name / data.name
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UsageError(f"--log_dir {args.log_dir} cannot be written: {problem.strerror}") from None
        return parent / time.strftime("%Y-%m-%d_%H-%M-%S")

    def _open_directory(self) -> None:
        if self.is_first and self.resumed:
            _forget_rows_after(self.directory / "metrics.jsonl", self.step)
            _forget_rows_after(self.directory / "samples.jsonl", self.step)
        elif self.is_first:
            while True:
                try:
                    self.directory.mkdir()
                    break
                except FileExistsError:  # two runs of one second
                    self.directory = self.directory.with_name(f"{self.directory.name}x")
                except OSError as problem:
                    raise UsageError(f"--log_dir {self.args.log_dir} cannot be written: {problem.strerror}") from None
            write_text(self.directory / "args.json", json.dumps(self._describe(), indent=1))
        self.directory = Path(self.fabric.broadcast(str(self.directory)))
        self._logger = self._make_logger()

    def _describe(self) -> dict[str, Any]:
        versions = {"python": platform.python_version()}
        for package in VERSIONED:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                continue
        return {**to_dict(self.args), "program": self.program, "versions": versions, "git_commit": _git_commit()}

    def _make_logger(self) -> Any:
        from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

        if self.args.logger == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            return WandbLogger(project=self.args.experiment_name, name=self.directory.name, save_dir=self.directory)
        kind = TensorBoardLogger if self.args.logger == "tensorboard" else CSVLogger
        return kind(root_dir=str(self.directory), name="logs", version="")


def bitsandbytes_optimizer(name: str) -> Any:
    """The optimiser class of this name. A CPU has nothing to page to: of that its help tells, not a warning."""
    import bitsandbytes

    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    return getattr(bitsandbytes.optim, name)


def learned_state(module: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """The parameters that learn, by name, on the CPU, put together where they are split; see `gathered`."""
    return {name: full_tensors(p, keep) for name, p in module.named_parameters() if p.requires_grad}


def _forget_rows_after(path: Path, step: int) -> None:
    """Drop logged rows of steps that will be done again."""
    if path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # a text may hold U+2028
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue  # a line cut by the kill
        write_text(path, "".join(kept))


def _git_commit() -> str | None:
    """Commit of the library's checkout, when it runs from one."""
    if not shutil.which("git"):
        return None
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(here.parents[2])},
    )
    return done.stdout.strip() or None
