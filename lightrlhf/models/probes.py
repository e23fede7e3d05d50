"""Probes: forward passes on a few tokens that show what an architecture supports.

Prefix sharing and packing rely on attention masks of their own, which some architectures ignore or reject.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.splits import Row, longest_text
from lightrlhf.models.roles import Policy, ScalarModel, inference


def share_prefixes(role: Policy | ScalarModel, longest: int) -> None:
    """From now on what the two texts of a pair begin with is read once, if this architecture allows it: it is tried.

    longest: tokens of the longest text. Our mask knows no sliding window, so none may be longer than one; GPT-Neo looks
    back by columns, of which a pair has up to twice as many.
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

    def found(paired: bool) -> Tensor:
        if isinstance(role, Policy):
            return role(ids, mask, mask[:, 1:], paired=paired).logprobs
        return torch.where(mask, role(ids, mask, paired=paired), 0.0)

    with inference(role):
        alone = found(paired=False)
        role.shares_prefixes = True
        try:
            together, atol = found(paired=True), 0.02 if role.model.dtype != torch.float32 else 1e-4
            role.shares_prefixes = torch.allclose(alone, together, atol=atol)
        except (ValueError, RuntimeError):  # this architecture takes no mask of its own making
            role.shares_prefixes = False


def check_packing(policy: Policy, name: str, longest: int = 0) -> None:
    """Raises: UsageError when two packed examples do not score as they do alone on this architecture.

    longest: tokens of the longest example. Our mask of packed rows knows no sliding window, so none may be shorter.
    """
    kind = policy.model.config.model_type
    window = getattr(policy.model.config, "sliding_window", None)
    if window and longest > window:
        raise UsageError(
            f"--packing True: {name} ({kind}) looks back {window} tokens and the longest row has {longest}; "
            "use --packing False"
        )
    device = next(policy.parameters()).device
    ids = torch.arange(2, 14, device=device).remainder(policy.model.config.vocab_size)[None]  # (1, 12)
    sequence_ids = torch.tensor([[1] * 7 + [2] * 5], device=device)
    action_mask = torch.ones(1, 11, dtype=torch.bool, device=device)
    with inference(policy):
        alone = torch.cat([policy(part, part >= 0, part[:, 1:] >= 0).logprobs for part in ids.split([7, 5], 1)], 1)
        try:
            packed = policy(ids, ids >= 0, action_mask, sequence_ids).logprobs[:, [*range(6), *range(7, 11)]]
        except (ValueError, RuntimeError) as problem:  # positions by ALiBi are made from a plain mask
            raise UsageError(
                f"--packing True: {name} ({kind}) takes no mask of packed rows ({first_line(problem)}); "
                "use --packing False"
            ) from None
    if not torch.allclose(alone, packed, atol=0.02 if policy.model.dtype != torch.float32 else 1e-3):
        raise UsageError(
            f"--packing True: {name} ({kind}) lets packed examples see each other "
            f"(log-probabilities differ by {(alone - packed).abs().max():.3f}); use --packing False"
        )


def check_positions(rows: list[Row], module: Policy | ScalarModel, where: str) -> None:
    """Raises: UsageError when a row is longer than the model has positions."""
    room = getattr(module.model.config, "max_position_embeddings", None)
    longest = longest_text(rows)
    if room and longest > room:
        raise UsageError(
            f"{where} holds a row of {longest} tokens, but the model has {room} positions; "
            f"prepare the data again with --max_length {room}"
        )
