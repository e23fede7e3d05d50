"""Loading models in their roles, and choosing which parameters are trainable.

With LoRA several roles share one backbone (see `roles.py`), so a critic or a reward model may be loaded as adapters and
a head on the policy's weights.

Left out: training weights in half precision (`--precision` casts in the forward pass; for frozen ones see
`frozen.py`), models spread over several devices.
"""

from __future__ import annotations

import os
import platform
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError, first_line, read_problem
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import frozen, lora
from lightrlhf.models.architecture import scalar_head
from lightrlhf.models.complete import check_complete
from lightrlhf.models.forward import embedding_rows
from lightrlhf.models.lora import LoadedAdapters
from lightrlhf.models.names import base_name, holds_reward_model, quiet_libraries, read_saved_config, resolve
from lightrlhf.models.quantisation import (
    check_stored_quantisation,
    compute_dtype,
    is_quantised,
    keep_unpacked,
    quantisation_options,
)
from lightrlhf.models.roles import Policy, ScalarModel, transformer_layers, vocabulary_size
from lightrlhf.models.tiny import tiny_config
from lightrlhf.models.tokenizer import store_ends
from lightrlhf.storage.checkpoint import is_sealed, verify_checkpoint

if TYPE_CHECKING:
    from transformers import GenerationConfig

MAX_ADDED_TOKENS = 256
ALIGNMENT = 64  # bytes


def load_policy(
    name: str,
    args: ModelArgs,
    tokenizer: Tokenizer,
    flag: str = "--model_name",
    shares: bool = False,
    merges: bool = True,
) -> Policy:
    """Load a policy with the trainable parameters of `args.finetune_mode`; with LoRA it may share its backbone.

    merges: as in `choose_trainable`.
    Raises: UsageError naming `flag` when the model cannot be loaded or is a reward model.
    """
    from transformers import AutoModelForCausalLM

    lora.check_shared(args, shares)
    source = name if name == "tiny" else resolve(name, flag)
    if holds_reward_model(source):
        raise UsageError(f"{flag} {name} holds a reward model, not a language model; give an SFT experiment dir")
    model, base, loaded = load_model(AutoModelForCausalLM, source, flag, args, tokenizer)
    if grow_vocabulary(model, tokenizer, name):
        base = None  # these weights are not stored
    if merge_below_dora(model, args, loaded, f"{flag} {name}"):
        base = None
    store_ends(model, tokenizer)
    adapters = choose_trainable(model, args, loaded, "policy", merges)
    policy = Policy(model, adapters, base, shares=shares and bool(adapters))
    policy.loaded = loaded
    choose_attention(model, args, f"{flag} {name}")
    return policy


def load_scalar(
    name: str,
    args: ModelArgs,
    tokenizer: Tokenizer | None,
    seed: int,
    flag: str = "--model_name",
    needs_head: bool = False,
    backbone: Policy | None = None,
    may_be_encoder: bool = False,
    merges: bool = True,
) -> ScalarModel:
    """Load a model with a scalar head: a reward model, or a language model with a new head drawn from `seed`.

    backbone: policy whose backbone is used if it is shared and has the same base; unless `args.finetune_mode` is LoRA
    the adapters on it are frozen. may_be_encoder: the caller uses a model without a head `score` whole. merges: as in
    `choose_trainable`.
    Raises: UsageError naming `flag` when it cannot be loaded, or is not a reward model although `needs_head`.
    """
    from transformers import AutoModelForSequenceClassification

    source = name if name == "tiny" else resolve(name, flag)
    has_head, config = holds_reward_model(source), read_saved_config(source)
    if needs_head and not has_head and config:
        raise UsageError(f"{flag} {name} holds a language model, not a reward model; give an RM experiment dir")
    if needs_head and config.get("compares_pairs"):
        raise UsageError(
            f"{flag} {name} compares two responses and cannot score one; give a reward model of another --loss_type"
        )
    if backbone is not None and backbone.shares and backbone.base == base_name(source, flag) is not None:
        if not args.use_dora and not lora.holds_dora(source, flag):
            return scalar_on_backbone(backbone, source, args, seed, flag)
    model, base, loaded = load_model(AutoModelForSequenceClassification, source, flag, args, tokenizer, num_labels=1)
    if has_head and model.config.num_labels != 1:
        raise UsageError(f"{flag} {name} has {model.config.num_labels} labels; a reward model has one")
    if tokenizer is not None and not needs_head and grow_vocabulary(model, tokenizer, name):
        base = None
    if merge_below_dora(model, args, loaded, f"{flag} {name}"):
        base = None
    if not has_head:
        head = scalar_head(model)
        head.weight.data.copy_(new_head(head.in_features, seed))
    is_encoder = may_be_encoder and not hasattr(model, "score")
    module = ScalarModel(model, choose_trainable(model, args, loaded, "scalar", merges), base, is_encoder=is_encoder)
    choose_attention(model, args, f"{flag} {name}")
    return module


