"""Estimate the memory of a training run on one device before it starts.

Counted: weights, gradients, optimiser state, activations of one micro-batch, and the KV cache of a rollout. The
parameters are those of the model itself, built on the meta device; a size such as `1.5B` is a Llama of about that size.
Weights, gradients and optimiser state are exact. Activations are counted per token from the widths of the layers, for
attention that does not store its scores.

Left out: memory of the libraries and the allocator (0.5 to 1 GiB), and sharding over ranks by fsdp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightrlhf.cli.args import ModelArgs, check_args, check_at_least, check_types
from lightrlhf.cli.errors import UsageError, first_line, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.models.names import base_name, holds_reward_model, quiet_libraries, resolve
from lightrlhf.storage.results import print_table

FLOAT = 4  # bytes; weights, gradients and optimiser state are float32 in every precision
QUANTISED = {8: 1.0, 4: 0.5 + 4 / 64}  # bytes by bits; nf4 has a scale for each 64 weights
OPTIMIZER_BYTES = {"AdamW": 8, "Adam": 8, "AdamW8bit": 2, "PagedAdamW32bit": 8}
UNITS = {"M": 1e6, "B": 1e9}
MODELS = {"sft": 1, "dpo": 1, "rm": 1, "ppo": 4, "grpo": 2}  # models in memory when none shares a backbone
CHUNK = 4096  # predictions whose logits are in memory at a time
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
SAMPLING |= {"eos_ids": [], "stop_strings": []}


@dataclass(frozen=True, kw_only=True)
class EstimateArgs(ModelArgs):
    """Estimate the memory of a training run on one device."""

    algorithm: Literal["sft", "rm", "ppo", "grpo", "dpo"] = "sft"
    """Program of the run; `ppo` and `grpo` with a reward model of the policy's size, `grpo` without a KL."""
    share_backbone: bool = True
    """PPO or GRPO with `finetune_mode` lora: all roles share the base weights."""
    optimizer: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW32bit"] = "AdamW"
    """Optimiser of the run."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the run; activations and the KV cache are half as large in a mixed one."""
    micro_batch_size: int = 8
    """Examples per forward and backward pass; a pair counts as one."""
    rollout_mini_batch_size: int = 32
    """PPO, GRPO: rows of a rollout decoded at a time."""
    sequence_length: int = 512
    """Tokens of an example, prompt and response."""
    max_new_tokens: int = 128
    """PPO, GRPO: longest response."""

    REMOVED: ClassVar[dict[str, tuple[Any, str]]] = {
        name: (default, "it changes no memory; leave it out") for name, default in SAMPLING.items()
    }

    def __post_init__(self) -> None:
        check_types(self)
        if not self.model_name or self.model_name == "tiny":
            raise ValueError(
                "--model_name is required: a hub name, a folder, an experiment dir, or a size such as 1.5B"
            )
        self.check_model()
        for name in ("micro_batch_size", "rollout_mini_batch_size", "sequence_length", "max_new_tokens"):
            check_at_least(self, name, 1)


def run(args: EstimateArgs) -> dict[str, float]:
    """Estimate memory; returns the bytes of each part."""
    check_args(args, EstimateArgs)
    parts = estimate(args, shape_of(args))
    show(args, parts)
    return parts


def shape_of(args: EstimateArgs) -> dict[str, Any]:
    """Sizes of a model that determine the memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrlhf.models.lora import linear_layers

    config = config_of(args)
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
        "bits": bits_of(args, config),
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


def config_of(args: EstimateArgs) -> Any:
    """The Hugging Face config of `--model_name`. Raises: UsageError when there is none, or it is a reward model's."""
    from transformers import AutoConfig

    quiet_libraries()
    name = args.model_name or ""
    if size := re.fullmatch(r"([\d.]+)([MB])", name):
        return llama_of(float(size[1]) * UNITS[size[2]])
    source = base_name(resolve(name), "--model_name") or name
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as problem:
        raise UsageError(f"--model_name {name}: {first_line(problem)}") from None
    if holds_reward_model(source):
        raise UsageError(f"--model_name {name} is a reward model; give the language model it was trained from")
    return config


