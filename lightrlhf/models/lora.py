"""Low-rank adapters (LoRA, Hu et al. 2021) on a Hugging Face model: added, loaded, switched, concatenated, merged.

The layers are peft's. A model may carry several adapters by name; a role (see `model.py`) is some of them, in order:
a frozen one it started from, and a new one that learns. `active` switches between roles by the list of active
names alone: peft's own `set_adapter` also changes what requires gradients, and a backward pass after it would
silently lose some.

An exported adapter is the concatenation of a role's adapters, so always relative to the weights of the base on disk:
B1 A1 + B2 A2 = [B1 B2] [A1; A2]. transformers and peft load it like any other.

Left out: adapters of other kinds than plain LoRA; they can be merged into their base with peft first.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import ModelArgs
from lightrlhf.cli.errors import UsageError, first_line

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # peft saves names as they are inside its own wrapper
HEADS = {"score", "classifier"}


def adapter_config(source: str, flag: str) -> Any | None:
    """peft's config of the adapter in a folder or hub repository; None where there is no adapter.

    Raises: UsageError when it is no plain LoRA, which could not be carried on by concatenation.
    """
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source) is None:
        return None
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")
        config = PeftConfig.from_pretrained(source)
    plain = str(getattr(config.peft_type, "value", config.peft_type)) == "LORA"
    plain = plain and not (config.use_dora or config.lora_bias or config.bias != "none")
    if not plain or not set(config.modules_to_save or []) <= HEADS:
        raise UsageError(
            f"{flag} {source} holds an adapter of another kind than plain LoRA; "
            "merge it into its base first (peft: merge_and_unload) and give the merged folder"
        )
    return config


def base_of(config: Any, source: str, flag: str) -> str:
    """Hub id or absolute folder of the weights an adapter belongs to. Raises: UsageError when they are gone."""
    base = config.base_model_name_or_path
    if not base:
        raise UsageError(f"{flag} {source} holds an adapter that does not name its base ({ADAPTER_CONFIG})")
    if Path(base).is_dir():
        return str(Path(base).resolve())
    beside = Path(source).resolve().parent / "base"
    if Path(base).name == "base" and beside.is_dir():  # the experiment dir was moved, its base with it
        return str(beside)
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise UsageError(
            f"{flag} {source} holds an adapter, but its base {base} does not exist; put it back or leave a link there"
        )
    return base


def add_adapter(model: nn.Module, name: str, args: ModelArgs) -> None:
    """A new adapter that changes nothing yet, on the layers of `args.lora_targets`."""
    from peft import LoraConfig

    targets = args.lora_target_names()
    if targets == ["all-linear"]:
        targets = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    names = [f".{name}" for name, _ in model.named_modules()]
    if unknown := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
        layers = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers(model)}))
        raise UsageError(f"--lora_targets {unknown[0]} names no layer of the model; its linear layers are {layers}")
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=_is_transposed(model),
    )
    try:
        _inject(config, model, name)
    except ValueError as problem:
        raise UsageError(f"--lora_targets {args.lora_targets}: {first_line(problem)}") from None


def load_adapter(model: nn.Module, name: str, source: str, config: Any) -> Tensor | None:
    """The adapter of `source`, put on the model as it was saved; returns the scalar head saved with it, if any."""
    from peft import load_peft_weights, set_peft_model_state_dict

    config.lora_dropout, config.modules_to_save, config.inference_mode = 0.0, None, True  # it learns no more
    try:
        with torch.random.fork_rng(devices=[]):  # what is drawn for it is overwritten
            _inject(config, model, name)
    except ValueError as problem:
        raise UsageError(f"{source} holds an adapter that does not fit its base: {first_line(problem)}") from None
    stored = {key.removeprefix(PREFIX): value for key, value in load_peft_weights(source, device="cpu").items()}
    head = next((stored.pop(key) for key in list(stored) if key.split(".")[0] in HEADS), None)
    missed = set_peft_model_state_dict(model, stored, adapter_name=name).unexpected_keys
    if missed:
        raise UsageError(f"{source} holds an adapter that does not fit its base: there is no {missed[0]}")
    return head


def _inject(config: Any, model: nn.Module, name: str) -> None:
    """Injection freezes every other parameter and may switch adapters; `set_up` puts both right."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what we want
        inject_adapter_in_model(config, model, adapter_name=name)


