"""Flags of a run: its experiment dir, its steps, its checkpoints and its logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightrlhf.cli.fields import Args, at_least, flag, random_seed
from lightrlhf.cli.hub import check_repository


@dataclass(frozen=True, kw_only=True)
class DryRunArgs(Args):
    """Run.

    The flag of every program that can be tried first. The line above is the title of these flags and `RunArgs`' in
    `--help`.
    """

    dry_run: bool = False
    """Run two steps or one batch, print what they did, and write nothing."""


@dataclass(frozen=True, kw_only=True)
class RunArgs(DryRunArgs):
    """Run."""

    experiment_name: str = flag("lightrlhf", show="rarely")
    """Folder below `log_dir` for the runs of one algorithm."""
    log_dir: str = flag("logs", show="rarely")
    """Root folder of all experiment dirs."""
    output_dir: str | None = None
    """Experiment dir itself, new or empty, instead of one below `log_dir`."""
    resume_from: str | None = flag(None, excludes={"dry_run": True})
    """Experiment dir of a run to resume; its arguments become the defaults."""
    seed: int = random_seed(42)
    """Seed of data order, new weights, dropout and sampling."""
    epochs: int | None = at_least(1, None)
    """Passes over the training data; 1 when `max_steps` is not given either."""
    max_steps: int | None = at_least(1, None)
    """Number of steps, over as many epochs as needed but at most `epochs`."""
    mini_batch_size: int = at_least(1, 8)
    """Examples per optimiser step and device."""
    micro_batch_size: int = at_least(1, 8)
    """Examples per forward and backward pass; never changes a gradient."""
    save_interval: int = at_least(1, 500, show="rarely")
    """Steps between checkpoints."""
    save_minutes: float = at_least(0, 15.0, show="rarely")
    """Also save a checkpoint after this many minutes; 0 disables this."""
    keep_last: int = at_least(0, 2, show="rarely")
    """Checkpoints to keep; 0 keeps all."""
    log_interval: int = at_least(1, 5, show="rarely")
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    logger: Literal["tensorboard", "csv", "wandb"] = flag("tensorboard", packages={"wandb": "wandb"}, show="rarely")
    """Where to log metrics and samples, besides the run's files; csv logs only metrics, wandb needs an extra."""
    wandb_project: str | None = flag(None, needs={"logger": "wandb"}, show="rarely")
    """W&B project. Default: the name in `experiment_name`."""
    profile: bool = flag(False, show="rarely")
    """Write `profile.json` and `profile.md`: time of each phase, and its lower bound on this machine."""
    push_to_hub: str | None = flag(None, check=check_repository, show="rarely")
    """Hub repository OWNER/NAME for the last checkpoint; private if it is new."""

    def _check(self) -> None:
        if self.mini_batch_size % self.micro_batch_size:
            fits = next(n for n in range(self.micro_batch_size, 0, -1) if self.mini_batch_size % n == 0)
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must be a multiple of --micro_batch_size "
                f"{self.micro_batch_size}; try --micro_batch_size {fits}"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutLogArgs(Args):
    """Kept samples."""

    log_rollouts: int = at_least(0, 8, show="rarely")
    """Samples to log per logged step (`rollouts.jsonl`) and evaluation (`samples.jsonl`); 30 bytes per token."""