def bits_of(args: EstimateArgs, config: Any) -> int | None:
    """Bits of the frozen weights, None for float32: those of the flags, or in which they were saved.

    Raises: UsageError when all weights are to be trained, but were saved quantised.
    """
    if args.load_in_4bit or args.load_in_8bit:
        return 4 if args.load_in_4bit else 8
    settings = config.to_dict().get("quantization_config") or {}
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    if bits and args.finetune_mode != "lora":
        raise UsageError(
            f"--finetune_mode {args.finetune_mode}: the weights of {args.model_name} were saved in {bits} bits and "
            "cannot be trained; use --finetune_mode lora"
        )
    return bits


def out_and_in(layer: Any) -> tuple[int, int]:
    """Output and input width of a linear layer; the weights of GPT-2 are transposed."""
    out, width = layer.weight.shape
    return (width, out) if type(layer).__name__ == "Conv1D" else (out, width)


def llama_of(parameters: float) -> Any:
    """The config of a Llama of about this many parameters, with a width of 128 per layer, as from 1B to 70B."""
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
    """Numbers per token that a layer stores for its backward pass.

    The output of every linear layer; twice the widest, for the activation function's output and the gated product; two
    norms with their inputs; the residual sums.
    """
    outputs = sum(shape[0] for shape in linear) // layers
    widest = max(max(shape) for shape in linear)
    return outputs + 2 * widest + 4 * hidden


def estimate(args: EstimateArgs, shape: dict[str, Any]) -> dict[str, float]:
    """Bytes of each part, and `peak`: weights, optimiser, and the larger of an update and a rollout."""
    has_lora = args.finetune_mode == "lora"
    models = 1 if has_lora and args.share_backbone else MODELS[args.algorithm]
    learners = 2 if args.algorithm == "ppo" else 1
    one_model = QUANTISED.get(shape["bits"], FLOAT) * shape["linear"] + FLOAT * (shape["parameters"] - shape["linear"])
    if args.base_dtype == "bfloat16":
        one_model = 2 * shape["parameters"]
    trainable = {"all": shape["parameters"], "last_layer": shape["last_layer"], "lora": shape["adapter"]}
    learning = learners * trainable[args.finetune_mode]
    number = FLOAT if args.precision == "32-true" else 2
    rows = args.micro_batch_size * (2 if args.algorithm in ("rm", "dpo") else 1)
    tokens = rows * args.sequence_length
    numbers = shape["hidden"] * shape["layers"] + shape["stored"]  # one layer at a time is recomputed
    if not args.activation_checkpointing:
        numbers = shape["stored"] * shape["layers"]
    if args.finetune_mode == "last_layer":
        numbers = shape["stored"]
    logits = 0 if args.algorithm == "rm" else 3 * FLOAT * min(tokens, CHUNK) * shape["vocabulary"]
    parts: dict[str, float] = {
        "weights": models * one_model + (FLOAT * learning if has_lora else 0),
        "gradients": FLOAT * learning,
        "optimizer": OPTIMIZER_BYTES[args.optimizer] * learning,
        "activations": number * tokens * numbers + logits,
        "cache": 0,
    }
    if args.algorithm in ("ppo", "grpo"):
        columns = args.rollout_mini_batch_size * max(args.sequence_length, args.max_new_tokens)
        parts["cache"] = number * columns * shape["cache"] * shape["layers"]
    parts["peak"] = (
        parts["weights"] + parts["optimizer"] + max(parts["gradients"] + parts["activations"], parts["cache"])
    )
    return parts


def show(args: EstimateArgs, parts: dict[str, float]) -> None:
    """Print the parts as a table."""
    lines: list[list[str] | None] = [[name, f"{size / 2**30:.2f}"] for name, size in parts.items()]
    title = f"{args.algorithm} of {args.model_name}, --finetune_mode {args.finetune_mode}"
    print_table(title, ["part", "GiB"], [*lines[:-1], None, lines[-1]])


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the program; returns the bytes of each part."""
    return run(parse(EstimateArgs, argv))


if __name__ == "__main__":
    main()
