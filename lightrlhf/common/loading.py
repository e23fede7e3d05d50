"""How models are found, loaded, made to learn, and saved.

A name is a hub id, a local Hugging Face folder, an adapter folder, an experiment dir (its newest intact checkpoint), a
single checkpoint, or `tiny`: a Llama of under 1M parameters built from its config. With LoRA a checkpoint is a peft
folder that names its base.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.common import adapters as lora
from lightrlhf.common.args import ModelArgs, TrainArgs, UsageError, first_line
from lightrlhf.common.checkpoint import MANIFEST, checkpoints, newest_checkpoint, verify_checkpoint, write_folder
from lightrlhf.common.model import Policy, Role, ScalarModel, is_quantised, transformer_layers, vocabulary_size

TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # about hidden_size ** -0.5, as for a wide model 0.02 is
}
MAX_TINY_POSITIONS = 2048
QUANTISED = ("Linear8bitLt", "Linear4bit")  # the layers of bitsandbytes
MAX_ADDED_TOKENS = 256


# -------------------------------------------------------------------------------------------------------------- loading
def load_tokenizer(data_dir: str | Path | None, model_name: str | None = None) -> Any:
    """The tokenizer the data was prepared with (`{data_dir}/tokenizer`), else the model's own."""
    quiet_libraries()
    from transformers import AutoTokenizer

    stored = Path(data_dir) / "tokenizer" if data_dir is not None else None
    source = stored if stored is not None and stored.is_dir() else model_name and resolve(model_name)
    if not source:
        raise UsageError(f"{data_dir} has no tokenizer folder and no model name was given to take one from")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as problem:
        raise UsageError(f"no tokenizer in {source}: {first_line(problem)}") from None
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer in {source} has no end token; set its eos_token")
    if stored is not None and source == stored and model_name and model_name != "tiny":
        _check_same_ids(tokenizer, data_dir, model_name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks travel with the tokens, so this hides no end token
    return tokenizer


def _check_same_ids(tokenizer: Any, data_dir: str | Path, model_name: str) -> None:
    """Raises: UsageError when a local model has a tokenizer of its own that gives other ids than the data's."""
    from transformers import AutoTokenizer

    folder = next(reversed(checkpoints(Path(model_name))), Path(model_name))
    if not (folder / "tokenizer.json").is_file():
        return
    own = AutoTokenizer.from_pretrained(str(folder)).get_vocab()  # may know more: a reward model's pad token
    if any(own.get(token) != index for token, index in tokenizer.get_vocab().items()):
        raise UsageError(
            f"{data_dir} was prepared with another tokenizer than that of {model_name}; "
            f"prepare the data again with --tokenizer_name {folder}"
        )


def load_policy(name: str, args: ModelArgs, tokenizer: Any, flag: str = "--model_name", shares: bool = False) -> Policy:
    """A policy with the learning part of `args.finetune_mode` switched on; with LoRA it may share its backbone.

    Raises: UsageError naming `flag` when the name cannot be loaded or holds a reward model.
    """
    from transformers import AutoModelForCausalLM

    source = name if name == "tiny" else resolve(name, flag)
    if holds_reward_model(source):
        raise UsageError(f"{flag} {name} holds a reward model, not a language model; give an SFT experiment dir")
    model, base, loaded = _load(AutoModelForCausalLM, source, flag, args, tokenizer)
    if _grow_vocabulary(model, tokenizer, name):
        base = None  # no folder holds these weights
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    adapters = _choose_what_learns(model, args, loaded, "policy")
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
        return _scalar_on(backbone, source, args, seed, flag)
    model, base, loaded = _load(AutoModelForSequenceClassification, source, flag, args, tokenizer, num_labels=1)
    if has_head and model.config.num_labels != 1:
        raise UsageError(f"{flag} {name} has {model.config.num_labels} labels; a reward model has one")
    if tokenizer is not None and not needs_head and _grow_vocabulary(model, tokenizer, name):
        base = None
    if said.get("compares_pairs"):
        model.config.compares_pairs = True
    if not has_head:
        model.score.weight.data.copy_(new_head(model.score.in_features, seed))
    return ScalarModel(model, _choose_what_learns(model, args, loaded, "scalar"), base)


def _scalar_on(backbone: Policy, source: str, args: ModelArgs, seed: int, flag: str) -> ScalarModel:
    """A critic or reward model by its adapters on a policy's backbone."""
    model, config = backbone.model, lora.adapter_config(source, flag)
    if config is not None and source not in backbone.loaded:
        name = f"start_{len(backbone.loaded)}"
        backbone.loaded[source] = name, lora.load_adapter(model, name, source, config)
    start, head = backbone.loaded.get(source, (None, None))
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


def _grow_vocabulary(model: nn.Module, tokenizer: Any, name: str) -> bool:
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
        _switch_off_dropout(model)
    if source == "tiny":
        return model, None, {}
    if config is None:
        return model, base, {}
    head = lora.load_adapter(model, "start_0", source, config)
    if head is not None and hasattr(model, "score"):
        model.score.weight.data.copy_(head)
    return model, base, {source: ("start_0", head)}


def _quantisation(args: ModelArgs) -> dict[str, Any]:
    """The `BitsAndBytesConfig` of `--load_in_8bit` or `--load_in_4bit`, as an option of `from_pretrained`.

    Heads are not quantised.
    """
    if not (args.load_in_8bit or args.load_in_4bit):
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_8bit=args.load_in_8bit,
        load_in_4bit=args.load_in_4bit,
        llm_int8_skip_modules=["lm_head", "embed_out", "score"],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=_compute_dtype(args),
    )
    return {"quantization_config": config}


