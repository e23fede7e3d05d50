"""Rounding: weights of a checkpoint in fewer bits than they are trained in (`--save_dtype`).

Left out: rounding in training itself, and stochastic rounding.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure
from lightrlhf.maths.finite import not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`; one of whole numbers, and one that has that dtype, as it is.

    Raises: RunFailure naming the weight when a value is beyond the range of `dtype`.
    """
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    result = tensor.detach().cpu().to(dtype)  # not on the device, where the model itself may leave no room
    if not_finite([(name, result)]):
        kind = str(dtype).removeprefix("torch.")
        raise RunFailure(
            f"--save_dtype {kind}: {name} has the value {float(tensor.detach().abs().max()):g}, beyond "
            f"{torch.finfo(dtype).max:g}, so no checkpoint is written; use --save_dtype float32"
            f"{'' if dtype == torch.bfloat16 else ' or bfloat16'}"
        )
    return result


def rounded_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model with all parameters in `dtype`, tied ones still tied; the model itself if they are.

    Raises: RunFailure as `rounded` does.
    """
    if all(p.dtype == dtype for p in model.parameters()):
        return model
    copies: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        copies[id(parameter)] = nn.Parameter(rounded(name, parameter, dtype), requires_grad=False)
    return copy.deepcopy(model, copies)
