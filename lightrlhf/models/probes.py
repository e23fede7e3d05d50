"""Probes: trial forward passes on a few tokens that show what an architecture supports.

Prefix sharing and packing rely on custom attention masks, which some architectures ignore or reject.

Left out: a list of supported architectures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.splits import Row, longest_text
from lightrlhf.models.roles import Policy, ScalarModel, inference


def share_prefixes(role: Policy | ScalarModel, longest: int) -> None:
    """Enables prefix sharing for pairs if a trial forward pass shows that the architecture supports it.

    longest: tokens of the longest text. The mask of packed pairs ignores sliding windows, so no text may exceed one;
    GPT-Neo's window counts columns, of which a packed pair has up to twice as many.
    """
    config = role.model.config
    windows = [(getattr(config, "sliding_window", None), longest), (getattr(config, "window_size", None), 2 * longest)]
    if any(window and needed > window for window, needed in windows):
        return
    device = next(role.model.parameters()).device
    ids = torch.arange(2, 14, device=device).remainder(config.vocab_size).expand(2, -1).clone()  # (2, 12)
    ids[1, 8:] = ids[0, :4]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 10:] = False

    def outputs(paired: bool) -> Tensor:
        if isinstance(role, Policy):
            return role(ids, mask, mask[:, 1:], paired=paired).logprobs
        return torch.where(mask, role(ids, mask, paired=paired), 0.0)

    with inference(role):
        separate, atol = outputs(paired=False), 0.02 if role.model.dtype != torch.float32 else 1e-4
        role.shares_prefixes = True
        try:
            role.shares_prefixes = torch.allclose(separate, outputs(paired=True), atol=atol)
        except (ValueError, RuntimeError):  # this architecture rejects custom masks
            role.shares_prefixes = False


def check_packing(policy: Policy, name: str, longest: int = 0) -> None:
    """Check by a trial forward pass that packing does not change log-probabilities. Raises: UsageError.

    longest: tokens of the longest example. The mask of packed rows ignores sliding windows, so none may be shorter.
    """
    kind = policy.model.config.model_type
    window = getattr(policy.model.config, "sliding_window", None)
    if window and longest > window:
        raise UsageError(
            f"--packing True: the sliding window of {name} ({kind}) has {window} tokens and the longest row {longest}; "
            "use --packing False"
        )
    device = next(policy.parameters()).device
    ids = torch.arange(2, 14, device=device).remainder(policy.model.config.vocab_size)[None]  # (1, 12)
    sequence_ids = torch.tensor([[1] * 7 + [2] * 5], device=device)
    action_mask = torch.ones(1, 11, dtype=torch.bool, device=device)
    with inference(policy):
        separate = torch.cat([policy(part, part >= 0, part[:, 1:] >= 0).logprobs for part in ids.split([7, 5], 1)], 1)
        try:
            packed = policy(ids, ids >= 0, action_mask, sequence_ids).logprobs[:, [*range(6), *range(7, 11)]]
        except (ValueError, RuntimeError) as problem:  # ALiBi derives positions from a plain mask
            raise UsageError(
                f"--packing True: {name} ({kind}) rejects the mask of packed rows ({first_line(problem)}); "
                "use --packing False"
            ) from None
    if not torch.allclose(separate, packed, atol=0.02 if policy.model.dtype != torch.float32 else 1e-3):
        raise UsageError(
            f"--packing True: in {name} ({kind}) packed examples attend to each other "
            f"(log-probabilities differ by {(separate - packed).abs().max():.3f}); use --packing False"
        )


def check_positions(rows: list[Row], module: Policy | ScalarModel, where: str) -> None:
    """Check that each row fits into the model's positions. Raises: UsageError."""
    limit = getattr(module.model.config, "max_position_embeddings", None)
    longest = longest_text(rows)
    if limit and longest > limit:
        raise UsageError(
            f"{where} holds a row of {longest} tokens, but the model has {limit} positions; "
            f"prepare the data again with --max_length {limit}"
        )
