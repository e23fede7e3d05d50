"""Loading models in their roles, and choosing which of their weights are trainable.

With LoRA several roles share one backbone (see `roles.py`), so a critic or a reward model may be loaded as adapters and
a head on the policy's weights.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import ModelArgs
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.models import lora
from lightrlhf.models.names import base_name, holds_reward_model, quiet_libraries, resolve, saved_config
from lightrlhf.models.quantisation import (
    _compute_dtype,
    _quantisation,
    check_stored_quantisation,
    is_quantised,
    keep_unpacked,
)
from lightrlhf.models.roles import Policy, ScalarModel, transformer_layers, vocabulary_size
from lightrlhf.storage.checkpoint import MANIFEST, verify_checkpoint

TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # about hidden_size ** -0.5, as for a wide model 0.02 is
}
MAX_TINY_POSITIONS = 2048
MAX_ADDED_TOKENS = 256


def load_policy(name: str, args: ModelArgs, tokenizer: Any, flag: str = "--model_name", shares: bool = False) -> Policy:
    """A policy with the learning part of `args.finetune_mode` switched on; with LoRA it may share its backbone.

    Raises: UsageError naming `flag` when the name cannot be loaded or holds a reward model.
    """
    from transformers import AutoModelForCausalLM

    source = name if name == "tiny" else resolve(name, flag)
    if holds_reward_model(source):
        raise UsageError(f"{flag} {name} holds a reward model, not a language model; give an SFT experiment dir")
    model, base, loaded = _load(AutoModelForCausalLM, source, flag, args, tokenizer)
    if grow_vocabulary(model, tokenizer, name):
        base = None  # no folder holds these weights
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    adapters = choose_trainable(model, args, loaded, "policy")
    policy = Policy(model, adapters, base, shares=shares and bool(adapters))
    policy.loaded = loaded
    return policy


def load_scalar(
    name: str,
    args: ModelArgs,
    tokenizer: Any,
    seed: int,
    flag: str = "--model_name",
    needs_head: bool = False,
    backbone: Policy | None = None,
) -> ScalarModel:
    """A model with a scalar head, from a reward model or (with a new head, drawn from `seed`) a language model.

    backbone: a policy on whose backbone it goes, if that is shared and has the same base. With another mode than LoRA
    nothing there learns.
    Raises: UsageError naming `flag` when it cannot be loaded, or is no reward model where one is needed.
    """
    from transformers import AutoModelForSequenceClassification

    source = name if name == "tiny" else resolve(name, flag)
    has_head, said = holds_reward_model(source), saved_config(source)
    if needs_head and not has_head and said:
        raise UsageError(f"{flag} {name} holds a language model, not a reward model; give an RM experiment dir")
    if needs_head and said.get("compares_pairs"):
        raise UsageError(
            f"{flag} {name} compares two responses and cannot score one; give a reward model of another --loss_type"
        )
    if backbone is not None and backbone.shares and backbone.base == base_name(source, flag) is not None:
        return scalar_on_backbone(backbone, source, args, seed, flag)
    model, base, loaded = _load(AutoModelForSequenceClassification, source, flag, args, tokenizer, num_labels=1)
    if has_head and model.config.num_labels != 1:
        raise UsageError(f"{flag} {name} has {model.config.num_labels} labels; a reward model has one")
    if tokenizer is not None and not needs_head and grow_vocabulary(model, tokenizer, name):
        base = None
    if said.get("compares_pairs"):
        model.config.compares_pairs = True
    if not has_head:
        model.score.weight.data.copy_(new_head(model.score.in_features, seed))
    return ScalarModel(model, choose_trainable(model, args, loaded, "scalar"), base)


def scalar_on_backbone(backbone: Policy, source: str | None, args: ModelArgs, seed: int, flag: str = "") -> ScalarModel:
    """A critic or reward model as adapters and a head on a policy's backbone; source None: with a new head."""
    model, config = backbone.model, lora.adapter_config(source, flag) if source else None
    if source and config is not None and source not in backbone.loaded:
        name = f"start_{len(backbone.loaded)}"
        backbone.loaded[source] = name, lora.load_adapter(model, name, source, config)
    start, head = backbone.loaded.get(source or "", (None, None))
    learns = args.finetune_mode == "lora"
    if learns:
        lora.add_adapter(model, "scalar", args)
    lora.set_up(model, active=backbone.adapters, learning=("policy", "scalar"))
    width = model.get_output_embeddings().weight.shape[1]
    score = nn.utils.skip_init(nn.Linear, width, 1, bias=False, device=model.device)  # draws no numbers
    score.weight.data.copy_(new_head(score.in_features, seed) if head is None else head)
    adapters = ((start,) if start else ()) + (("scalar",) if learns else ())
    return ScalarModel(model, adapters, backbone.base, shares=True, learns=learns, score=score)


def new_head(width: int, seed: int) -> Tensor:
    """A scalar head (1, width) that follows from the seed alone."""
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * (width + 1) ** -0.5


