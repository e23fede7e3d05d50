"""A recorder for TRL's trainers: one line writes steps that `lightrlhf check_run` reads.

    record(trainer, "steps")  # before trainer.train()

Wraps methods of the trainer, for a callback never sees inputs. Of `GRPOTrainer` it writes each generation (ids, masks,
the rewards of each function, advantages) and each pass (log-probabilities, the loss and its derivative by them). It
reads what the trainer does: inputs, results and settings.

Left out: other trainers of TRL, several processes, and images. Run with TRL 1.16, not with earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrlhf.maths.policy_losses import SAPO_TEMPERATURES

LOSSES = {  # loss_type of TRL: ours, and its aggregation
    "grpo": ("clip", "sequence"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "constant"),
    "dapo": ("clip", "token"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
}
OF_STEP = ("cispo", "dapo")  # whose tokens are divided by the tokens of the step
SCALES = {"group": "std", "batch": "batch_std", "none": "mean", "True": "std", "False": "mean"}
COPIED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
)
SIGNS = ("pos", "neg")  # of advantages
HALF_DIGITS = 3  # of bfloat16 and float16


def record(trainer: Any, folder: str | Path, most: int = 16) -> None:
    """Write the first `most` generations and passes to a folder. Raises: ValueError for another trainer."""
    if not hasattr(trainer, "_generate_and_score_completions"):
        raise ValueError(f"{type(trainer).__name__} is not a GRPOTrainer; write its steps by numpy.savez")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    counts = {"generation": 0, "pass": 0}
    rewards: list[Tensor] = []
    score, generate = trainer._calculate_rewards, trainer._generate_and_score_completions
    read, compute_loss = trainer._get_per_token_logps_and_entropies, trainer.compute_loss
    passes: list[Tensor] = []

    def calculate_rewards(*given: Any, **options: Any) -> Any:
        rewards[:] = [score(*given, **options)]
        return rewards[0].clone()

    def generate_and_score(*given: Any, **options: Any) -> Any:
        output = generate(*given, **options)
        save("generation", inputs=output, config=settings(trainer), more={"rewards": rewards[0]})
        return output

    def logps_and_entropies(*given: Any, **options: Any) -> Any:
        output = read(*given, **options)
        found = output[0] if isinstance(output, tuple) else output["logps"]  # a dict until TRL 0.17
        if found.requires_grad:
            passes[:] = [found]
        return output

    def loss_of(model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        passes.clear()
        loss = compute_loss(model, inputs, *given, **options)
        if passes and loss.requires_grad:
            (slopes,) = torch.autograd.grad(loss, passes[0], retain_graph=True)
            more = {"new_logprobs": passes[0], "loss_slopes": slopes, "loss": loss}
            save("pass", inputs=inputs, config=settings(trainer, inputs), more=more)
        return loss

    def save(kind: str, inputs: Mapping[str, Any], config: dict[str, Any], more: Mapping[str, Tensor]) -> None:
        if counts[kind] < most:
            counts[kind] += 1
            write_step(place / f"{kind}-{counts[kind]:06}.npz", inputs, config, more)

    replaced: dict[str, Callable[..., Any]] = {
        "_calculate_rewards": calculate_rewards,
        "_generate_and_score_completions": generate_and_score,
        "_get_per_token_logps_and_entropies": logps_and_entropies,
        "compute_loss": loss_of,
    }
    for name, function in replaced.items():
        setattr(trainer, name, function)


def write_step(path: Path, inputs: Mapping[str, Any], config: dict[str, Any], more: Mapping[str, Tensor]) -> None:
    """Write tensors of TRL's inputs, and others, as a step."""
    given = {name: inputs[name] for name in COPIED if inputs.get(name) is not None} | dict(more)
    mask, tools = inputs["completion_mask"], inputs.get("tool_mask")
    given["loss_mask"] = mask if tools is None else mask * tools
    if any(one.dtype in (torch.bfloat16, torch.float16) for one in given.values()):
        config = config | {"digits": HALF_DIGITS}
    arrays = {name: value.detach().cpu() for name, value in given.items()}
    arrays = {name: value.float() if value.is_floating_point() else value for name, value in arrays.items()}
    np.savez(path, **{name: value.numpy() for name, value in arrays.items()}, config=json.dumps(config))


def settings(trainer: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a generation, or with inputs of a pass, in our names."""
    flags, tokenizer = vars(trainer.args), trainer.processing_class
    config = {"method": "grpo", "max_new_tokens": flags["max_completion_length"], "temperature": flags["temperature"]}
    config |= {"top_p": flags["top_p"], "top_k": flags["top_k"], "min_p": flags.get("min_p")}
    ends = getattr(trainer, "eos_token_ids", None)  # of the model's generation config, where a version reads them
    config["eos_token_id"] = tokenizer.eos_token_id if ends is None else [int(one) for one in ends]
    config["mask_truncated"] = flags.get("mask_truncated_completions", False)
    config["dtype"] = str(getattr(trainer.model, "dtype", "float32")).removeprefix("torch.")
    if inputs is None:
        of_eval = None if getattr(trainer.model, "training", True) else flags.get("num_generations_eval")
        config["num_generations"] = of_eval or flags["num_generations"]
        way = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
        config["advantage"] = SCALES[str(flags["scale_rewards"])] if way == "sum_then_normalize" else way
        return config | {"reward_weights": trainer.reward_weights.tolist()}
    kind, config["aggregation"] = LOSSES.get(trainer.loss_type, (trainer.loss_type, trainer.loss_type))
    config |= {"loss_type": kind, "clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high}
    if kind == "cispo":  # TRL's bound is of the ratio itself, and has no lower one
        config |= {"clip_low": 1.0, "clip_high": trainer.epsilon_high - 1}
    config["importance_sampling_level"] = flags["importance_sampling_level"]
    config |= {"kl_coeff": trainer.beta, "kl_estimator": "k3", "kl_placement": "loss"}
    config["kl_estimator"] += " weighted" if flags.get("use_bias_correction_kl") else ""
    accumulated = getattr(trainer, "current_gradient_accumulation_steps", 1)
    if trainer.loss_type in OF_STEP:
        config["num_items"] = float(inputs["num_items_in_batch"]) * accumulated / flags["steps_per_generation"]
    else:
        config["passes"] = accumulated
    if "old_per_token_logps" not in inputs:
        config["first_pass"] = True
    if getattr(trainer, "_entropy_bonus_enabled", False):
        config["entropy_coeff"] = 1.0
    corrected = getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False)
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    masked = getattr(trainer, "off_policy_mask_threshold", None) is not None or quantile < 1.0
    temperatures = tuple(flags.get(f"sapo_temperature_{sign}", own) for sign, own in zip(SIGNS, SAPO_TEMPERATURES))
    softer = kind == "sapo" and temperatures != SAPO_TEMPERATURES
    routed = getattr(trainer, "aux_loss_enabled", False)  # adds the loss of a mixture of experts
    if corrected or masked or softer or routed or flags.get("delta") is not None:
        config["loss_type"] = f"{trainer.loss_type} with corrections"
    return config