def scalar_on_backbone(backbone: Policy, source: str | None, args: ModelArgs, seed: int, flag: str = "") -> ScalarModel:
    """A critic or reward model as adapters and a head on a policy's backbone; source None: with a new head."""
    model, config = backbone.model, lora.adapter_config(source, flag) if source else None
    if source and config is not None and source not in backbone.loaded:
        name = f"start_{len(backbone.loaded)}"
        backbone.loaded[source] = name, lora.load_adapter(model, name, source, config)
        check_weights(model, f"{flag} {source}", backbone.loaded[source][1])
    start, head = backbone.loaded.get(source or "", (None, None))
    adapters: tuple[str, ...] = (start,) if start else ()
    trainable = args.finetune_mode == "lora"
    if trainable:
        adapters += lora.add_adapter(model, "scalar", args, adapters, for_logits=False)
    lora.configure(model, active=backbone.adapters, trainable=("policy", "scalar"))
    width = model.get_output_embeddings().weight.shape[1]
    score = nn.utils.skip_init(nn.Linear, width, 1, bias=False, device=model.device)  # draws no random numbers
    score.weight.data.copy_(new_head(score.in_features, seed) if head is None else head)
    return ScalarModel(model, adapters, backbone.base, shares=True, trainable=trainable, score=score)


def new_head(width: int, seed: int) -> Tensor:
    """A random scalar head (1, width) that depends on the seed only."""
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * (width + 1) ** -0.5


