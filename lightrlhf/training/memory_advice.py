"""Advice on running out of memory: which flags lower the memory of a phase, and by how much."""

from __future__ import annotations

import re

import torch

from lightrlhf.cli.groups import TrainArgs


def is_out_of_memory(problem: Exception) -> bool:
    """Whether an allocation failed, on a device or on the CPU (where torch raises a plain RuntimeError)."""
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(problem)


def memory_advice(
    args: TrainArgs, phase: str, problem: Exception, trainable: int, world_size: int, device: torch.device
) -> str:
    """What was requested, what is in use, and up to three flags that lower the memory of this phase."""
    requested, held = allocation(problem), ""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = f", {gib(torch.cuda.memory_allocated(device))} of {gib(total)} are in use"
    flags = memory_flags(args, phase, requested, trainable, world_size)
    return f"{gib(requested)} more were requested{held}; what helps: {', '.join(flags)}"


def allocation(problem: Exception) -> float:
    """Bytes that an out-of-memory error says were requested; 0 when it does not say."""
    found = re.search(r"allocate (?:memory: you tried to allocate )?([\d.]+) (bytes|[KMGT]iB)", str(problem))
    units = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
    return float(found[1]) * 1024 ** units[found[2]] if found else 0.0


def memory_flags(args: TrainArgs, phase: str, wanted: float, learning: int, world_size: int) -> list[str]:
    """Up to three flags that lower the memory of a phase, each with what it would save.

    wanted: bytes of the allocation that failed; learning: parameters with gradients, whose weight, gradient and two
    moments take 16 bytes in float32.
    """
    flags = []
    longest: int = getattr(args, "max_new_tokens", 1)
    samples = hasattr(args, "rollout_mini_batch_size") and phase in ("rollout", "score", "resample", "evaluation")
    size = "rollout_mini_batch_size" if samples else "micro_batch_size"
    half = getattr(args, size) // 2
    if phase != "setup" and half:
        flags.append(f"--{size} {half} (that allocation becomes {gib(wanted / 2)})")
    if samples and longest > 1:
        flags.append(f"--max_new_tokens {longest // 2} (at best half of it too)")
    if getattr(args, "activation_checkpointing", True) is False and phase == "update":
        flags.append("--activation_checkpointing True (activations of one layer at a time, a third more compute)")
    if getattr(args, "finetune_mode", "lora") == "all" and learning:
        flags.append(f"--finetune_mode lora (saves {gib(12 * learning)} of gradients and moments)")
    if getattr(args, "finetune_mode", "all") == "lora" and getattr(args, "base_dtype", "bfloat16") == "float32":
        flags.append("--base_dtype bfloat16 (half of the frozen weights)")
    if args.optimizer in ("AdamW", "Adam") and args.strategy in ("auto", "ddp") and learning:
        flags.append(f"--optimizer AdamW8bit (saves {gib(6 * learning)} of moments)")
    if args.strategy != "fsdp":
        ranks = max(world_size, 2)
        flags.append(f"--strategy fsdp --devices {ranks} (saves {gib(16 * learning * (1 - 1 / ranks))} on each)")
    if args.precision == "32-true":
        flags.append("--precision bf16-mixed (about half of the activations)")
    return flags[:3]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
