"""Estimate the memory of a training run on one device, before it is started.

Counted: weights, gradients, optimiser state, activations of one micro-batch, and the key-value cache of a rollout. The
parameters are those of the model itself, built without memory; a size such as `1.5B` stands for a Llama of about that
size. Weights, gradients and optimiser are exact. Activations are counted per token from the widths of the layers, for
attention that never stores its scores.

Left out: what the libraries and the allocator take (0.5 to 1 GiB), and the split over ranks by fsdp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from lightrlhf.cli.args import GenerationArgs, ModelArgs, check_at_least
from lightrlhf.cli.errors import UsageError, first_line, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.models.names import base_name, holds_reward_model, quiet_libraries, resolve

FLOAT = 4  # bytes; weights, gradients and optimiser state are float32 in every precision
OPTIMIZER_BYTES = {"AdamW": 8, "Adam": 8, "AdamW8bit": 2, "PagedAdamW32bit": 8}
UNITS = {"M": 1e6, "B": 1e9}
MODELS = {"sft": 1, "dpo": 1, "rm": 1, "ppo": 4}  # models in memory when none shares a backbone
CHUNK = 4096  # predictions whose logits exist at a time


@dataclass(frozen=True, kw_only=True)
class EstimateArgs(ModelArgs, GenerationArgs):
    """Estimate the memory of a training run on one device."""

    algorithm: Literal["sft", "rm", "ppo", "dpo"] = "sft"
    """What is to be run; `ppo` with a reward model of the policy's size."""
    share_backbone: bool = True
    """PPO with `finetune_mode` lora: all roles on one set of base weights."""
    optimizer: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW32bit"] = "AdamW"
    """Optimiser of the run."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Precision of the run: activations and the cache are half as large in bf16."""
    micro_batch_size: int = 8
    """Examples per forward and backward pass; a pair counts twice by itself."""
    rollout_mini_batch_size: int = 32
    """PPO: rows decoded at a time."""
    sequence_length: int = 512
    """Tokens of a whole example, prompt and response."""

    def __post_init__(self) -> None:
        if not self.model_name or self.model_name == "tiny":
            raise ValueError("--model_name is needed: a hub name, a folder, an experiment dir, or a size such as 1.5B")
        self.check_model()
        for name in ("micro_batch_size", "rollout_mini_batch_size", "sequence_length"):
            check_at_least(self, name, 1)


def run(args: EstimateArgs) -> dict[str, float]:
    """Estimate memory; returns the bytes of each part."""
    parts = estimate(args, shape_of(args))
    show(args, parts)
    return parts


