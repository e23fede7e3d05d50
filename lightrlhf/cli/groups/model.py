"""Flags of the model, and which of its weights are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import Args, at_least, flag, positive
from lightrlhf.cli.lists import items_of, names

SHARDED = ("fsdp", "deepspeed")
QUANTISED = {"strategy": SHARDED, "model_name": "tiny"}  # what weights in 8 or 4 bits exclude
PARTS = ("pissa", "olora")  # adapters that begin as a part of the weights


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Args):
    """Model, and which of its weights are trained."""

    model_name: str | None = flag(None, required="policy", show="first")
    """Hub name, folder, experiment dir, GGUF file, `package:NAME` (a GGUF file in it), or `tiny` (a new Llama)."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a hub model to run code from its repository."""
    disable_dropout: bool = flag(False, show="rarely")
    """Set the probability of every dropout module to 0."""
    finetune_mode: Literal["all", "last_layer", "lora"] = "all"
    """Weights to train: all, the last layer and head, or adapters."""
    lora_rank: int = at_least(1, 8)
    """Rank of the adapters."""
    lora_alpha: float = positive(16.0, show="rarely")
    """Scale of the adapters, alpha / rank; multiply it by sqrt(rank) for rsLoRA."""
    lora_dropout: float = at_least(0, 0.0, below=1, excludes={"disable_dropout": True}, show="rarely")
    """Dropout on the input of the adapters."""
    lora_targets: str = flag("all-linear", show="rarely")
    """Modules with adapters, separated by commas; `all-linear`: every linear layer but the head."""
    use_dora: bool = flag(
        False,
        needs={"finetune_mode": "lora"},
        excludes={"load_in_8bit": True, "load_in_4bit": True, "base_dtype": "bfloat16", "init_lora_weights": PARTS},
        show="rarely",
    )
    """Also train the length of each row of the adapted weights (DoRA); not where models share a backbone."""
    init_lora_weights: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = flag(
        "default", needs={"finetune_mode": "lora"}, show="rarely"
    )
    """Initialisation of adapters; pissa and olora start from a part of the weights; a frozen adapter subtracts it."""
    load_in_8bit: bool = flag(
        False,
        needs={"finetune_mode": "lora"},
        excludes={"load_in_4bit": True, "init_lora_weights": PARTS} | QUANTISED,
        packages={True: "bitsandbytes"},
        show="rarely",
    )
    """Quantise frozen weights to 8 bits (bitsandbytes); needs `finetune_mode` lora."""
    load_in_4bit: bool = flag(
        False,
        needs={"finetune_mode": "lora"},
        excludes={"init_lora_weights": PARTS} | QUANTISED,
        packages={True: "bitsandbytes"},
        show="rarely",
    )
    """Quantise frozen weights to 4 bits (nf4); needs `finetune_mode` lora."""
    base_dtype: Literal["float32", "bfloat16"] = flag(
        "float32",
        needs={"finetune_mode": "lora"},
        excludes={"load_in_8bit": True, "load_in_4bit": True, "init_lora_weights": PARTS, "strategy": SHARDED},
        show="rarely",
    )
    """Dtype of frozen weights in memory, with `finetune_mode` lora; matrix products follow `precision`."""
    activation_checkpointing: bool = flag(False, show="rarely")
    """Recompute activations in the backward pass: less memory, more time."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = flag(
        "sdpa",
        when="flash_attention_2",
        excludes={"accelerator": ("cpu", "mps"), "precision": "32-true"},
        packages={"flash_attention_2": "flash_attn"},
        show="rarely",
    )
    """Attention: torch's kernels (eager where an architecture lacks them), plain products, or flash-attn."""

    @property
    def holds_base(self) -> bool:
        """Whether the model that is loaded is held in bfloat16: below adapters."""
        return self.base_dtype == "bfloat16" and self.finetune_mode == "lora"

    def _check_given(self, given: Mapping[str, object]) -> None:
        if isinstance(name := given.get("policy"), str | Path):
            raise UsageError(f"policy: {name} is a name, not a model; use --model_name, or load the model")

    def lora_target_names(self) -> list[str]:
        """The items of `--lora_targets`, in brackets or not."""
        return items_of([self.lora_targets], names)

    def _check(self) -> None:
        if self.init_lora_weights == "orthogonal" and self.lora_rank % 2:
            raise ValueError(f"--init_lora_weights orthogonal needs an even rank, not --lora_rank {self.lora_rank}")


@dataclass(frozen=True, kw_only=True)
class FrozenArgs(ModelArgs):
    """Loading of a model that is not trained: quantisation needs no adapters."""

    load_in_8bit: bool = flag(False, needs={})
    """Quantise weights to 8 bits (bitsandbytes)."""
    load_in_4bit: bool = flag(False, needs={})
    """Quantise weights to 4 bits (nf4)."""
    base_dtype: Literal["float32", "bfloat16"] = flag("float32", needs={})
    """Dtype of the weights in memory."""

    @property
    def holds_base(self) -> bool:
        """Whether the model that is loaded is held in bfloat16."""
        return self.base_dtype == "bfloat16"


@dataclass(frozen=True, kw_only=True)
class StartArgs(ModelArgs):
    """Model, and which of its weights are trained."""

    sft_experiment_dir: str | None = flag(None, required="policy", show="first")
    """Experiment dir or checkpoint to start from, else `model_name`."""

    def _check_given(self, given: Mapping[str, object]) -> None:
        if self.sft_experiment_dir is not None and given.get("policy") is not None:
            raise UsageError(f"--sft_experiment_dir {self.sft_experiment_dir} contradicts policy; give one of them")
