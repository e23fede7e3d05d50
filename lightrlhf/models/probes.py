"""Probes: trial forward passes on a few tokens that show what an architecture supports.

Prefix sharing and packing rely on custom attention masks, which some architectures ignore or reject, and of which
convolutions, state spaces and recurrences know nothing. In a model of small initial weights a leak hardly changes the
outputs, and still turns gradients round. So the outputs of every module are compared with those of the texts alone,
each by its own size.

Left out: a list of supported architectures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.splits import Row, longest_text
from lightrlhf.models.roles import Policy, ScalarModel, inference, is_close, trial_ids

Outputs = dict[str, list[Tensor]]  # of modules, by name


def share_prefixes(role: Policy | ScalarModel, longest: int, group_size: int = 2) -> None:
    """Enables prefix sharing in groups if trial forward passes show that the architecture supports it.

    longest: tokens of the longest text. The mask of packed groups ignores sliding windows, so no text may exceed one;
    GPT-Neo's window counts columns, of which a packed group has up to `group_size` times as many. Flash attention
    cannot be given the mask.
    """
    if role.model.config._attn_implementation == "flash_attention_2":
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("--attn_implementation flash_attention_2: common prefixes are not shared, for it takes no such mask")
        return
    config, columns = role.model.config, group_size * longest
    windows = [(getattr(config, "sliding_window", None), longest), (getattr(config, "window_size", None), columns)]
    if any(window and needed > window for window, needed in windows):
        return
    ids = trial_ids(role.model, 11).repeat(3, 1)  # (3, 11); packed: 8 common tokens, then 2, 3 and 1 of the texts
    ids[1, 8:], ids[2, 8:] = ids[0, :3], ids[0, 3:6]
    mask = torch.arange(11, device=ids.device) < torch.tensor([[10], [11], [9]], device=ids.device)
    places = [*range(10)], [*range(8), 10, 11, 12], [*range(8), 13]  # columns of each text when packed
    texts = [(ids[i : i + 1, : len(columns)], columns) for i, columns in enumerate(places)]
    group = torch.zeros(3, dtype=torch.int64, device=ids.device)

    def outputs(ids: Tensor, mask: Tensor, group: Tensor | None = None) -> Tensor:
        if isinstance(role, Policy):
            return role(ids, mask, mask[:, 1:], group=group).logprobs
        return torch.where(mask, role(ids, mask, group=group), 0.0)

    with inference(role):
        separate = outputs(ids, mask)
        alone = [(_modules(role, partial(outputs, text, text >= 0)), columns) for text, columns in texts]
        role.shares_prefixes = True
        try:
            packed = _modules(role, lambda: outputs(ids, mask, group))
            close = is_close(outputs(ids, mask, group), separate, role.model)
            role.shares_prefixes = close and not _difference(role, packed, 14, alone)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # this architecture rejects custom masks, each in a way of its own
            role.shares_prefixes = False


def check_packing(policy: Policy, name: str, longest: int = 0) -> None:
    """Check by trial forward passes that packing does not change log-probabilities. Raises: UsageError.

    longest: tokens of the longest example. The mask of packed rows ignores sliding windows, so none may be shorter.
    """
    kind = policy.model.config.model_type
    window = getattr(policy.model.config, "sliding_window", None)
    if window and longest > window:
        raise UsageError(
            f"--packing True: the sliding window of {name} ({kind}) has {window} tokens and the longest row {longest}; "
            "use --packing False"
        )
    ids = trial_ids(policy.model, 13)
    sequence_ids = torch.tensor([[1] * 7 + [2] * 6], device=ids.device)
    parts = ids.split([7, 6], 1)

    def logprobs(ids: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        return policy(ids, ids >= 0, ids[:, 1:] >= 0, sequence_ids).logprobs

    with inference(policy):
        separate = torch.cat([logprobs(part) for part in parts], 1)
        columns = [*range(7)], [*range(7, 13)]
        alone = [(_modules(policy, partial(logprobs, part)), where) for part, where in zip(parts, columns)]
        try:
            together = logprobs(ids, sequence_ids)[:, [*range(6), *range(7, 12)]]
            packed = _modules(policy, lambda: logprobs(ids, sequence_ids))
            leak = _difference(policy, packed, 13, alone)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # ALiBi derives positions from a plain mask
            raise UsageError(
                f"--packing True: {name} ({kind}) rejects the mask of packed rows ({first_line(problem)}); "
                "use --packing False"
            ) from None
    if leak or not is_close(together, separate, policy.model):
        seen = f"in {leak}" if leak else f"log-probabilities differ by {(separate - together).abs().max():.2g}"
        raise UsageError(
            f"--packing True: in {name} ({kind}) packed examples attend to each other ({seen}); use --packing False"
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


# -------------------------------------------------------------------------------------------------------------- helpers
def _difference(role: Policy | ScalarModel, packed: Outputs, width: int, alone: list[tuple[Outputs, list[int]]]) -> str:
    """The first module whose output for a text in a packed row is not that for the text alone; "" if there is none.

    packed: outputs of a pass over one row of `width` tokens; alone: those of each text, and its columns in the row.
    """
    for name, calls in packed.items():
        for text, columns in alone:
            for values, expected in zip(calls, text.get(name, [])):
                if width not in values.shape or len(columns) not in expected.shape:
                    continue
                dimension = values.shape.index(width)
                if dimension == expected.shape.index(len(columns)):  # of tokens, not by chance of heads or features
                    values = values.movedim(dimension, 0)[columns]
                    expected = expected.movedim(dimension, 0)
                    if values.shape == expected.shape and not is_close(values, expected, role.model):
                        return name or type(role.model).__name__
    return ""


def _modules(role: Policy | ScalarModel, run: Callable[[], Tensor]) -> Outputs:
    """The outputs of each module in a pass, by name, one for each of its calls."""
    found: Outputs = {}

    def note(name: str, output: object) -> None:
        values = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(values, Tensor) and values.is_floating_point():
            found.setdefault(name, []).append(values)

    hooks = [
        module.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for name, module in role.model.named_modules()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found