def separate_pad_token(module: ScalarModel, tokenizer: Tokenizer) -> None:
    """Set a pad token other than the end token: transformers scores a text at its last id that is not padding."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > vocabulary_size(module):
            _add_rows(module.model, len(tokenizer))
            module.base = None  # these weights are not stored
    module.model.config.pad_token_id = tokenizer.pad_token_id


def grow_vocabulary(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> bool:
    """Add embedding and head rows for tokens added to the tokenizer; returns whether any were added.

    If more than `MAX_ADDED_TOKENS` are missing, the tokenizer belongs to another model; the check of the data's ids
    then reports it.
    """
    rows = embedding_rows(model)
    if not rows < len(tokenizer) <= rows + MAX_ADDED_TOKENS:
        return False
    _add_rows(model, len(tokenizer))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name}: the vocabulary grows from {rows} to {len(tokenizer)} tokens, the size of its tokenizer")
    return True


@torch.no_grad()
def _add_rows(model: PreTrainedModel, size: int) -> None:
    """Append rows to the embedding and an untied head, each the mean of the existing rows."""
    if is_quantised(model):
        raise UsageError(
            f"the tokenizer has {size} tokens, the model fewer, and the vocabulary of a quantised model cannot grow; "
            "give unquantised weights without --load_in_8bit and --load_in_4bit"
        )
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise UsageError(
            f"the tokenizer has {size} tokens, the model fewer, and the adapter on its output layer cannot grow; "
            "merge it first (lightrlhf export --to merged) and start from that"
        )
    rows = embedding_rows(model)
    model.resize_token_embeddings(size, mean_resizing=False)
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in layers:
        if layer is not None:
            layer.weight[rows:] = layer.weight[:rows].mean(0)
    if frozen.is_held(model):
        frozen.hold(model)


def merge_below_dora(model: PreTrainedModel, args: ModelArgs, loaded: LoadedAdapters, named: str) -> bool:
    """Merge a loaded adapter on which another is to be trained, if one of the two is DoRA; returns whether.

    The merged weights are not stored.
    """
    if not loaded or args.finetune_mode != "lora" or not (args.use_dora or lora.is_dora(model)):
        return False
    lora.merge(model, tuple(name for name, _ in loaded.values()))
    loaded.clear()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"{named}: its adapter is merged into its base, since a DoRA adapter stands alone; this run saves the sum"
        )
    return True


def load_model(
    auto_class: Any, source: str, flag: str, args: ModelArgs, tokenizer: Tokenizer | None, **options: Any
) -> tuple[PreTrainedModel, str | None, LoadedAdapters]:
    """Load a Hugging Face model, in float32 or with its matrices in `args.base_dtype`.

    Returns it, the name of its base, and the adapter it came with.
    """
    cpu.enable()
    base, config = base_name(source, flag), None
    if base is None:
        assert tokenizer is not None
        model = auto_class.from_config(tiny_config(tokenizer, **options))
    else:
        config = lora.adapter_config(source, flag)
        if config is not None and is_sealed(Path(base)):
            verify_checkpoint(Path(base))
        if not check_stored_quantisation(base, flag, args, "num_labels" in options):
            options |= quantisation_options(args)
        with torch.random.fork_rng(devices=[]):  # transformers draws a head, which is drawn again from the seed
            dtype = frozen.HELD if args.holds_base else torch.float32
            options["trust_remote_code"] = args.trust_remote_code
            model = from_pretrained(auto_class, base, flag, dtype=dtype, **options)
        if args.holds_base:
            frozen.restore_buffers(model)
            note_rounding(base, flag)
        if "num_labels" in options and read_saved_config(source).get("compares_pairs"):
            model.config.compares_pairs = True  # an adapter's config has it, its base's has not
    if is_quantised(model):
        keep_unpacked(model, f"{flag} {source}", compute_dtype(args))
        if args.use_dora or (config is not None and config.use_dora):  # peft (0.21) loses the scales of such weights
            raise UsageError(
                f"{flag} {source}: a DoRA adapter needs a base that is not quantised; give unquantised weights"
            )
        if args.holds_base:
            raise UsageError(
                f"{flag} {source}: its weights were saved quantised; remove --base_dtype {args.base_dtype}"
            )
    elif args.holds_base:
        if config is not None and config.use_dora:  # merging it would round the sum
            raise UsageError(f"{flag} {source}: a DoRA adapter is merged in float32; leave --base_dtype out")
        frozen.hold(model)
    else:
        model.float()
    align(model)
    if args.disable_dropout:
        switch_off_dropout(model)
    head = None if config is None else lora.load_adapter(model, "start_0", source, config)
    check_weights(model, f"{flag} {source}", head)
    if config is None:
        return model, base, {}
    if model.can_generate() and (Path(source) / "generation_config.json").is_file():
        model.generation_config = _generation_config(source, flag)  # not its base's
    if head is not None and hasattr(model, "score"):
        model.get_parameter("score.weight").data.copy_(head)
    return model, base, {source: ("start_0", head)}


def _generation_config(source: str, flag: str) -> GenerationConfig:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as problem:
        raise UsageError(f"{flag} {source}: generation_config.json: {first_line(problem)}") from None


@cache
def note_rounding(base: str, flag: str) -> None:
    """Print that a base is rounded, unless it was published in bfloat16: checkpoints name the one that was not."""
    from transformers import PretrainedConfig

    stored = PretrainedConfig.get_config_dict(base)[0]
    dtype = str(stored.get("dtype") or stored.get("torch_dtype"))
    if dtype != "bfloat16" and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"{flag} {base} is stored in {dtype}, and --base_dtype bfloat16 rounds it: adapters learn on the rounded "
            "weights, and where they are loaded without this flag logits differ by that rounding"
        )


def align(model: nn.Module) -> None:
    """Move weights to addresses that are multiples of 64 bytes, as new tensors have.

    A file maps them anywhere, and a product of matrices rounds by where they lie: without this, bits of a run would
    depend on the length of a file's header.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def check_weights(model: nn.Module, named: str, head: Tensor | None = None) -> None:
    """Check that weights are finite; of a buffer that it has no NaN, for masks hold -inf.

    Raises: UsageError naming the model and the first weight that is not.
    """
    weights = [*model.named_parameters(), *([] if head is None else [("the scalar head", head)])]
    bad = not_finite(weights) + [name for name, buffer in model.named_buffers() if buffer.isnan().any()]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise UsageError(f"{named} has weights that are not finite: {bad[0]}{more}; give an intact copy of the model")


def from_pretrained(auto_class: Any, source: str, flag: str, **options: Any) -> PreTrainedModel:
    """A model as a class of transformers reads it, whole. Raises: UsageError naming `flag` when it cannot be."""
    quiet_libraries()
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # which are refused by name
    try:
        model, found = auto_class.from_pretrained(source, **options)
    except Exception as problem:  # a damaged or hostile file makes it raise anything
        if "Unrecognized configuration class" in str(problem):  # the whole message lists all classes that there are
            kind = read_saved_config(source).get("model_type")
            role = "reward model or critic" if "num_labels" in options else "policy"
            raise UsageError(
                f"{flag} {source} has the architecture {kind}, of which transformers has no {auto_class.__name__}, "
                f"so it cannot be a {role}; take one such as Llama, Qwen or GPT-2 for it"
            ) from None
        if "automatic conversion" in str(problem):  # the rest of the message points to a report that is not shown
            raise UsageError(
                f"{flag} {source} cannot be loaded: of tensors that transformers joins some are missing; "
                "give an intact copy of the model"
            ) from None
        raise UsageError(f"{flag} {source} cannot be loaded: {read_problem(problem)}") from None
    lacks_head = "num_labels" in options and not holds_reward_model(source)
    check_complete(model, found, source, f"{flag} {source}", lacks_head)
    return model