def _compute_dtype(args: ModelArgs) -> torch.dtype:
    return torch.bfloat16 if getattr(args, "precision", "") == "bf16-mixed" else torch.float32


def check_stored_quantisation(base: str, flag: str, args: ModelArgs, is_scalar: bool = False) -> bool:
    """Whether bitsandbytes had quantised the weights of `base` before they were saved.

    is_scalar: whether they are loaded to be a reward model or a critic.
    Raises: UsageError for what such weights cannot do: learn by themselves, be merged into, get a new head, be sharded.
    """
    from transformers import PretrainedConfig

    try:
        stored = PretrainedConfig.get_config_dict(base)[0].get("quantization_config") or {}
    except (OSError, ValueError):
        return False  # loading it says what is wrong with it
    if not (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        return False
    bits, other = ("4", "8") if stored.get("load_in_4bit") else ("8", "4")
    which = f"{flag}: the weights in {base} were saved in {bits} bits"
    if isinstance(args, TrainArgs) and args.finetune_mode != "lora":
        raise UsageError(f"{which} and cannot learn; use --finetune_mode lora")
    if args.merge:
        raise UsageError(f"{which}, adapters cannot be merged into them; leave out --merge, or give unquantised ones")
    if isinstance(args, TrainArgs) and args.push_to_hub and Path(base).is_dir():
        raise UsageError(f"{which}, so --push_to_hub cannot upload merged ones; give a base on the hub")
    if isinstance(args, TrainArgs) and args.strategy in ("fsdp", "deepspeed"):
        raise UsageError(f"{which} and cannot be split by --strategy {args.strategy}; use --strategy ddp")
    if is_scalar and not holds_reward_model(base):
        raise UsageError(f"{which} and take no scalar head; give unquantised ones, which --load_in_{bits}bit quantises")
    if getattr(args, f"load_in_{other}bit"):
        raise UsageError(f"{which}; leave out --load_in_{other}bit")
    return True


@torch.no_grad()
def keep_unpacked(model: nn.Module, which: str, compute_dtype: torch.dtype) -> None:
    """Keep 4-bit weights in the layout in which they were quantised, and compute with them in `compute_dtype`.

    On CPUs with AVX512-bf16 instructions bitsandbytes (0.50) repacks the weights of a `Linear4bit` at its first pass in
    eval mode. From then on no gradient flows back through the layer, its products are rounded to bfloat16,
    `dequantize_4bit` (and so merging) returns another matrix, and `state_dict` damages the scales. Layers whose input
    width is not a multiple of 64, or whose output width is not a multiple of 32, fail.

    which: the model, for errors.
    Raises: UsageError when no layer is quantised, or a release of bitsandbytes repacks all the same.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer).__name__ in QUANTISED}
    if not layers:
        raise UsageError(
            f"{which} ({model.config.model_type}) has no layer that bitsandbytes can quantise; "
            "train without --load_in_8bit and --load_in_4bit"
        )
    layers = {name: layer for name, layer in layers.items() if type(layer).__name__ == "Linear4bit"}
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype, layer.compute_type_is_set = compute_dtype, True
    for name, layer in list(layers.items())[:1]:
        if layer.weight.device.type == "cpu" and _repacks(layer):
            raise UsageError(
                f"{which}: this release of bitsandbytes repacks the 4-bit weights of {name} on this processor, which "
                "then cannot be trained or merged; install the tested one: pip install -c constraints.txt bitsandbytes"
            )


def _repacks(layer: Any) -> bool:
    """Whether a pass of a `Linear4bit` in eval mode changes how its weights are stored, or fails in that."""
    stored = layer.weight.data_ptr()
    try:
        layer(torch.zeros(1, layer.in_features))
    except (RuntimeError, AssertionError):
        return True
    return layer.weight.data_ptr() != stored


def _from_pretrained(auto_class: Any, source: str, flag: str, **options: Any) -> nn.Module:
    quiet_libraries()
    from safetensors import SafetensorError

    try:
        return auto_class.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise UsageError(f"{flag} {source} cannot be loaded: {first_line(problem)}") from None


def quiet_libraries() -> None:
    """No progress bars, hints or telemetry of the libraries in a program's output; its own lines stay readable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


# ---------------------------------------------------------------------------------------------------------------- names
def starting_model(args: Any) -> tuple[str, str]:
    """What a later stage starts from, `--sft_experiment_dir` or else `--model_name`, and the flag that said so."""
    if args.sft_experiment_dir:
        return args.sft_experiment_dir, "--sft_experiment_dir"
    return args.model_name, "--model_name"


def resolve(name: str, flag: str = "--model_name") -> str:
    """Folder or hub id behind a name; an experiment dir becomes its newest intact checkpoint.

    Raises: UsageError when a folder is neither, or an experiment dir has no intact checkpoint.
    """
    path = Path(name)
    if not path.is_dir():
        if flag != "--model_name" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UsageError(f"{flag} {name} does not exist")
        return name
    if path.name.startswith("checkpoint-"):
        verify_checkpoint(path)
        return name
    if (path / "config.json").is_file() or (path / lora.ADAPTER_CONFIG).is_file():
        return name
    if (path / "args.json").is_file():
        return str(newest_checkpoint(path, flag))
    raise UsageError(f"{flag} {name} is neither a model folder (config.json) nor an experiment dir (args.json)")


def base_name(source: str, flag: str) -> str | None:
    """Hub id or absolute folder of the weights below whatever adapter is in `source`; None for `tiny`."""
    if source == "tiny":
        return None
    quiet_libraries()
    config = lora.adapter_config(source, flag)
    if config is not None:
        return lora.base_of(config, source, flag)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def holds_reward_model(source: str) -> bool:
    """Whether a local folder was saved with a scalar head; False for a hub id."""
    said = saved_config(source)
    return said.get("task_type") == "SEQ_CLS" or "ForSequenceClassification" in str(said.get("architectures"))


def saved_config(source: str) -> dict[str, Any]:
    """Config of the adapter or else of the model in a local folder; empty when there is none or it cannot be read."""
    for name in (lora.ADAPTER_CONFIG, "config.json"):
        if (path := Path(source) / name).is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return {}  # loading it says what is wrong with it
    return {}


# ---------------------------------------------------------------------------------------------------- fine-tuning modes
def _choose_what_learns(
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


def _switch_off_dropout(model: nn.Module) -> None:
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


# --------------------------------------------------------------------------------------------------------------- saving
def export(module: Role, folder: Path, base_dir: Path, merge: bool = False) -> None:
    """Write a role's model so that plain transformers loads it: whole, or as an adapter folder that names its base.

    A base that is stored nowhere is written to `base_dir`, once.
    """
    if merge or not module.adapters:
        merged_model(module).save_pretrained(folder)
        return
    if module.base is None:
        if not base_dir.is_dir():
            write_folder(base_dir, lambda path: _save_base(module.model, path))
        module.base = str(base_dir.resolve())
    _save_adapter(module, folder)


def _save_adapter(module: Role, folder: Path) -> None:
    head = getattr(module.model, "score", None)
    lora.save_adapter(module.model, module.adapters, None if head is None else head.weight, module.base, folder)
    if head is None and module.model.generation_config is not None:
        module.model.generation_config.save_pretrained(folder)


def _save_base(model: nn.Module, folder: Path) -> None:
    """The weights below the adapters."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    is_scalar = hasattr(model, "score")
    auto_class = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):  # saving changes nothing in what is drawn next
        base = auto_class.from_config(model.config)
    base.load_state_dict(lora.without_adapters(model))
    if not is_scalar:
        base.generation_config = model.generation_config
    base.save_pretrained(folder)


def merged_model(module: Role) -> nn.Module:
    """The Hugging Face model with its adapters merged into a copy of its weights; the model itself without any.

    Quantised weights would stay rounded, so there it is a copy of the base as it is on disk.
    """
    if not module.adapters:
        return module.model
    if not is_quantised(module.model):
        return lora.merge(copy.deepcopy(module.model), module.adapters)
    with TemporaryDirectory() as folder:
        _save_adapter(module, Path(folder))
        merged = _merged_from(folder)
    merged.config.pad_token_id = module.model.config.pad_token_id
    if not hasattr(merged, "score"):
        merged.generation_config = module.model.generation_config
    return merged


def _merged_from(folder: str) -> nn.Module:
    """The model that an adapter folder makes of its base."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scalar = holds_reward_model(folder)
    auto_class = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    options = {"num_labels": 1} if scalar else {}
    model, _, loaded = _load(auto_class, folder, "the adapter", ModelArgs(merge=True), None, **options)
    _choose_what_learns(model, ModelArgs(), loaded, "")
    return model


@contextmanager
def self_contained(folder: Path) -> Iterator[Path]:
    """A checkpoint that loads anywhere: the folder, or a merged one where it is an adapter on a folder of this disk."""
    is_adapter = (folder / lora.ADAPTER_CONFIG).is_file()
    if not is_adapter or not Path(base_name(str(folder), "the checkpoint")).is_dir():
        yield folder
        return
    model = _merged_from(str(folder))
    model.config.pad_token_id = load_tokenizer(None, str(folder)).pad_token_id
    with TemporaryDirectory(dir=folder.parent) as temporary:
        whole = Path(temporary) / folder.name
        shutil.copytree(folder, whole, ignore=shutil.ignore_patterns("adapter_*", MANIFEST, "resume.pt"))
        model.save_pretrained(whole)
        yield whole
