"""Quantisation to 4 and 8 bits (bitsandbytes): while loading, or of weights that are stored quantised.

Left out: other quantisers (GPTQ, AWQ), and training quantised weights themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DeviceArgs, ModelArgs, TrainArgs
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.names import holds_reward_model

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
QUANTISED = ("Linear8bitLt", "Linear4bit")  # the layers of bitsandbytes


def quantisation_options(args: ModelArgs) -> dict[str, Any]:
    """Options of `from_pretrained` for `--load_in_8bit` and `--load_in_4bit`; heads are not quantised."""
    if not (args.load_in_8bit or args.load_in_4bit):
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_8bit=args.load_in_8bit,
        load_in_4bit=args.load_in_4bit,
        llm_int8_skip_modules=["lm_head", "embed_out", "score"],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype(args),
    )
    return {"quantization_config": config}


def compute_dtype(args: ModelArgs | DeviceArgs) -> torch.dtype:
    """Dtype of matrix products with this `--precision`; float32 for a program without it."""
    return MIXED.get(args.precision, torch.float32) if isinstance(args, DeviceArgs) else torch.float32


def check_stored_quantisation(base: str, flag: str, args: ModelArgs, is_scalar: bool = False) -> bool:
    """Whether the weights of `base` were saved quantised by bitsandbytes.

    is_scalar: they are loaded for a reward model or a critic.
    Raises: UsageError when `args` requires what such weights do not support: training, a new head, sharding.
    """
    from transformers import PretrainedConfig

    try:
        stored = PretrainedConfig.get_config_dict(base)[0].get("quantization_config") or {}
    except (OSError, ValueError):
        return False  # loading reports the error
    if not (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        return False
    bits, other = ("4", "8") if stored.get("load_in_4bit") else ("8", "4")
    which = f"{flag}: the weights in {base} were saved in {bits} bits"
    if isinstance(args, TrainArgs) and args.finetune_mode != "lora":
        raise UsageError(f"{which} and cannot be trained; use --finetune_mode lora")
    if isinstance(args, TrainArgs) and args.push_to_hub and Path(base).is_dir():
        raise UsageError(f"{which}, so --push_to_hub cannot upload merged weights; give a base on the hub")
    if isinstance(args, TrainArgs) and args.strategy in ("fsdp", "deepspeed"):
        raise UsageError(f"{which} and cannot be sharded by --strategy {args.strategy}; use --strategy ddp")
    if is_scalar and not holds_reward_model(base):
        raise UsageError(
            f"{which} and cannot get a scalar head; give unquantised weights and quantise them by --load_in_{bits}bit"
        )
    if getattr(args, f"load_in_{other}bit"):
        raise UsageError(f"{which}; remove --load_in_{other}bit")
    return True


@torch.no_grad()
def keep_unpacked(model: PreTrainedModel, which: str, compute_dtype: torch.dtype) -> None:
    """Keep 4-bit weights in their quantised layout, and compute with them in `compute_dtype`.

    On CPUs with AVX512-bf16 instructions bitsandbytes (0.50) repacks the weights of a `Linear4bit` at its first pass in
    eval mode. After that no gradient flows through the layer, its products are rounded to bfloat16, `dequantize_4bit`
    (hence merging) returns a different matrix, and `state_dict` damages the scales. Layers whose input width is not a
    multiple of 64, or whose output width is not a multiple of 32, fail.

    which: name of the model in errors.
    Raises: UsageError when no layer is quantised, or this release of bitsandbytes repacks nevertheless.
    """
    layers: dict[str, Any] = {n: layer for n, layer in model.named_modules() if type(layer).__name__ in QUANTISED}
    if not layers:
        raise UsageError(
            f"{which} ({model.config.model_type}) has no layer that bitsandbytes can quantise; "
            "remove --load_in_8bit and --load_in_4bit"
        )
    layers = {name: layer for name, layer in layers.items() if type(layer).__name__ == "Linear4bit"}
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype, layer.compute_type_is_set = compute_dtype, True
    for name, layer in list(layers.items())[:1]:
        if layer.weight.device.type == "cpu" and _repacks(layer):
            raise UsageError(
                f"{which}: this release of bitsandbytes repacks the 4-bit weights of {name} on this processor, which "
                "then cannot be trained or merged; install the tested one: pip install -c constraints.txt bitsandbytes"
            )


def _repacks(layer: Any) -> bool:
    """Whether a forward pass of a `Linear4bit` in eval mode repacks its weights, or fails."""
    stored = layer.weight.data_ptr()
    try:
        layer(torch.zeros(1, layer.in_features))
    except (RuntimeError, AssertionError):
        return True
    return layer.weight.data_ptr() != stored


def is_quantised(model: nn.Module) -> bool:
    """Whether the weights of a Hugging Face model are quantised by bitsandbytes."""
    return getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
