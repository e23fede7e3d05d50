"""Checks that the files of a model or adapter are complete; transformers initialises missing tensors at random.

Left out: values (`check_weights`), and the seal of a checkpoint (`storage/seals.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from lightrlhf.cli.errors import UsageError, list_names, read_problem
from lightrlhf.data.types import PreTrainedModel

HEADS = {"score", "classifier"}  # of scalar models
FILES = ("model.safetensors", "pytorch_model.bin")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
COMPUTED = re.compile(r"(masked_bias|position_ids|rotary_emb\.inv_freq)$")  # buffers that files of older releases hold


def check_complete(
    model: PreTrainedModel, found: Mapping[str, Any], source: str, named: str, lacks_head: bool = False
) -> None:
    """Check that no tensor of a model is missing, and print the tensors of its files that it does not use.

    found: the `output_loading_info` of `from_pretrained`; source: folder or hub id; named: the model's name in errors;
    lacks_head: whether the model is a language model that gets a scalar head.
    Raises: UsageError naming the first tensor that is missing or of another shape, and its file.
    """
    if lacks_head and not hasattr(model, "score"):
        return  # `scalar_head` refuses the architecture
    missing = sorted(key for key in found["missing_keys"] if not (lacks_head and key.split(".")[0] in HEADS))
    unexpected = sorted(found["unexpected_keys"])
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        renamed = [key for key in unexpected if key.count(".") > 1]  # not lm_head.weight
        instead = f"; it has {list_names(renamed)} instead" if renamed else ""
        raise UsageError(
            f"{named}: {file_of(source, missing[0])} lacks {missing[0]}{others}, which {type(model).__name__} "
            f"has{instead}; give an intact copy of the model"
        )
    if found["mismatched_keys"]:
        key, stored, own = min(found["mismatched_keys"])
        shapes = (" x ".join(map(str, shape)) for shape in (stored, own))
        raise UsageError(
            f"{named}: {key} of {file_of(source, key)} is {' and by its config.json '.join(shapes)}; "
            "give an intact copy of the model"
        )
    unread = [key for key in unexpected if not _is_known(model, key)]
    if unread and os.environ.get("LOCAL_RANK", "0") == "0":
        note_unread(
            f"{named}: {type(model).__name__} has no place for {len(unread)} of its tensors: {list_names(unread)}"
        )


def _is_known(model: PreTrainedModel, key: str) -> bool:
    """Whether an unused tensor is expected: it is computed, or belongs to a head that a scalar model replaces."""
    inner = {model.base_model_prefix, *dict(model.base_model.named_children())}
    is_other_head = hasattr(model, "num_labels") and key.split(".")[0] not in inner
    return is_other_head or COMPUTED.search(key) is not None


def file_of(source: str, key: str) -> str:
    """The file of a folder that should hold a tensor: the shard in the index, else the index or the only file."""
    for name in FILES:
        if Path(source, name).is_file():
            return str(Path(source, name))
        if (index := Path(source, f"{name}.index.json")).is_file():
            shard = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(key)
            return str(Path(source, shard or index.name))
    return source


def adapter_weights(source: str) -> dict[str, Tensor]:
    """The weights of an adapter in a folder or hub repository, from safetensors, else from a pickle of tensors alone.

    Raises: UsageError when there are none, or they cannot be read.
    """
    from peft import load_peft_weights

    if Path(source).is_dir() and not any(Path(source, file).is_file() for file in ADAPTER_FILES):
        raise UsageError(f"{source} holds an adapter without its weights ({ADAPTER_FILES[0]}); restore them")
    try:
        return dict(load_peft_weights(source, device="cpu").items())
    except Exception as problem:  # a damaged or hostile file makes it raise anything
        raise UsageError(
            f"{source} holds an adapter whose weights cannot be read: {read_problem(problem)}; "
            f"give an intact copy as {ADAPTER_FILES[0]}"
        ) from None


@cache
def note_unread(text: str) -> None:
    """Print a note once, however often its model is loaded."""
    print(text)
