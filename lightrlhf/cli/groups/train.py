"""Flags that every training program has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightrlhf.cli.fields import flag
from lightrlhf.cli.groups.devices import DeviceArgs
from lightrlhf.cli.groups.model import PARTS, SHARDED, ModelArgs
from lightrlhf.cli.groups.optimizer import OptimizerArgs
from lightrlhf.cli.groups.run import RunArgs


@dataclass(frozen=True, kw_only=True)
class TrainArgs(RunArgs, OptimizerArgs, DeviceArgs, ModelArgs):
    """Flags that every training program has."""


@dataclass(frozen=True, kw_only=True)
class FrozenModelsArgs(TrainArgs):
    """Flags of programs with models that are not trained: a reference, a reward model, a teacher."""

    base_dtype: Literal["float32", "bfloat16"] = flag(
        "float32",
        needs={},
        excludes={"load_in_8bit": True, "load_in_4bit": True, "init_lora_weights": PARTS},
        show="rarely",
    )
    """Dtype of frozen weights in memory: under adapters, of reference, reward model and teacher."""
    offload: bool = flag(False, show="rarely")
    """Keep reference, reward model and teacher in the host's memory while they are not used; not on a CPU."""

    def _check(self) -> None:
        if self.holds_base and self.strategy in SHARDED:
            raise ValueError(
                f"--base_dtype bfloat16 excludes --strategy {self.strategy} with --finetune_mode lora; "
                "leave one of them out"
            )