# ---------------------------------------------------------------------------------------------------- fine-tuning modes
def choose_trainable(
    model: PreTrainedModel, args: ModelArgs, loaded: LoadedAdapters, new: str, merges: bool = True
) -> tuple[str, ...]:
    """Freeze what `args.finetune_mode` does not train; returns the adapters, with LoRA a `new` one last.

    Without LoRA loaded adapters are merged into the weights; on quantised weights, and if not `merges`, they stay
    active and frozen.
    """
    adapters = tuple(name for name, _ in loaded.values())
    if args.finetune_mode == "lora":
        quiet_libraries()
        adapters += lora.add_adapter(model, new, args, adapters)
        lora.configure(model, active=adapters, trainable=(new,))
        if hasattr(model, "score"):
            model.get_submodule("score").requires_grad_(True)
    elif adapters and (not merges or is_quantised(model) or frozen.is_held(model)):
        lora.configure(model, active=adapters, trainable=())
    elif adapters:
        lora.merge(model, adapters).requires_grad_(True)
        loaded.clear()
        adapters = ()
    if args.finetune_mode != "lora" and frozen.is_held(model):  # of a reference
        model.requires_grad_(False)
    if args.finetune_mode == "last_layer":
        train_last_layers(model, 1)
    if args.activation_checkpointing:
        options: dict[str, Any] = {"use_reentrant": False}
        if adapters:
            options["context_fn"] = partial(lora.recompute_contexts, model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return adapters


def choose_attention(model: PreTrainedModel, args: ModelArgs, named: str) -> None:
    """Let a model compute attention by `args.attn_implementation`; sdpa is what transformers has chosen itself.

    Call it after the trial passes of its role, which flash attention cannot run on a CPU.
    Raises: UsageError when there is no GPU for it, or the architecture has no such attention.
    """
    name = args.attn_implementation
    if name == "sdpa":
        return
    if name == "flash_attention_2" and not torch.cuda.is_available():
        raise UsageError(f"--attn_implementation {name} runs on CUDA alone, which this machine has not; leave it out")
    quiet_libraries()
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as problem:
        raise UsageError(f"--attn_implementation {name}: {named}: {first_line(problem)}; leave it out") from None
    if model.config._attn_implementation != name:
        raise UsageError(
            f"--attn_implementation {name}: {named} ({model.config.model_type}) has only its own attention; "
            "leave it out"
        )


def switch_off_dropout(model: PreTrainedModel) -> None:
    for owner in (*model.modules(), model.config):  # some layers read a float attribute, Falcon's the config
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(owner, name, None), float):
                setattr(owner, name, 0.0)


def train_last_layers(model: PreTrainedModel, count: int) -> None:
    """Freeze all but the last `count` transformer layers and an untied head."""
    model.requires_grad_(False)
    for layer in list(transformer_layers(model))[-count:]:
        layer.requires_grad_(True)
    embedding: Any = model.get_input_embeddings()
    if hasattr(model, "score"):
        model.get_submodule("score").requires_grad_(True)
    elif model.get_output_embeddings().weight is not embedding.weight:
        model.get_output_embeddings().requires_grad_(True)


def find_device(accelerator: str, flag: str = "--accelerator") -> torch.device:
    """The device of `--accelerator`: cpu, cuda, mps, gpu (cuda or mps), or auto (a GPU if there is one).

    Raises: ValueError when this machine has none.
    """
    has_mps = torch.backends.mps.is_available() and platform.processor() in ("arm", "arm64")  # as Fabric requires it
    available = {"cuda": torch.cuda.is_available(), "mps": has_mps, "cpu": True}
    first, *_ = found = [name for name, usable in available.items() if usable]
    if accelerator == "auto" or (accelerator == "gpu" and first != "cpu"):
        return torch.device(first)
    if accelerator not in found:
        names = ", ".join(found)
        raise ValueError(f"{flag} {accelerator} is not available on this machine; use one of {names}")
    return torch.device(accelerator)
