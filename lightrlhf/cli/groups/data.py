"""Flags of the prepared data."""

from __future__ import annotations

from dataclasses import dataclass

from lightrlhf.cli.fields import Args, flag, positive
from lightrlhf.cli.lists import paths


@dataclass(frozen=True, kw_only=True)
class SealArgs(Args):
    """Data."""

    verify: bool = flag(True, show="rarely")
    """Check prepared data against the hashes in its `manifest.json`."""


@dataclass(frozen=True, kw_only=True)
class DataArgs(SealArgs):
    """Data."""

    data_dir: str = flag("data", show="first")
    """Folder of prepared data: the `.pt` splits from a `prepare_data.py`."""

    @property
    def data_dirs(self) -> list[str]:
        """The set's folder."""
        return [self.data_dir]

    @property
    def data_name(self) -> str:
        """The folder, as errors name it."""
        return self.data_dir


@dataclass(frozen=True, kw_only=True)
class DataSetsArgs(SealArgs):
    """Data."""

    data_dir: list[str] | str = flag("data", split=paths, unique=True, show="first")
    """One or more folders of prepared data: the `.pt` splits from a `prepare_data.py`."""
    data_weights: list[float] = positive([], show="rarely")
    """Sampling weights of the data sets in `data_dir`. Default: proportional to their sizes."""

    @property
    def data_dirs(self) -> list[str]:
        """The sets' folders."""
        return [self.data_dir] if isinstance(self.data_dir, str) else self.data_dir

    @property
    def data_name(self) -> str:
        """The sets' folders, as errors name them."""
        return " + ".join(self.data_dirs)

    def _check(self) -> None:
        if not self.data_dirs:
            raise ValueError("--data_dir [] needs at least one folder")
        if len(self.data_dirs) == 1:
            object.__setattr__(self, "data_dir", self.data_dirs[0])
        if self.data_weights and len(self.data_weights) != len(self.data_dirs):
            weights = " ".join(map(str, self.data_weights))
            raise ValueError(f"--data_weights {weights}: give {len(self.data_dirs)}, one for each folder of --data_dir")


@dataclass(frozen=True, kw_only=True)
class DrawnDataArgs(DataSetsArgs):
    """Data."""

    curriculum_score: float | None = flag(
        None, excludes={"data_weights": ..., "resample_rounds": ..., "max_staleness": ...}, show="rarely"
    )
    """Score from which a response passes: draw prompts by p (1 - p) of their pass rates. Default: each in turn."""
