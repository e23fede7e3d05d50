"""Low-rank adapters (LoRA, Hu et al. 2021) on a Hugging Face model: add, load, switch, concatenate, merge, save.

The layers are peft's. A model may carry several adapters by name. A role (see `roles.py`) is an ordered list of them: a
frozen one it started from, and a new trainable one. `active` switches roles by the list of active names alone: peft's
`set_adapter` also changes `requires_grad`, so that a later backward pass would silently lose gradients.

An exported adapter is the concatenation of a role's adapters, so it is always relative to the stored base weights:
B1 A1 + B2 A2 = [B1 B2] [A1; A2]. transformers and peft load it like any other.

An adapter that begins as a part of the weights (PiSSA, Meng et al. 2024; OLoRA, Büyükakyüz 2024) usually has that part
taken out of the base. Here the base stays as it is, and the part is subtracted by a second adapter, frozen: W + B A -
B0 A0. So quantities that are relative to the base (a reference, an export, a merge) hold without a special case. A
checkpoint's rank is then twice the trained one.

DoRA (Liu et al. 2024) is not a sum, for it scales the rows of W + B A: such an adapter stands alone on its base.

Left out: adapters of other kinds, which peft can merge into their base first. LoftQ, which chooses the quantised base
together with the adapter, so that the checkpoint would need that base.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.gguf.files import find_converted
from lightrlhf.models.complete import ADAPTER_FILES, HEADS, adapter_weights
from lightrlhf.models.patterns import resolve_patterns
from lightrlhf.models.tied import check_layers, is_tied, untie

LoadedAdapters = dict[str, tuple[str, Tensor | None]]  # by source: name of the adapter, scalar head saved with it

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of parameter names in peft's files, from its wrapper
KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")  # the modules of an adapter in a layer; the last of DoRA alone
INITIAL = "-initial"  # ends the name of the frozen adapter that subtracts where a trained one began
MERGE_FIRST = "merge it into its base first (peft: merge_and_unload) and give the merged folder"
NOT_LINEAR = ("layer_replication", "target_parameters", "trainable_token_indices", "use_qalora")  # of peft's configs
KEEP_THE_BASE = {"True", "False", "gaussian", "orthogonal", "eva"}  # of peft's initialisations


def adapter_config(source: str, flag: str) -> Any | None:
    """peft's config of the adapter in a folder or hub repository; None if there is no adapter.

    Raises: UsageError when it is neither LoRA nor DoRA, or relative to a base that its initialisation changed.
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
    plain = plain and not (config.lora_bias or config.bias != "none" or _other_variants(config))
    if not plain or not set(config.modules_to_save or []) <= HEADS:
        raise UsageError(f"{flag} {source} holds an adapter other than LoRA and DoRA on linear layers; {MERGE_FIRST}")
    if str(config.init_lora_weights) not in KEEP_THE_BASE:
        raise UsageError(
            f"{flag} {source} holds an adapter relative to a base that its initialisation {config.init_lora_weights} "
            "changed; save it relative to the original one (peft: path_initial_model_for_weight_conversion)"
        )
    return config


def _other_variants(config: Any) -> list[str]:
    """Names of the variants of LoRA in a peft config, besides DoRA."""
    names = [one.name for one in fields(config) if one.metadata.get("is_lora_variant") and one.name != "use_dora"]
    return [name for name in (*names, *NOT_LINEAR) if getattr(config, name, None)]


def holds_dora(source: str, flag: str) -> bool:
    """Whether a folder or hub repository holds a DoRA adapter."""
    config = adapter_config(source, flag)
    return config is not None and bool(config.use_dora)


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
    if converted := find_converted(base):  # of a GGUF file, by another user or on another machine
        return str(converted.resolve())
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise UsageError(
            f"{flag} {source} holds an adapter, but its base {base} does not exist; restore it or a link to it"
        )
    return base


