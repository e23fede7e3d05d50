"""Peak memory of each algorithm on the device beside the figure of `lightrlhf.estimate`, on random weights.

Texts fill their length, so that a step's largest pass is the estimate's. Peaks are of torch's allocator, from before
the model is made. The runs score by a function, so a reward model is taken off the estimate.
"""

from collections.abc import Callable
from typing import Any

import torch

from lightrlhf.estimate import FLOAT, EstimateArgs, build, estimate
from tests.gpu.setting import Figures, LeftOut, Row, Setting, config, free, model, needs_memory
from tests.gpu.speed import PROGRAMS, freed, pairs, prompts, texts, train

GIB = 2**30
SETTINGS = {  # size of the model, flags of run and estimate, GiB of the card that it takes at least
    "0.5B": ("0.5B", {"finetune_mode": "all"}, 2, 16),
    "7B LoRA": ("7B", {"finetune_mode": "lora", "base_dtype": "bfloat16", "activation_checkpointing": True}, 1, 22),
}


def peak(algorithm: str, setting: str) -> Callable[[Setting], Figures]:
    def row(at: Setting) -> Figures:
        size, flags, micro, least = SETTINGS[setting]
        needs_memory(at, least)
        length, new = (16, 4) if at.is_tiny else (512, 128)
        expected = estimated(at, algorithm, size, flags, micro, length, new)
        if at.is_cuda and expected > torch.cuda.get_device_properties(0).total_memory - GIB:
            raise LeftOut(f"the estimate is {expected / GIB:.1f} GiB")
        free()
        whole = model(at, size, torch.bfloat16 if "base_dtype" in flags else torch.float32)
        if algorithm == "rm" and flags["finetune_mode"] == "all":
            expected += sum(p.nbytes for p in whole.parameters())  # a model given from Python lives on
        made, given = run_of(algorithm, whole.config.vocab_size, micro, length, new)
        train(at, algorithm, whole, given, **flags, **made)
        if not at.is_cuda:
            return {"estimate": expected, "shown": f"estimate {expected / GIB:.2f} GiB; only a card has such a peak"}
        found = torch.cuda.max_memory_allocated()
        shown = f"{found / GIB:.2f} GiB, estimate {expected / GIB:.2f} ({expected / found - 1:+.1%})"
        return {"peak": found, "reserved": torch.cuda.max_memory_reserved(), "estimate": expected, "shown": shown}

    return row


def run_of(
    algorithm: str, vocabulary: int, micro: int, length: int, new: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Flags and rows of a run, each step of two passes, so that the second finds gradients in memory."""
    flags: dict[str, Any] = {"micro_batch_size": micro, "mini_batch_size": 2 * micro}
    if algorithm in ("grpo", "ppo"):
        flags |= {"max_new_tokens": new, "rollout_size": 2 * micro, "rollout_mini_batch_size": 8}
        if algorithm == "grpo":
            flags |= {"num_generations": 4, "rollout_size": 2, "mini_batch_size": 8}
        return flags, prompts(vocabulary, flags["rollout_size"], length - new)
    make = texts if algorithm == "sft" else pairs
    rows = make(vocabulary, 2 * micro, length)
    keys = [key for key in rows[0] if key.endswith(("input_ids", "targets"))]
    generator = torch.Generator().manual_seed(2)
    for row in rows:
        for key in keys:
            row[key] = torch.randint(2, vocabulary, (length,), generator=generator)
        row["prompt_len"] = 1
        if "targets" in row:
            row["targets"] = row["input_ids"].clone()
        else:
            row["rejected_input_ids"][0] = row["chosen_input_ids"][0]
    return flags, rows


def estimated(
    at: Setting, algorithm: str, size: str, flags: dict[str, Any], micro: int, length: int, new: int
) -> float:
    """Bytes at the peak, less a reward model that has a base of its own."""
    options: dict[str, Any] = {"micro_batch_size": micro, "sequence_length": length, "precision": "bf16-mixed"}
    options |= {"max_new_tokens": new, "rollout_mini_batch_size": 8, "num_generations": 4}
    options |= {"accelerator": "cpu" if at.device == "cpu" else "cuda"}
    args = EstimateArgs(algorithm=algorithm, model_name="1B", **options, **flags)  # the config has the sizes
    found = estimate(args, config(at, size))["peak"]
    if algorithm in ("grpo", "ppo") and flags["finetune_mode"] == "all":
        body = build(args, config(at, size))[0].base_model
        found -= FLOAT * (sum(p.numel() for p in body.parameters()) + body.config.hidden_size)
    return found


ROWS = {
    f"memory {setting} {algorithm}": Row("memory", freed(peak(algorithm, setting)), 20 if setting == "0.5B" else 40)
    for setting in SETTINGS
    for algorithm in PROGRAMS
}
