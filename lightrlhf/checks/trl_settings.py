"""The settings of TRL's trainers in our names, for the steps that `lightrlhf.checks.trl` writes.

A loss that the checks cannot recompute gets a name that they do not know, so that they say that they cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrlhf.checks.capture import dropout_of
from lightrlhf.maths.policy_losses import SAPO_TEMPERATURES

LOSSES = {  # loss_type of TRL: ours, and its aggregation
    "grpo": ("clip", "sequence"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "constant"),
    "dapo": ("clip", "token"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
}
PLAIN_SFT = ("nll", "chunked_nll")  # one formula
OF_STEP = ("cispo", "dapo")  # whose tokens are divided by the tokens of the step
SCALES = {"group": "std", "batch": "batch_std", "none": "mean", "True": "std", "False": "mean"}
SIGNS = ("pos", "neg")  # of advantages
PAIR_LOSSES = {"aot_unpaired": "aot_pair"}  # others have our names
PLAIN = {  # settings of DPO that leave the losses of `maths.preference` as they are; None: not set
    "f_divergence_type": ("reverse_kl", "FDivergenceType.REVERSE_KL"),
    "ld_alpha": (None,),
    "use_weighting": (False, None),
    "rpo_alpha": (None,),
    "reference_free": (False, None),
    "loss_weights": (None,),
    "base_model_attribute_name": ("model", None),
}


def shared(trainer: Any) -> dict[str, Any]:
    """Settings of all trainers."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    ends = getattr(trainer, "eos_token_ids", None)  # of the model's generation config, where a version reads them
    config: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id if ends is None else [int(one) for one in ends]}
    start = getattr(tokenizer, "bos_token_id", None)
    if start is not None and start not in (tokenizer.eos_token_id, getattr(tokenizer, "pad_token_id", None)):
        config["bos_token_id"] = start
    config["dtype"] = str(getattr(trainer.model, "dtype", "float32")).removeprefix("torch.")
    flags = vars(trainer.args)
    for half in ("bfloat16" if flags.get("bf16") else "", "float16" if flags.get("fp16") else ""):
        config["dtype"] = half or config["dtype"]
    modules = hasattr(trainer.model, "modules")
    config["dropout"] = dropout_of(trainer.model) if modules else 0.0
    return config


def of_grpo(trainer: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a generation, or with inputs of a pass."""
    flags, config = vars(trainer.args), shared(trainer)
    config |= {"method": "grpo", "max_new_tokens": flags["max_completion_length"], "temperature": flags["temperature"]}
    config |= {"top_p": flags["top_p"], "top_k": flags["top_k"], "min_p": flags.get("min_p")}
    config["mask_truncated"] = flags.get("mask_truncated_completions", False)
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


def of_sft(trainer: Any) -> dict[str, Any]:
    """The settings of a step of `SFTTrainer`; its labels say what is trained."""
    flags, config = vars(trainer.args), shared(trainer)
    config |= {"method": "sft", "aggregation": "token"}
    changed = flags.get("loss_type", "nll") not in PLAIN_SFT or flags.get("label_smoothing_factor")
    if (
        changed
        or getattr(trainer, "aux_loss_enabled", False)
        or getattr(trainer, "compute_loss_func", None) is not None
    ):
        config["loss_type"] = f"{flags.get('loss_type', 'nll')} with corrections"
    config["packed"] = bool(flags.get("packing") or flags.get("padding_free"))
    if flags.get("neftune_noise_alpha"):
        config["dropout"] = 1.0  # noise in the embeddings
    return config | {"eos_token_id": ends_of_texts(trainer)}


def ends_of_texts(trainer: Any) -> list[int]:
    """End tokens that a template may write: the tokenizer's, and the model's, as at the end of Gemma's turns."""
    given = [
        shared(trainer)["eos_token_id"],
        getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None),
    ]
    found = [one for them in given for one in (them if isinstance(them, list) else [them]) if one is not None]
    return [*dict.fromkeys(found)]


def of_dpo(trainer: Any) -> dict[str, Any]:
    """The settings of a step of `DPOTrainer`."""
    flags, config = vars(trainer.args), shared(trainer)
    kinds = flags["loss_type"] if isinstance(flags["loss_type"], list) else [flags["loss_type"]]
    kind = PAIR_LOSSES.get(kinds[0], kinds[0])
    config |= {"method": "dpo", "beta": flags["beta"], "label_smoothing": flags.get("label_smoothing") or 0.0}
    plain = all(flags.get(name, usual[0]) in usual or str(flags[name]) in usual for name, usual in PLAIN.items())
    if len(kinds) > 1 or not plain or getattr(trainer, "aux_loss_enabled", False):
        kind = "+".join(kinds) + " with corrections"
    return config | {
        "loss_type": kind,
        "packed": bool(flags.get("padding_free")),
        "eos_token_id": ends_of_texts(trainer),
    }