def add_adapter(
    model: PreTrainedModel, name: str, args: ModelArgs, below: Sequence[str] = (), for_logits: bool = True
) -> tuple[str, ...]:
    """Add a new adapter to the layers of `args.lora_targets`; returns the names of all that belong to it, its own last.

    With them the model is initially as with the adapters `below` alone. for_logits: also to the output layer, if it is
    named there; a role with a scalar head does not use it.
    """
    from peft import LoraConfig

    targets = args.lora_target_names()
    if targets == ["all-linear"]:
        targets = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    names = [f".{name}" for name, _ in model.named_modules()]
    if unknown := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
        layers = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers(model)}))
        raise UsageError(f"--lora_targets {unknown[0]} names no layer of the model; its linear layers are {layers}")
    output = model.get_output_embeddings()
    alpha: Any = args.lora_alpha  # a float, which peft stores and applies as well as an int
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        exclude_modules=None if for_logits else [name for name, layer in model.named_modules() if layer is output],
        fan_in_fan_out=_is_transposed(model),
        use_dora=args.use_dora,
    )
    if args.init_lora_weights in ("gaussian", "orthogonal"):
        config.init_lora_weights = args.init_lora_weights
    try:
        _inject(config, model, name)
        check_layers(model, lora_layers(model), name, f"--lora_targets {args.lora_targets}", "leave it out")
        if args.init_lora_weights not in ("pissa", "olora"):
            return (name,)
        config.lora_dropout = 0.0  # the twin takes away the same part in every pass
        _inject(config, model, name + INITIAL)
    except ValueError as problem:
        raise UsageError(f"--lora_targets {args.lora_targets}: {first_line(problem)}") from None
    for where, layer in lora_layers(model).items():
        if name in layer.lora_A:
            _begin_with_a_part(layer, name, [one for one in below if one in layer.lora_A], args, where)
    return name + INITIAL, name


@torch.no_grad()
def _begin_with_a_part(layer: Any, name: str, below: list[str], args: ModelArgs, where: str) -> None:
    """Set an adapter to a part of rank r of the weights it starts from, and its frozen twin to minus that part.

    PiSSA: the largest singular values, by subspace iteration; OLoRA: the first r columns of Q of a QR decomposition.
    """
    weight = layer.get_base_layer().weight.float() + sum(layer.get_delta_weight(one) for one in below)
    weight = weight.T if layer.fan_in_fan_out else weight  # (out, in)
    rank = args.lora_rank
    if rank > min(weight.shape):
        raise UsageError(
            f"--lora_rank {rank} with --init_lora_weights {args.init_lora_weights}: {where} has only "
            f"{min(weight.shape)} singular values; lower the rank or leave that layer out of --lora_targets"
        )
    if args.init_lora_weights == "pissa":
        left, values, right = torch.svd_lowrank(weight, q=min(2 * rank + 32, *weight.shape), niter=16)
        root = (values[:rank] / layer.scaling[name]).sqrt()  # (r,)
        down, up = (right[:, :rank] * root).T, left[:, :rank] * root
    else:
        up = torch.linalg.qr(weight[:, :rank]).Q  # as for the whole matrix
        down = up.T @ weight
    for adapter, sign in ((name, 1), (name + INITIAL, -1)):
        layer.lora_A[adapter].weight.copy_(down)
        layer.lora_B[adapter].weight.copy_(sign * up)


def belonging(adapters: Sequence[str]) -> tuple[str, ...]:
    """The trainable adapter of a role, and its frozen twin if it has one: the last ones."""
    return tuple(adapters[-2:] if adapters[-1] + INITIAL in adapters else adapters[-1:])


def is_initial(parameter: str) -> bool:
    """Whether a parameter, by its name, belongs to an adapter that subtracts where a trained one began."""
    return parameter.endswith(f"{INITIAL}.weight")


def initial_of(parameter: str) -> str:
    """Name of the frozen parameter that subtracts where a trained one began, if there is one."""
    return f"{parameter.removesuffix('.weight')}{INITIAL}.weight"


def check_shared(args: ModelArgs, shares: bool) -> None:
    """Raises: UsageError when new adapters would be DoRA on a backbone that roles share."""
    if shares and args.use_dora and args.finetune_mode == "lora":
        remedy = " or add --share_backbone False" if hasattr(args, "share_backbone") else ""
        raise UsageError(
            "--use_dora True: a DoRA adapter must stand alone on its base, and here policy and reference share one; "
            f"remove it{remedy}"
        )


def is_dora(model: nn.Module) -> bool:
    """Whether the model carries a DoRA adapter."""
    return any(layer.lora_magnitude_vector for layer in lora_layers(model).values())