def linear_layers(model: nn.Module) -> list[str]:
    """Names of all linear layers but the heads, with or without adapters on them."""
    heads = {id(model.get_output_embeddings()), *(id(getattr(model, name, None)) for name in HEADS)}
    names = [name for name, module in model.named_modules() if _is_linear(module) and id(module) not in heads]
    return [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_transposed(model: nn.Module) -> bool:
    """GPT-2 stores its matrices the other way round."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())


# -------------------------------------------------------------------------------------------------------- switching
def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that carry adapters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def own_parts(model: nn.Module, adapter: str) -> nn.ModuleDict:
    """The matrices of one adapter, the very ones of the model, under names a ModuleDict takes."""
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
    """Inside, these adapters and no others are active, and the model is in this mode; restored on leaving."""
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


def set_up(model: nn.Module, active: Sequence[str], learning: Sequence[str]) -> None:
    """Say once which adapters are active outside of `active`, and which ones learn; nothing else does."""
    model.requires_grad_(False)
    for layer in lora_layers(model).values():
        layer._active_adapter = list(active)
        for name in learning:
            if name in layer.lora_A:
                layer.lora_A[name].requires_grad_(True)
                layer.lora_B[name].requires_grad_(True)


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """For activation checkpointing: what a backward pass recomputes runs under the adapters of its forward pass.

    The backward pass itself may then run anywhere, inside another role too.
    """
    now = next(layer._active_adapter for layer in model.modules() if hasattr(layer, "lora_A"))
    return nullcontext(), active(model, now, model.training)


# --------------------------------------------------------------------------------------------------- out of memory
def concatenated(model: nn.Module, adapters: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """One adapter equal to the sum of several: its peft config and its weights by peft's names."""
    from peft import LoraConfig

    layers = {
        name: [(layer, adapter) for adapter in adapters if adapter in layer.lora_A]
        for name, layer in lora_layers(model).items()
    }
    layers = {name: parts for name, parts in layers.items() if parts}
    kinds = {(layer.r[a], layer.lora_alpha[a], layer.scaling[a]) for parts in layers.values() for layer, a in parts}
    rank, alpha, scaling = next(iter(kinds))
    as_it_is = len(adapters) == len(kinds) == 1 and scaling == alpha / rank
    if not as_it_is:
        rank = alpha = max(sum(layer.r[adapter] for layer, adapter in parts) for parts in layers.values())
    weights = {}
    for name, parts in layers.items():
        down = [layer.lora_A[adapter].weight for layer, adapter in parts]  # (r, in) each
        up = [layer.lora_B[adapter].weight * (1 if as_it_is else layer.scaling[adapter]) for layer, adapter in parts]
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
    """The matrix on the CPU, with zeros up to `rank`: an adapter may be missing on some layers."""
    missing = list(matrix.shape)
    missing[dim] = rank - missing[dim]
    return torch.cat([matrix, matrix.new_zeros(missing)], dim).detach().float().cpu().contiguous()


def _shortest(model: nn.Module, names: list[str]) -> list[str]:
    """Last parts of the names where those say as much as the whole names."""
    last = {name.rpartition(".")[2] for name in names}
    matched = {name for name in linear_layers(model) if name.rpartition(".")[2] in last}
    return sorted(last if matched == set(names) else names)


def save_adapter(model: nn.Module, adapters: Sequence[str], head: Tensor | None, base: str, folder: Path) -> None:
    """Write the sum of these adapters, and a scalar head, as a peft folder on top of `base`."""
    from safetensors.torch import save_file

    config, weights = concatenated(model, adapters)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
    if head is not None:
        config.modules_to_save = ["score"]
        weights[f"{PREFIX}score.weight"] = head.detach().cpu().contiguous()
    config.save_pretrained(folder)
    if getattr(model.config, "compares_pairs", False):  # of a reward model: an adapter folder has no config of its own
        said = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")) | {"compares_pairs": True}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(said, indent=1), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(model: nn.Module, adapters: Sequence[str]) -> nn.Module:
    """Add these adapters to the weights, in place, and take all adapters off."""
    for name, layer in lora_layers(model).items():
        layer.merge(adapter_names=[adapter for adapter in adapters if adapter in layer.lora_A])
        parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
        setattr(parent, name.rpartition(".")[2], layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False
    return model


def without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the base alone, by their names in it."""
    return {
        name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
