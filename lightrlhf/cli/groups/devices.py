"""Flags of the devices, by the names of Lightning Fabric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightrlhf.cli.fields import Args, at_least, flag


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(Args):
    """Devices (Lightning Fabric)."""

    accelerator: str = flag("auto", show="rarely")
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    devices: int = at_least(1, 1)
    """Number of processes on this machine, one device each."""
    num_nodes: int = at_least(1, 1, show="rarely")
    """Number of machines."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed"] = flag("auto", packages={"deepspeed": "deepspeed"})
    """Replicate models on all ranks (ddp), shard them (fsdp), or use DeepSpeed ZeRO-2 (deepspeed)."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = flag(
        "32-true", when="16-mixed", excludes={"strategy": ("fsdp", "deepspeed")}
    )
    """Precision of forward and backward passes; weights stay in float32."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelArgs(Args):
    """Devices (Lightning Fabric)."""

    tensor_parallel: int = at_least(1, 1, needs={"strategy": "fsdp", "finetune_mode": "all"}, show="rarely")
    """Tensor-parallel ranks, which split each layer's matrices and read the same rows; needs `strategy` fsdp."""