def separate_pad_token(module: ScalarModel, tokenizer: Any) -> None:
    """Give a reward model a pad token that is not its end token: transformers scores the last id that is not pad."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > vocabulary_size(module):
            _add_rows(module.model, len(tokenizer))
            module.base = None  # no folder holds these weights
    module.model.config.pad_token_id = tokenizer.pad_token_id


def grow_vocabulary(model: nn.Module, tokenizer: Any, name: str) -> bool:
    """Give tokens that were added to a tokenizer rows in the embedding and the head; returns whether it did.

    Many missing rows mean that the tokenizer is another model's; the ids in the data then say so.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if not rows < len(tokenizer) <= rows + MAX_ADDED_TOKENS:
        return False
    _add_rows(model, len(tokenizer))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name}: the vocabulary grows from {rows} to {len(tokenizer)} tokens, as many as its tokenizer has")
    return True


@torch.no_grad()
def _add_rows(model: nn.Module, size: int) -> None:
    """Rows at the end of the embedding and of an untied head, each the mean of those before."""
    if is_quantised(model):
        raise UsageError(
            f"the tokenizer has {size} tokens, the model fewer, and a quantised one cannot grow; "
            "give unquantised weights, and neither --load_in_8bit nor --load_in_4bit"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None:
            layer.weight[rows:] = layer.weight[:rows].mean(0)


def tiny_config(tokenizer: Any, **changes: Any) -> Any:
    """Config of the small Llama behind `--model_name tiny`: 0.8M parameters beside the embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_TINY_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **TINY,
        **changes,
    )


def _load(
    auto_class: Any, source: str, flag: str, args: ModelArgs, tokenizer: Any, **options: Any
) -> tuple[nn.Module, str | None, dict[str, tuple[str, Tensor | None]]]:
    """A model in float32, the name of its base, and the adapter it came with by its source: its name and its head."""
    if source == "tiny":
        model = auto_class.from_config(tiny_config(tokenizer, **options))
    else:
        quiet_libraries()
        base, config = base_name(source, flag), lora.adapter_config(source, flag)
        if config is not None and (Path(base) / MANIFEST).is_file():
            verify_checkpoint(Path(base))
        is_stored = check_stored_quantisation(base, flag, args, "num_labels" in options)
        with torch.random.fork_rng(devices=[]):  # transformers draws a head that we draw again
            options |= {"trust_remote_code": args.trust_remote_code, **({} if is_stored else _quantisation(args))}
            model = _from_pretrained(auto_class, base, flag, **options)
    if is_quantised(model):
        keep_unpacked(model, f"{flag} {source}", _compute_dtype(args))
    else:
        model.float()
    if args.disable_dropout:
        switch_off_dropout(model)
    if source == "tiny":
        return model, None, {}
    if config is None:
        return model, base, {}
    head = lora.load_adapter(model, "start_0", source, config)
    if head is not None and hasattr(model, "score"):
        model.score.weight.data.copy_(head)
    return model, base, {source: ("start_0", head)}


def _from_pretrained(auto_class: Any, source: str, flag: str, **options: Any) -> nn.Module:
    quiet_libraries()
    from safetensors import SafetensorError

    try:
        return auto_class.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise UsageError(f"{flag} {source} cannot be loaded: {first_line(problem)}") from None


# ---------------------------------------------------------------------------------------------------- fine-tuning modes
def choose_trainable(
    model: nn.Module, args: ModelArgs, loaded: dict[str, tuple[str, Tensor | None]], new: str
) -> tuple[str, ...]:
    """Freeze what does not learn; returns the adapters.

    Without LoRA the adapters it came with are merged into the weights; beside quantised weights they stay, active.
    """
    adapters = tuple(name for name, _ in loaded.values())
    if args.finetune_mode == "lora":
        quiet_libraries()
        lora.add_adapter(model, new, args)
        adapters += (new,)
        lora.set_up(model, active=adapters, learning=(new,))
        if hasattr(model, "score"):
            model.score.requires_grad_(True)
    elif adapters and is_quantised(model):
        lora.set_up(model, active=adapters, learning=())
    elif adapters:
        lora.merge(model, adapters).requires_grad_(True)
        loaded.clear()
        adapters = ()
    if args.finetune_mode == "last_layer":
        train_last_layers(model, 1)
    if args.activation_checkpointing:
        options: dict[str, Any] = {"use_reentrant": False}
        if adapters:
            options["context_fn"] = partial(lora.recompute_contexts, model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return adapters


def switch_off_dropout(model: nn.Module) -> None:
    for owner in (*model.modules(), model.config):  # some read a plain number of the module, Falcon of the config
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(owner, name, None), float):
                setattr(owner, name, 0.0)


def train_last_layers(model: nn.Module, count: int) -> None:
    """Only the last transformer layers learn, and the head where it is not the embedding too."""
    model.requires_grad_(False)
    for layer in list(transformer_layers(model))[-count:]:
        layer.requires_grad_(True)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    elif model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.get_output_embeddings().requires_grad_(True)


def find_device(accelerator: str) -> torch.device:
    """The device of cpu, cuda, mps or auto. Raises: ValueError when this machine has none."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        accelerator = "cuda" if here["cuda"] else "cpu"
    if not here.get(accelerator):
        found = ", ".join(name for name, available in here.items() if available)
        raise ValueError(f"--accelerator {accelerator} is not on this machine, which has {found}")
    return torch.device(accelerator)
