"""Flags that every training program has."""

from __future__ import annotations

from dataclasses import dataclass

from lightrlhf.cli.groups.devices import DeviceArgs
from lightrlhf.cli.groups.model import ModelArgs
from lightrlhf.cli.groups.optimizer import OptimizerArgs
from lightrlhf.cli.groups.run import RunArgs


@dataclass(frozen=True, kw_only=True)
class TrainArgs(RunArgs, OptimizerArgs, DeviceArgs, ModelArgs):
    """Flags that every training program has."""
