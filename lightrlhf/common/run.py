"""Run: what a training loop keeps beside its maths.

Fabric and its ranks, seeds, the experiment dir, metrics, optimisers, the order of the data, checkpoints and resuming.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.common.args import RunFailure, TrainArgs, UsageError, to_dict
from lightrlhf.common.batch import Row, epoch_order, row_length
from lightrlhf.common.checkpoint import MANIFEST, checkpoints, newest_checkpoint, save_checkpoint, write_text
from lightrlhf.common.model import Policy, ScalarModel, merged_model

VERSIONED = ("lightrlhf", "torch", "lightning", "transformers", "peft", "tokenizers", "jsonargparse")


class Run:
    """One training run: where it lives, what it logs, and how it stops and goes on.

    Raises: UsageError when the experiment dir cannot be written or there is nothing to resume from.
    """

    def __init__(self, args: TrainArgs, program: str) -> None:
        from lightning.fabric import seed_everything

        self.args, self.program = args, program
        self.fabric = _make_fabric(args)
        self.fabric.launch()
        seed_everything(args.seed, verbose=False)
        self.resumed = self._read_resume_state()
        self.step: int = self.resumed["step"] if self.resumed else 0
        self.directory = self._choose_directory()  # created by `steps`: what is refused before leaves none behind
        self.optimizers: dict[str, tuple[nn.Module, Any, Any]] = {}
        self._timed: list[dict[str, Any]] = []  # for --profile: times of the logged steps and how much they did
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
        return self.fabric.all_reduce(value, reduce_op="sum") if self.world_size > 1 else value

    def total(self, value: float) -> float:
        """Sum of a number over all ranks."""
        return float(self.sum_over_ranks(torch.tensor(float(value), dtype=torch.float64, device=self.device)))

    def share(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's part of the rows of a global batch, contiguous and as even as can be."""
        start, end = (len(rows) * r // self.world_size for r in (self.rank, self.rank + 1))
        return list(rows[start:end])

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
        learning = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if self.resumed:
            self._load_learned(name, module)
        groups = [
            {"params": [p for _, p in learning if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for _, p in learning if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = getattr(torch.optim, args.optimizer)(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=(args.optimizer_beta1, args.optimizer_beta2),
            eps=args.optimizer_eps,
        )
        wrapped, optimizer = self.fabric.setup(module, optimizer)
        wrapped.train()
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer.optimizer, args.lr_warmup_steps, num_updates)
        if self.resumed:
            optimizer.load_state_dict(self.resumed["optimizers"][name])
            scheduler.load_state_dict(self.resumed["schedulers"][name])
        self.optimizers[name] = (wrapped, optimizer, scheduler)
        return wrapped

    def place(self, module: nn.Module) -> nn.Module:
        """A frozen module in eval mode on this rank's device; never wrapped for gradients."""
        return module.requires_grad_(False).eval().to(self.device)

    def autocast(self) -> AbstractContextManager:
        """The run's precision, for passes that do not go through a wrapped module."""
        return self.fabric.autocast()

    def accumulate(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """Inside, gradients are not yet summed over ranks."""
        return self.fabric.no_backward_sync(module) if enabled and self.world_size > 1 else nullcontext()

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
        module, optimizer, scheduler = self.optimizers[name]
        norm = nn.utils.clip_grad_norm_(
            [p for p in module.parameters() if p.grad is not None], self.args.gradient_clip_val or math.inf
        )
        if not torch.isfinite(norm):
            raise RunFailure(f"{name} gradient norm is {float(norm)} at step {self.step + 1}{self._last_good()}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return float(norm)

    def learning_rate(self, name: str) -> float:
        return self.optimizers[name][2].get_last_lr()[0]

    def _last_good(self) -> str:
        found = checkpoints(self.directory)
        return f"; the last good checkpoint is {found[-1]}" if found else "; no checkpoint had been written yet"

    # ----------------------------------------------------------------------------------------------------- data
    def num_steps(self, num_rows: int, batch_size: int) -> int:
        """Steps of the whole run at `batch_size` rows per device and step; the last of an epoch may be smaller."""
        per_epoch = math.ceil(num_rows / (batch_size * self.world_size))
        steps = per_epoch * self.args.epochs
        return min(steps, self.args.max_steps) if self.args.max_steps else steps

    def global_batch(self, rows: Sequence[Row], step: int, batch_size: int) -> list[Row]:
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

    def say(self, text: str) -> None:
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
        rng = self.fabric.all_gather(torch.get_rng_state()) if self.world_size > 1 else torch.get_rng_state()[None]
        state = {
            "step": self.step,
            "rng": rng,
            "python_rng": random.getstate(),
            "threads": torch.get_num_threads(),
            "world_size": self.world_size,
            "learned": {name: learned_state(entry[0].module) for name, entry in self.optimizers.items()},
            "optimizers": {name: entry[1].state_dict() for name, entry in self.optimizers.items()},
            "schedulers": {name: entry[2].state_dict() for name, entry in self.optimizers.items()},
            "extra": extra or {},
        }

        def write(folder: Path) -> None:
            merged_model(module).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            torch.save(state, folder / "resume.pt")
            for name, text in {"README.md": self._card(), **(files or {})}.items():
                (folder / name).write_text(text, encoding="utf-8")

        if self.is_first:
            saved = save_checkpoint(self.directory, self.step, write, self.args.keep_last)
            write_text(self.directory / "README.md", self._card())
            self.say(f"saved {saved}")
        self.fabric.barrier()

    def finish(self, results: dict[str, float] | None = None) -> Path:
        """Close the logs and tell where the run is; `results` go into its model card."""
        if self.is_first:
            self._logger.finalize("success")
            if self._timed:
                self._write_profile()
            if results:  # none when a finished run is resumed: its card keeps those it has
                write_text(self.directory / "README.md", self._card(results))
            self.say(f"finished in {time.perf_counter() - self._started:.0f} s: {self.directory}")
            if self.args.push_to_hub:
                self._push_to_hub(self.args.push_to_hub)
        return self.directory

    def _write_profile(self) -> None:
        from lightrlhf.common import roofline

        dtype = torch.bfloat16 if self.args.precision == "bf16-mixed" else torch.float32
        ceilings = roofline.measure_ceilings(self.device, dtype)
        shapes = {name: roofline.Shape.of(entry[0].module.model) for name, entry in self.optimizers.items()}
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
            api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=["resume.pt", MANIFEST])
        except Exception as problem:  # the hub client, the network and the login raise their own
            line = next(iter(str(problem).splitlines()), type(problem).__name__)
            raise RunFailure(f"--push_to_hub {repository} failed: {line}; the checkpoint is {folder}") from problem
        self.say(f"uploaded {folder} to {repository}")

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
        state = torch.load(newest_checkpoint(directory, "--resume_from") / "resume.pt", weights_only=True)
        for what, now in (("threads", torch.get_num_threads()), ("world_size", self.world_size)):
            if state[what] != now:
                self.fabric.print(f"note: {what} was {state[what]} and is {now}: results will differ in the last bits")
        return state

    def _restore_rng(self) -> None:
        rng = self.resumed["rng"]
        torch.set_rng_state(rng[min(self.rank, len(rng) - 1)])
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


def _make_fabric(args: TrainArgs) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    names = ("accelerator", "devices", "num_nodes", "strategy", "precision")
    try:
        return Fabric(**{name: getattr(args, name) for name in names})
    except (ValueError, RuntimeError, MisconfigurationException) as problem:
        given = " ".join(f"--{name} {getattr(args, name)}" for name in names)
        raise UsageError(f"{given}: {' '.join(str(problem).split())}") from None


def learned_state(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that learn, by name, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}


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
