"""Low-rank adapters (LoRA, Hu et al. 2021) on a Hugging Face model: add, load, switch, concatenate, merge, save.

The layers are peft's. A model may carry several adapters by name. A role (see `roles.py`) is an ordered list of them: a
frozen one it started from, and a new trainable one. `active` switches roles by the list of active names alone: peft's
`set_adapter` also changes `requires_grad`, so that a later backward pass would silently lose gradients.

An exported adapter is the concatenation of a role's adapters, so it is always relative to the stored base weights:
B1 A1 + B2 A2 = [B1 B2] [A1; A2]. transformers and peft load it like any other.

Left out: adapters other than plain LoRA; peft can merge them into their base first.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import ModelArgs
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.models.rounding import rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LoadedAdapters = dict[str, tuple[str, Tensor | None]]  # by source: name of the adapter, scalar head saved with it

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of parameter names in peft's files, from its wrapper
HEADS = {"score", "classifier"}


def adapter_config(source: str, flag: str) -> Any | None:
    """peft's config of the adapter in a folder or hub repository; None if there is no adapter.

    Raises: UsageError when it is not plain LoRA, which could not be concatenated.
    """
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source) is None:
        return None
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")
        try:
            config = PeftConfig.from_pretrained(source)
        except Exception as problem:  # whatever peft raises for a broken file
            raise UsageError(f"{flag} {source}: {ADAPTER_CONFIG} cannot be read: {first_line(problem)}") from None
    plain = str(getattr(config.peft_type, "value", config.peft_type)) == "LORA"
    plain = plain and not (config.use_dora or config.lora_bias or config.bias != "none")
    if not plain or not set(config.modules_to_save or []) <= HEADS:
        raise UsageError(
            f"{flag} {source} holds an adapter other than plain LoRA; "
            "merge it into its base first (peft: merge_and_unload) and give the merged folder"
        )
    return config


def base_of(config: Any, source: str, flag: str) -> str:
    """Hub id or absolute folder of an adapter's base weights. Raises: UsageError when they do not exist."""
    base = config.base_model_name_or_path
    if not base:
        raise UsageError(f"{flag} {source} holds an adapter that does not name its base ({ADAPTER_CONFIG})")
    if Path(base).is_dir():
        return str(Path(base).resolve())
    moved = Path(source).resolve().parent / "base"
    if Path(base).name == "base" and moved.is_dir():  # the experiment dir was moved together with its base
        return str(moved)
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise UsageError(
            f"{flag} {source} holds an adapter, but its base {base} does not exist; restore it or a link to it"
        )
    return base


def add_adapter(model: PreTrainedModel, name: str, args: ModelArgs) -> None:
    """Add a new adapter, initially the identity, to the layers of `args.lora_targets`."""
    from peft import LoraConfig

    targets = args.lora_target_names()
    if targets == ["all-linear"]:
        targets = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    names = [f".{name}" for name, _ in model.named_modules()]
    if unknown := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
        layers = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers(model)}))
        raise UsageError(f"--lora_targets {unknown[0]} names no layer of the model; its linear layers are {layers}")
    alpha: Any = args.lora_alpha  # a float, which peft stores and applies as well as an int
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=_is_transposed(model),
    )
    try:
        _inject(config, model, name)
    except ValueError as problem:
        raise UsageError(f"--lora_targets {args.lora_targets}: {first_line(problem)}") from None


def load_adapter(model: PreTrainedModel, name: str, source: str, config: Any) -> Tensor | None:
    """Load the adapter of `source` into the model; returns the scalar head saved with it, if any."""
    from peft import load_peft_weights, set_peft_model_state_dict

    config.lora_dropout, config.modules_to_save, config.inference_mode = 0.0, None, True  # it is frozen
    try:
        with torch.random.fork_rng(devices=[]):  # the initial values are overwritten
            _inject(config, model, name)
    except ValueError as problem:
        raise UsageError(f"{source} holds an adapter that does not fit its base: {first_line(problem)}") from None
    stored = {key.removeprefix(PREFIX): value for key, value in load_peft_weights(source, device="cpu").items()}
    head = next((stored.pop(key) for key in list(stored) if key.split(".")[0] in HEADS), None)
    try:
        result: Any = set_peft_model_state_dict(model, stored, adapter_name=name)  # torch's named tuple of keys
    except RuntimeError as problem:  # another shape; the first line of its message says nothing
        detail = " ".join(str(problem).split("\n")[1:2]).strip()
        raise UsageError(f"{source} holds an adapter that does not fit its base: {detail}") from None
    if result.unexpected_keys:
        raise UsageError(f"{source} holds an adapter that does not fit its base: no layer {result.unexpected_keys[0]}")
    if missing := [key for key in result.missing_keys if ".lora_" in key and f".{name}." in key]:
        raise UsageError(f"{source} holds an adapter that lacks {missing[0].replace(f'.{name}.', '.')}; restore it")
    return head


def remove_adapter(model: PreTrainedModel, name: str) -> None:
    """Remove an adapter from all layers that carry it."""
    for layer in lora_layers(model).values():
        layer._active_adapter = [one for one in layer.active_adapters if one != name]  # peft would pick another one
        layer.delete_adapter(name)
    getattr(model, "peft_config", {}).pop(name, None)