def shape_of(args: EstimateArgs) -> dict[str, Any]:
    """The sizes of a model that memory depends on."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightrlhf.models.lora import linear_layers

    quiet_libraries()
    if size := re.fullmatch(r"([\d.]+)([MB])", args.model_name):
        config = llama_of(float(size[1]) * UNITS[size[2]])
    else:
        source = base_name(resolve(args.model_name), "--model_name")
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
        except (OSError, ValueError) as problem:
            raise UsageError(f"--model_name {args.model_name}: {first_line(problem)}") from None
        if holds_reward_model(source):
            raise UsageError(f"--model_name {args.model_name} is a reward model; give the language model it came from")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = linear_layers(model)
    wanted = args.lora_target_names()
    if wanted != ["all-linear"]:
        names = [name for name in names if name.rpartition(".")[2] in wanted]
    linear = [out_and_in(model.get_submodule(name)) for name in linear_layers(model)]
    adapted = [out_and_in(model.get_submodule(name)) for name in names]
    text = config.get_text_config()
    heads = text.num_attention_heads
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "linear": sum(out * width for out, width in linear),
        "adapter": args.lora_rank * sum(out + width for out, width in adapted),
        "layers": text.num_hidden_layers,
        "last_layer": sum(out * width for out, width in linear) // text.num_hidden_layers,
        "hidden": text.hidden_size,
        "vocabulary": text.vocab_size,
        "stored": stored_per_token(linear, text.num_hidden_layers, text.hidden_size),
        "cache": 2 * (getattr(text, "num_key_value_heads", None) or heads) * (text.hidden_size // heads),
    }


def out_and_in(layer: Any) -> tuple[int, int]:
    """Widths of a linear layer; those of GPT-2 are stored the other way round."""
    out, width = layer.weight.shape
    return (width, out) if type(layer).__name__ == "Conv1D" else (out, width)


def llama_of(parameters: float) -> Any:
    """The config of a Llama of about this many parameters: 128 of width for each layer, as from 1B to 70B."""
    from transformers import LlamaConfig

    width = min(range(64, 16384, 64), key=lambda w: abs(llama_size(w) - parameters))
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=max(width // 128, 2),
        num_attention_heads=width // 64,
        vocab_size=32000,
        tie_word_embeddings=True,
    )


def llama_size(width: int) -> float:
    return 12 * width**2 * max(width // 128, 2) + 32000 * width


def stored_per_token(linear: list[tuple[int, int]], layers: int, hidden: int) -> int:
    """Numbers that a layer keeps per token for its backward pass.

    The output of every linear layer, and as much again as the widest for what its activation function makes of it and
    the product behind; two norms with their inputs; the residual sums.
    """
    outputs = sum(shape[0] for shape in linear) // layers
    widest = max(max(shape) for shape in linear)
    return outputs + 2 * widest + 4 * hidden


def estimate(args: EstimateArgs, shape: dict[str, Any]) -> dict[str, float]:
    """Bytes of each part, and `peak`: weights, optimiser, and the larger of an update and a rollout."""
    has_lora = args.finetune_mode == "lora"
    models = 1 if has_lora and args.share_backbone else MODELS[args.algorithm]
    learners = 2 if args.algorithm == "ppo" else 1
    frozen_linear = 1.0 if args.load_in_8bit else 0.5 + 4 / 64 if args.load_in_4bit else FLOAT  # nf4: a scale per 64
    one_model = frozen_linear * shape["linear"] + FLOAT * (shape["parameters"] - shape["linear"])
    learning = {"all": shape["parameters"], "last_layer": shape["last_layer"], "lora": shape["adapter"]}
    learning = learners * learning[args.finetune_mode]
    number = FLOAT if args.precision == "32-true" else 2
    rows = args.micro_batch_size * (2 if args.algorithm in ("rm", "dpo") else 1)
    tokens = rows * args.sequence_length
    kept = shape["hidden"] * shape["layers"] + shape["stored"]  # one layer at a time is computed again
    if not args.activation_checkpointing:
        kept = shape["stored"] * shape["layers"]
    if args.finetune_mode == "last_layer":
        kept = shape["stored"]
    logits = 0 if args.algorithm == "rm" else 3 * FLOAT * min(tokens, CHUNK) * shape["vocabulary"]
    parts: dict[str, float] = {
        "weights": models * one_model + (FLOAT * learning if has_lora else 0),
        "gradients": FLOAT * learning,
        "optimizer": OPTIMIZER_BYTES[args.optimizer] * learning,
        "activations": number * tokens * kept + logits,
        "cache": 0,
    }
    if args.algorithm == "ppo":
        columns = args.rollout_mini_batch_size * max(args.sequence_length, args.max_new_tokens)
        parts["cache"] = number * columns * shape["cache"] * shape["layers"]
    parts["peak"] = (
        parts["weights"] + parts["optimizer"] + max(parts["gradients"] + parts["activations"], parts["cache"])
    )
    return parts


def show(args: EstimateArgs, parts: dict[str, float]) -> None:
    """Print the parts as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "GiB", title=f"{args.algorithm} of {args.model_name}, --finetune_mode {args.finetune_mode}")
    for name, size in parts.items():
        table.add_row(name, f"{size / 2**30:.2f}", end_section=name == "cache")
    Console().print(table)


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the program; returns the bytes of each part."""
    return run(parse(EstimateArgs, argv))


if __name__ == "__main__":
    main()