def load_adapter(model: PreTrainedModel, name: str, source: str, config: Any) -> Tensor | None:
    """Load the adapter of `source` into the model; returns the scalar head saved with it, if any."""
    from peft import set_peft_model_state_dict

    has_head = bool(config.modules_to_save)
    config.lora_dropout, config.modules_to_save, config.inference_mode = 0.0, None, True  # it is frozen
    config.init_lora_weights = True
    resolve_patterns(config, model, source)
    try:
        with torch.random.fork_rng(devices=[]):  # the initial values are overwritten
            _inject(config, model, name)
    except ValueError as problem:
        raise UsageError(f"{source} holds an adapter that does not fit its base: {first_line(problem)}") from None
    check_layers(model, lora_layers(model), name, f"{source} holds an adapter of another kind", MERGE_FIRST)
    stored = {key.removeprefix(PREFIX): value for key, value in adapter_weights(source).items()}
    if wrong := [key for key, value in stored.items() if torch.is_tensor(value) and not value.is_floating_point()]:
        kind = str(stored[wrong[0]].dtype).removeprefix("torch.")
        raise UsageError(f"{source} holds an adapter whose {wrong[0]} has {kind} values; weights are floating-point")
    head = next((stored.pop(key) for key in list(stored) if key.split(".")[0] in HEADS), None)
    if has_head and head is None:
        raise UsageError(f"{source} holds an adapter that lacks the scalar head of its {ADAPTER_CONFIG}; restore it")
    if hasattr(model, "score"):  # it lacks the output layer of a language model, whose name has no dot
        stored = {key: value for key, value in stored.items() if "." in key.partition(".lora_")[0]}
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
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # `merge` unties it
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to True")  # of GPT-2, but not for its output layer
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


def adapter_modules(model: nn.Module, *adapters: str) -> nn.ModuleDict:
    """The modules of adapters, shared with the model, by names that a ModuleDict accepts."""
    return nn.ModuleDict(
        {
            f"{name}.{kind}.{adapter}".replace(".", "/"): getattr(layer, kind)[adapter]
            for name, layer in lora_layers(model).items()
            for adapter in adapters
            for kind in KINDS
            if adapter in getattr(layer, kind)
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
        for modules in (getattr(layer, kind) for kind in KINDS):
            for name in trainable:
                if name in modules:
                    modules[name].requires_grad_(True)


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
    names = ("r", "lora_alpha", "scaling", "use_rslora")
    kinds = {tuple(getattr(layer, name)[a] for name in names) for parts in layers.values() for layer, a in parts}
    rank, alpha, scaling, stabilised = next(iter(kinds))
    unchanged = len(adapters) == len(kinds) == 1 and scaling == alpha / (rank**0.5 if stabilised else rank)
    if not unchanged:
        rank = alpha = max(sum(layer.r[adapter] for layer, adapter in parts) for parts in layers.values())
    weights = {}
    for name, parts in layers.items():
        down = [layer.lora_A[adapter].weight for layer, adapter in parts]  # (r, in) each
        up = [layer.lora_B[adapter].weight * (1 if unchanged else layer.scaling[adapter]) for layer, adapter in parts]
        weights[f"{PREFIX}{name}.lora_A.weight"] = _pad(torch.cat(down), rank, 0)
        weights[f"{PREFIX}{name}.lora_B.weight"] = _pad(torch.cat(up, 1), rank, 1)
        for layer, adapter in parts:
            if adapter in layer.lora_magnitude_vector:  # the only one; peft writes it without the suffix,
                magnitude = layer.lora_magnitude_vector[adapter].weight  # and then transformers (5.23) overlooks it
                weights[f"{PREFIX}{name}.lora_magnitude_vector.weight"] = magnitude.detach().float().cpu().contiguous()
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_shortest(model, list(layers)),
        fan_in_fan_out=_is_transposed(model),
        use_rslora=unchanged and stabilised,
        use_dora=any("lora_magnitude_vector" in name for name in weights),
    )
    return config, weights


def _pad(matrix: Tensor, rank: int, dim: int) -> Tensor:
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
    model: PreTrainedModel, adapters: Sequence[str], head: Tensor | None, base: str | None, folder: Path
) -> None:
    """Write the concatenation of these adapters, and a scalar head, as a peft folder on top of `base`."""
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
    save_file(weights, folder / ADAPTER_FILES[0], metadata={"format": "pt"})


def merge(model: PreTrainedModel, adapters: Sequence[str]) -> PreTrainedModel:
    """Merge these adapters into the weights, in place, and remove all adapters.

    An output layer that is tied to the embedding is untied if one of them is on it.
    """
    for name, layer in lora_layers(model).items():
        own = [adapter for adapter in adapters if adapter in layer.lora_A]
        if own and is_tied(model, layer):
            untie(model, layer)
        layer.merge(adapter_names=own)
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