def _inject(config: Any, model: PreTrainedModel, name: str) -> None:
    """Add a peft adapter. Freezes all other parameters and may switch adapters; `configure` sets both afterwards."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
        inject_adapter_in_model(config, model, adapter_name=name)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers except the heads, with or without adapters."""
    heads = {id(model.get_output_embeddings()), *(id(getattr(model, name, None)) for name in HEADS)}
    names = [name for name, module in model.named_modules() if _is_linear(module) and id(module) not in heads]
    return [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_transposed(model: nn.Module) -> bool:
    """Whether linear layers store transposed matrices (GPT-2's Conv1D)."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())


# -------------------------------------------------------------------------------------------------------- switching
def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that carry adapters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_modules(model: nn.Module, adapter: str) -> nn.ModuleDict:
    """The modules of one adapter, shared with the model, by names that a ModuleDict accepts."""
    return nn.ModuleDict(
        {
            f"{name}.{kind}.{adapter}".replace(".", "/"): getattr(layer, kind)[adapter]
            for name, layer in lora_layers(model).items()
            if adapter in layer.lora_A
            for kind in ("lora_A", "lora_B")
        }
    )


@contextmanager
def active(model: nn.Module, adapters: Sequence[str], training: bool) -> Iterator[None]:
    """Context manager: activates exactly these adapters and the train/eval mode; restores both on leaving."""
    layers = list(lora_layers(model).values())
    before, was_training = [layer._active_adapter for layer in layers], model.training
    _switch(model, layers, [list(adapters)] * len(layers), training)
    try:
        yield
    finally:
        _switch(model, layers, before, was_training)


def _switch(model: nn.Module, layers: list[Any], adapters: list[Any], training: bool) -> None:
    for layer, names in zip(layers, adapters):
        layer._active_adapter = names
    if model.training != training:
        model.train(training)


def configure(model: nn.Module, active: Sequence[str], trainable: Sequence[str]) -> None:
    """Set the adapters that are active outside `active`, and the trainable ones; freezes all other parameters."""
    model.requires_grad_(False)
    for layer in lora_layers(model).values():
        layer._active_adapter = list(active)
        for name in trainable:
            if name in layer.lora_A:
                layer.lora_A[name].requires_grad_(True)
                layer.lora_B[name].requires_grad_(True)


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Context managers for activation checkpointing: recomputation uses the adapters of the forward pass.

    The backward pass itself may then run while another role is active.
    """
    layers: Iterator[Any] = (module for module in model.modules() if hasattr(module, "lora_A"))
    return nullcontext(), active(model, next(layers)._active_adapter, model.training)


# ------------------------------------------------------------------------------------------------- saving, merging
def concatenate(model: PreTrainedModel, adapters: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """Concatenate adapters into one equal to their sum: its peft config, and its weights by peft's names."""
    from peft import LoraConfig

    layers = {
        name: [(layer, adapter) for adapter in adapters if adapter in layer.lora_A]
        for name, layer in lora_layers(model).items()
    }
    layers = {name: parts for name, parts in layers.items() if parts}
    kinds = {(layer.r[a], layer.lora_alpha[a], layer.scaling[a]) for parts in layers.values() for layer, a in parts}
    rank, alpha, scaling = next(iter(kinds))
    unchanged = len(adapters) == len(kinds) == 1 and scaling == alpha / rank
    if not unchanged:
        rank = alpha = max(sum(layer.r[adapter] for layer, adapter in parts) for parts in layers.values())
    weights = {}
    for name, parts in layers.items():
        down = [layer.lora_A[adapter].weight for layer, adapter in parts]  # (r, in) each
        up = [layer.lora_B[adapter].weight * (1 if unchanged else layer.scaling[adapter]) for layer, adapter in parts]
        weights[f"{PREFIX}{name}.lora_A.weight"] = _padded(torch.cat(down), rank, 0)
        weights[f"{PREFIX}{name}.lora_B.weight"] = _padded(torch.cat(up, 1), rank, 1)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_shortest(model, list(layers)),
        fan_in_fan_out=_is_transposed(model),
    )
    return config, weights


def _padded(matrix: Tensor, rank: int, dim: int) -> Tensor:
    """The matrix on the CPU, zero-padded to `rank`, since some layers may lack an adapter."""
    missing = list(matrix.shape)
    missing[dim] = rank - missing[dim]
    return torch.cat([matrix, matrix.new_zeros(missing)], dim).detach().float().cpu().contiguous()


def _shortest(model: PreTrainedModel, names: list[str]) -> list[str]:
    """The last components of layer names if they select the same layers, else the full names."""
    last = {name.rpartition(".")[2] for name in names}
    matched = {name for name in linear_layers(model) if name.rpartition(".")[2] in last}
    return sorted(last if matched == set(names) else names)


def save_adapter(
    model: PreTrainedModel,
    adapters: Sequence[str],
    head: Tensor | None,
    base: str | None,
    folder: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the concatenation of these adapters, and a scalar head, as a peft folder on top of `base`, in `dtype`."""
    from safetensors.torch import save_file

    config, weights = concatenate(model, adapters)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
    if head is not None:
        config.modules_to_save = ["score"]
        weights[f"{PREFIX}score.weight"] = head.detach().cpu().contiguous()
    config.save_pretrained(folder)
    if getattr(model.config, "compares_pairs", False):  # an adapter folder has no model config to store it in
        stored = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")) | {"compares_pairs": True}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(stored, indent=1), encoding="utf-8")
    weights = {name: rounded(name, weight, dtype) for name, weight in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(model: PreTrainedModel, adapters: Sequence[str]) -> PreTrainedModel:
    """Merge these adapters into the weights, in place, and remove all adapters."""
    for name, layer in lora_layers(model).items():
        layer.merge(adapter_names=[adapter for adapter in adapters if adapter in layer.lora_A])
        parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
        setattr(parent, name.rpartition(".")[2], layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False
    return model


def base_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """State dict of the base model alone, without adapters."""
    return {
        name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
