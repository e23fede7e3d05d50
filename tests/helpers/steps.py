"""Steps of a trainer in numbers, clean, for tests that plant one fault."""

import numpy as np
import torch

from lightrlhf.maths import groups, ops, policy_losses, preference

EOS, PAD, BOS = 1, 0, 2
GROUPS, SIZE, PROMPT, RESPONSE = 4, 4, 3, 6  # prompts, their members, and lengths


def float32(values: torch.Tensor) -> np.ndarray:
    return values.detach().float().numpy()


def policy_step(seed: int = 0, *, aggregation: str = "token", advantage: str = "std", first_pass: bool = False):
    """(arrays, config) of a clean step of GRPO, computed in float32 as trainers do."""
    made = torch.Generator().manual_seed(seed)
    rows, width = GROUPS * SIZE, PROMPT + RESPONSE
    ids = torch.randint(3, 50, (rows, width), generator=made)
    ids[:, :PROMPT] = ids[:, :PROMPT].view(GROUPS, SIZE, PROMPT)[:, :1].expand(-1, SIZE, -1).reshape(rows, PROMPT)
    lengths = torch.randint(2, RESPONSE + 1, (rows,), generator=made)
    place = torch.arange(width)[None]
    mask = (place >= PROMPT) & (place < PROMPT + lengths[:, None])
    truncated = torch.arange(rows) % 5 == 0
    lengths[truncated] = RESPONSE
    mask = (place >= PROMPT) & (place < PROMPT + lengths[:, None])
    last = place == PROMPT + lengths[:, None] - 1
    ids[last & ~truncated[:, None]] = EOS
    attended = (place < PROMPT) | mask
    ids[~attended] = PAD
    noise = torch.rand(3, rows, width, generator=made)
    old = torch.where(mask, -1 - 3 * noise[0], 0.0)
    new = old if first_pass else torch.where(mask, old + noise[1] - 0.5, 0.0)
    ref = torch.where(mask, old + 0.4 * noise[2] - 0.3, 0.0)
    group = torch.arange(rows) // SIZE
    rewards = torch.rand(rows, generator=made)
    moments = groups.group_moments(rewards, group, GROUPS)
    by_row = groups.group_advantages(rewards, moments, groups.ADVANTAGES[advantage])
    new = new.clone().requires_grad_()
    weights = policy_losses.token_weights(mask, group, GROUPS, aggregation, RESPONSE)
    losses = policy_losses.clip_loss(new, new - old, by_row[:, None], mask, 0.2, 0.28)
    losses = losses + 0.05 * ops.kl_k3(new, ref)
    loss = torch.where(mask, weights * losses, 0.0).sum()
    (slopes,) = torch.autograd.grad(loss, new)
    arrays = {"input_ids": ids.numpy(), "attention_mask": attended.numpy(), "loss_mask": mask.numpy()}
    arrays |= {"truncated": truncated.numpy(), "prompt_len": np.full(rows, PROMPT), "group": group.numpy()}
    arrays |= {"old_logprobs": float32(old), "new_logprobs": float32(new), "ref_logprobs": float32(ref)}
    arrays |= {"rewards": float32(rewards), "advantages": float32(by_row), "loss": float32(loss)}
    arrays |= {"loss_slopes": float32(slopes), "kl": float32(torch.where(mask, ops.kl_k3(new, ref), 0.0))}
    arrays["micro_batch"] = np.arange(rows) // 3
    config = {"method": "grpo", "loss_type": "clip", "clip_low": 0.2, "clip_high": 0.28, "advantage": advantage}
    config |= {"aggregation": aggregation, "kl_coeff": 0.05, "kl_estimator": "k3", "max_new_tokens": RESPONSE}
    config |= {"eos_token_id": EOS, "bos_token_id": BOS, "num_generations": SIZE, "first_pass": first_pass}
    return arrays, config


def pair_step(seed: int = 0, loss_type: str = "sigmoid"):
    """(arrays, config) of a clean step of DPO: the chosen rows, then the rejected ones."""
    arrays, config = policy_step(seed)
    half = len(arrays["input_ids"]) // 2
    arrays = {name: arrays[name] for name in ("input_ids", "attention_mask", "loss_mask", "prompt_len")}
    arrays["input_ids"] = arrays["input_ids"].copy()
    arrays["input_ids"][half:, :PROMPT] = arrays["input_ids"][:half, :PROMPT]
    made = torch.Generator().manual_seed(seed + 1)
    new, ref = (-1 - 3 * torch.rand(2 * half, PROMPT + RESPONSE, generator=made) for _ in range(2))
    arrays |= {"new_logprobs": float32(new), "ref_logprobs": float32(ref)}
    return with_pair_loss(arrays, {"method": "dpo", "loss_type": loss_type, "beta": 0.1})


def with_pair_loss(arrays, config, mask=None, **changes):
    """The same with the loss of its pairs, or of changed ones."""
    mask = torch.from_numpy(arrays["loss_mask"] if mask is None else mask)
    half = len(mask) // 2
    new, ref = (torch.from_numpy(arrays[name]) for name in ("new_logprobs", "ref_logprobs"))
    sums = [torch.where(mask, values, 0.0).sum(1) for values in (new, ref)]
    pairs = preference.Pairs(
        **{
            "policy_chosen_logps": sums[0][:half],
            "policy_rejected_logps": sums[0][half:],
            "ref_chosen_logps": sums[1][:half],
            "ref_rejected_logps": sums[1][half:],
            "beta": config["beta"],
            "chosen_lengths": mask.sum(1)[:half].float(),
            "rejected_lengths": mask.sum(1)[half:].float(),
        }
        | changes
    )
    return arrays | {"loss": float32(preference.LOSSES[config["loss_type"]](pairs).mean())}, config


def sft_step(seed: int = 0):
    """(arrays, config) of a clean step of SFT."""
    arrays, _ = policy_step(seed)
    arrays = {name: arrays[name] for name in ("input_ids", "attention_mask", "loss_mask", "micro_batch", "prompt_len")}
    logprobs = -1 - 3 * torch.rand(arrays["input_ids"].shape, generator=torch.Generator().manual_seed(seed + 2))
    arrays["new_logprobs"] = float32(logprobs)
    mask = torch.from_numpy(arrays["loss_mask"])
    return arrays | {"loss": float32(-logprobs[mask].mean())}, {"method": "sft", "eos_token_id": EOS}
