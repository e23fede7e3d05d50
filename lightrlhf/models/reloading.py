"""New weights for a model in memory, read from the safetensors files of a Hugging Face folder.

Everything is checked before the first weight is overwritten: names, shapes, settings that change what weights mean,
the kind of numbers, finite values. So a folder of another model leaves the old weights as they are.

Left out: architectures whose files have other names than their modules, and adapters (`named_adapters`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import lora

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# settings of a config that leave the meaning of weights as it is
WITHOUT_MEANING = {"dtype", "torch_dtype", "transformers_version", "architectures", "use_cache", "name_or_path"}
WITHOUT_MEANING |= {"tie_word_embeddings"}  # names and values of the weights say it


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Overwrite a model's weights, in place, with a folder's; tied weights may be stored once.

    Raises: UsageError in one line, with the weights as they were, when the folder does not hold exactly them.
    """
    own, stored = lora.base_state_dict(model), read_weights(folder)
    check_config(model, folder)
    if unknown := stored.keys() - own.keys():
        raise UsageError(f"{folder} does not fit the model: it has {min(unknown)}, the model has not")
    tied: dict[Any, list[str]] = {}  # names of each tensor
    for name, tensor in own.items():
        tied.setdefault(tensor.data_ptr() or name, []).append(name)
    for names in tied.values():
        found = [name for name in names if name in stored]
        if not found:
            raise UsageError(f"{folder} does not fit the model: it lacks {names[0]}")
        for name in found:
            if stored[name].is_floating_point() != own[name].is_floating_point():
                kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (stored[name], own[name])]
                raise UsageError(f"{folder} does not fit the model: its {name} has {kinds[0]} values, not {kinds[1]}")
            if stored[name].shape != own[name].shape:
                shapes = " x ".join(map(str, stored[name].shape)), " x ".join(map(str, own[name].shape))
                raise UsageError(f"{folder} does not fit the model: its {name} is {shapes[0]}, the model's {shapes[1]}")
        if any(not torch.equal(stored[found[0]], stored[name]) for name in found[1:]):
            raise UsageError(f"{folder} does not fit the model: its {' and '.join(found)} differ, the model's are tied")
    if bad := not_finite((name, tensor.to(own[name].dtype)) for name, tensor in stored.items()):
        raise UsageError(f"{folder} has weights that are not finite: {bad[0]}, as {str(own[bad[0]].dtype)[6:]}")
    for name, tensor in stored.items():
        own[name].copy_(tensor)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files, mapped into memory. Raises: UsageError."""
    from safetensors.torch import load_file

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder that this server can see")
    try:
        files = [WEIGHTS]
        if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
            files = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(file).name != file for file in files) or not all((folder / file).is_file() for file in files):
            raise UsageError(f"{folder} has no {WEIGHTS}, nor all files of {INDEX}")
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(folder / file)
        return tensors
    except UsageError:
        raise
    except Exception as problem:  # of a damaged file
        raise UsageError(f"{folder} cannot be read: {first_line(problem)[:200]}") from None


def check_config(model: Any, folder: Path) -> None:
    """Raises: UsageError when the folder's config.json, where it has one, says that its weights mean something else."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return
    try:
        stored = AutoConfig.from_pretrained(folder).to_dict()
    except Exception as problem:  # of a damaged file
        raise UsageError(f"{folder}: config.json cannot be read: {first_line(problem)[:200]}") from None
    for name, value in model.config.to_dict().items():
        ignored = name in WITHOUT_MEANING or name.startswith("_") or name.endswith("_token_id")
        if not ignored and "drop" not in name and stored.get(name) != value:
            raise UsageError(
                f"{folder} does not fit the model: its config.json has {name} {str(stored.get(name))[:60]}, "
                f"the model {str(value)[:60]}"
            )
