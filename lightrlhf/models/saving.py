"""Saving models in the formats of transformers and peft.

With LoRA a checkpoint is a peft folder that names its base; `lightrlhf export` writes merged weights.

Left out: formats of other programs (`lightrlhf.export`).
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models import frozen, lora
from lightrlhf.models.loading import choose_trainable, load_model
from lightrlhf.models.names import base_name, holds_reward_model
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import Role
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.hub import uploading
from lightrlhf.storage.seals import MANIFEST, write_folder


def export(module: Role, folder: Path, base_dir: Path) -> None:
    """Write a role's model for transformers: full weights, or an adapter folder that names its base.

    A base that is not stored yet is written to `base_dir`.
    """
    if not module.adapters:
        module.model.save_pretrained(folder)
        return
    if module.base is None:
        if not base_dir.is_dir():
            write_folder(base_dir, lambda path: _save_base(module.model, path))
        module.base = str(base_dir.resolve())
    _save_adapter(module, folder)


def export_for_servers(module: Role, folder: Path, base_dir: Path, as_adapter: bool) -> None:
    """Write the files that a server loads: merged weights, or with `as_adapter` the adapter alone.

    A tied head is written too: vLLM on a CPU leaves it as it was unless it is among the weights.
    """
    from safetensors.torch import load_file, save_file

    if as_adapter:
        export(module, folder, base_dir)
        return
    model, file = merged_model(module), folder / "model.safetensors"
    model.save_pretrained(folder, max_shard_size="10000GB")  # one file
    stored, own = load_file(file), model.state_dict()
    written = {own[name].data_ptr() for name in stored if name in own}
    tied = {n: t.detach().cpu().clone() for n, t in own.items() if n not in stored and t.data_ptr() in written}
    if tied:
        save_file(stored | tied, file, metadata={"format": "pt"})


def _save_adapter(module: Role, folder: Path) -> None:
    model = module.model
    head = model.get_parameter("score.weight") if hasattr(model, "score") else None
    lora.save_adapter(model, module.adapters, head, module.base, folder)
    if head is None and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _save_base(model: PreTrainedModel, folder: Path) -> None:
    """Write the base weights, without adapters."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    is_scalar = hasattr(model, "score")
    auto_class = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):  # saving must not advance the random state
        base = auto_class.from_config(model.config)
    if frozen.is_held(model):
        base.to(model.held_dtype)
    base.load_state_dict(lora.base_state_dict(model))
    if not is_scalar:
        base.generation_config = model.generation_config
    base.save_pretrained(folder)


def merged_model(module: Role) -> PreTrainedModel:
    """The Hugging Face model with the role's adapters merged into a copy; without adapters the model itself.

    For quantised weights the copy is the unquantised base on disk, since merged weights would stay rounded.
    """
    if not module.adapters:
        return module.model
    if not is_quantised(module.model):
        is_held = frozen.is_held(module.model)
        model = frozen.released_copy(module.model) if is_held else copy.deepcopy(module.model)
        return lora.merge(model, module.adapters)
    with TemporaryDirectory() as folder:
        _save_adapter(module, Path(folder))
        merged = _load_merged(folder)
    merged.config.pad_token_id = module.model.config.pad_token_id
    if not hasattr(merged, "score"):
        merged.generation_config = module.model.generation_config
    return merged


def _load_merged(folder: str) -> PreTrainedModel:
    """Load an adapter folder merged into its base."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    is_scalar = holds_reward_model(folder)
    auto_class = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    options: dict[str, Any] = {"num_labels": 1} if is_scalar else {}
    model, _, loaded = load_model(auto_class, folder, "the adapter", FrozenArgs(), None, **options)
    if is_quantised(model):
        raise UsageError(f"the adapter {folder}: its base was saved quantised, so they cannot be merged")
    choose_trainable(model, FrozenArgs(), loaded, "")  # merges
    return model


@contextmanager
def self_contained(folder: Path) -> Iterator[Path]:
    """Context manager: the checkpoint, or a merged copy of it if it is an adapter on a local base."""
    is_adapter = (folder / lora.ADAPTER_CONFIG).is_file()
    base = base_name(str(folder), "the checkpoint") if is_adapter else None
    if base is None or not Path(base).is_dir():
        yield folder
        return
    model = _load_merged(str(folder))
    model.config.pad_token_id = load_tokenizer(None, str(folder)).pad_token_id
    with TemporaryDirectory(dir=folder.parent) as temporary:
        merged = Path(temporary) / folder.name
        shutil.copytree(folder, merged, ignore=shutil.ignore_patterns("adapter_*", MANIFEST, "resume.pt"))
        model.save_pretrained(merged)
        yield merged


@contextmanager
def standalone_copy(source: str) -> Iterator[str]:
    """Context manager: a copy of an adapter checkpoint, merged into its base."""
    model, tokenizer = _load_merged(source), load_tokenizer(None, source)
    model.config.pad_token_id = tokenizer.pad_token_id
    with TemporaryDirectory(dir=Path(source).resolve().parent if Path(source).is_dir() else None) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def upload(folder: Path, repository: str) -> None:
    """Upload a checkpoint to a hub repository, without the files that only a resumed run reads.

    A new repository is private. Raises: RunFailure naming the checkpoint, which is kept.
    """
    with (
        uploading(repository, "model", f"the checkpoint is {folder}") as upload_folder,
        self_contained(folder) as portable,
    ):
        upload_folder(folder_path=portable, ignore_patterns=["resume.pt", MANIFEST])


def hash_weights(module: nn.Module, digest: Any = None) -> Any:
    """Add the names and bytes of a module's weights to a hashlib digest (SHA-256 by default), and return it.

    Adapters that begin as a part of the weights are left out: machines may round their decomposition differently.
    """
    digest = digest or hashlib.sha256()
    state = module.state_dict()
    for name, tensor in state.items():
        if lora.is_initial(name) or lora.initial_of(name) in state:
            continue
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest
