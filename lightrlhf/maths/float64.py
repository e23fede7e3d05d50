"""Sums and statistics in float64, on the values' device, or on the host if the device has no float64."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT = {"mps"}  # device types without float64; a run has one rank there, so sums over ranks do not need it


def float64_device(device: torch.device) -> torch.device:
    """The device, or the CPU if it has no float64."""
    return torch.device("cpu") if device.type in WITHOUT else device


def to_float64(values: Tensor) -> Tensor:
    """The values in float64, on the device of `float64_device`; any shape."""
    return values.to(float64_device(values.device)).double()
