"""Probes: trial forward passes on a few tokens that show what an architecture supports.

Packing relies on custom attention masks, which some architectures ignore or reject, and of which convolutions, state
spaces and recurrences know nothing. In a model of small initial weights a leak hardly changes the outputs, and still
turns gradients round. So every module's outputs are compared with its own for the texts alone, each by its size.

Left out: a list of supported architectures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.splits import Row, longest_text
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.architecture import is_close, trial_ids
from lightrlhf.models.forward import embedding_rows, inference
from lightrlhf.models.roles import Policy, ScalarModel

Outputs = dict[str, list[Tensor]]  # of modules, by name


def enable_packing(role: Policy | ScalarModel) -> None:
    """Pack the texts of a role's passes from now on, if trial forward passes show that its architecture supports it.

    Flash attention cannot be given the mask.
    """
    if role.model.config._attn_implementation == "flash_attention_2":
        note_flash()
        return
    ids = trial_ids(role.model, 11).repeat(4, 1)  # (4, 11); packed: 8 common tokens, then 2, 3 and 1 of the texts, and
    ids[1, 8:], ids[2, 8:], ids[3, :7] = ids[0, :3], ids[0, 3:6], ids[0, 4:]  # 7 of another one
    lengths = torch.tensor([[10], [11], [9], [7]], device=ids.device)
    mask = torch.arange(11, device=ids.device) < lengths
    places = [*range(10)], [*range(8), 10, 11, 12], [*range(8), 13], [*range(14, 21)]  # columns of each text
    texts = [(ids[i : i + 1, : len(columns)], columns) for i, columns in enumerate(places)]
    group = torch.tensor([0, 0, 0, 1], device=ids.device)

    def outputs(ids: Tensor, mask: Tensor, group: Tensor | None = None) -> Tensor:
        if isinstance(role, Policy):
            return role(ids, mask, mask[:, 1:], group=group).logprobs
        return torch.where(mask, role(ids, mask, group=group), 0.0)

    with inference(role):
        separate = outputs(ids, mask)
        alone = [(_modules(role, partial(outputs, text, text >= 0)), columns) for text, columns in texts]
        role.packs = True
        try:
            close = is_close(outputs(ids, mask, group), separate, role.model)
            packed = _modules(role, lambda: outputs(ids, mask, group))
            role.packs = close and _is_same(role, packed, 21, alone)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # each architecture rejects custom masks by another error
            role.packs = False


@cache
def note_flash() -> None:
    """Print once that flash attention leaves texts as they are."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("--attn_implementation flash_attention_2: texts are not packed, for it takes no such mask")


def check_positions(rows: Sequence[Row], module: Policy | ScalarModel, where: str) -> None:
    """Check that each row fits into the model's positions. Raises: UsageError."""
    limit = getattr(module.model.config, "max_position_embeddings", None)
    longest = longest_text(rows)
    if limit and longest > limit:
        raise UsageError(
            f"{where} holds a row of {longest} tokens, but the model has {limit} positions; "
            f"prepare the data again with --max_length {limit}"
        )


def check_room(model: PreTrainedModel, lengths: Tensor, args: SamplingArgs) -> None:
    """Check that prompts of these lengths (N,) have tokens and fit with their responses into the model's positions, and
    that its vocabulary has the end tokens.

    Raises: UsageError.
    """
    if not lengths.all():
        number, count = int(lengths.bool().long().argmin()) + 1, len(lengths)
        raise UsageError(f"prompt {number} of {count} has no tokens; give it one, such as the tokenizer's BOS")
    size = embedding_rows(model)
    for index in args.eos_ids:
        if index >= size:
            raise UsageError(f"--eos_ids {index}: the model has {size} tokens; give ids below {size}")
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = int(lengths.max())
    if limit and longest >= limit:
        raise UsageError(
            f"a prompt of {longest} tokens fills the model's {limit} positions and leaves no room for a response; "
            "shorten it (prepared data: --max_prompt_length), or take a model with more positions"
        )
    if limit and longest + args.max_new_tokens > limit:
        raise UsageError(
            f"--max_new_tokens {args.max_new_tokens} after a prompt of {longest} tokens does not fit into the "
            f"model's {limit} positions; use at most {limit - longest}"
        )


# -------------------------------------------------------------------------------------------------------------- helpers
def _is_same(role: Policy | ScalarModel, packed: Outputs, width: int, alone: list[tuple[Outputs, list[int]]]) -> bool:
    """Whether the output of each module for a text in a packed row is the same as for the text alone.

    packed: outputs of a pass over one row of `width` tokens; alone: outputs for each text, and its columns in the row.
    """
    compared = 0
    for name, calls in packed.items():
        for text, columns in alone:
            for values, expected in zip(calls, text.get(name, [])):
                if width not in values.shape or len(columns) not in expected.shape:
                    continue
                dimension = values.shape.index(width)
                if dimension == expected.shape.index(len(columns)):  # of tokens, not by chance of heads or features
                    values = values.movedim(dimension, 0)[columns]
                    expected = expected.movedim(dimension, 0)
                    if values.shape == expected.shape:
                        compared += 1
                        if not is_close(values, expected, role.model):
                            return False
    return compared > 0


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
