"""Models: a language model that scores its own tokens, a model with a scalar head, and how they are loaded and saved.

A name is a hub id, a local Hugging Face folder, an experiment dir (its newest intact checkpoint), a single
checkpoint, or `tiny`: a Llama of under 1M parameters built from its config. Adapters (LoRA) come from peft and are
merged into every checkpoint, so that any stage can start from any other and plain transformers can load all of them.

Left out: quantised loading, and one backbone shared by several roles.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.common.args import ModelArgs, UsageError
from lightrlhf.common.batch import Batch, Row
from lightrlhf.common.ops import head_logprobs, position_ids

TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # about hidden_size ** -0.5, as for a wide model 0.02 is
}
MAX_TINY_POSITIONS = 2048


class TokenStats(NamedTuple):
    """What a language model says of the actions of a batch; each (B, T-1), 0 where there is no action."""

    logprobs: Tensor
    entropy: Tensor | None  # only when asked for
    mean_logprobs: Tensor | None  # over the vocabulary; only when asked for


class Policy(nn.Module):
    """A causal language model. Its forward pass gives log-probabilities, and makes logits only where actions are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head_is_plain = _head_is_plain(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        sequence_ids: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_mean: bool = False,
    ) -> TokenStats:
        """(B, T) ids and masks -> log-probabilities of the actions at `temperature`, entropies and means if asked."""
        if not len(input_ids):
            stats = self(*_stand_in(input_ids), None, temperature, with_entropy, with_mean)
            return TokenStats(*(None if row is None else row[:0] for row in stats))
        inputs = model_inputs(self.model, input_ids, attention_mask, sequence_ids)
        targets = input_ids[:, 1:][action_mask]  # (N,)
        if self.head_is_plain:
            states = self.model.base_model(**inputs).last_hidden_state[:, :-1][action_mask]  # (N, H)
            head = self.model.get_output_embeddings()
        else:  # the architecture changes its logits behind the head (soft caps, scales)
            states, head = self.model(**inputs).logits[:, :-1][action_mask], nn.Identity()  # (N, V)
        rows = head_logprobs(states, head, targets, temperature, with_entropy, with_mean)
        return TokenStats(*(None if row is None else _scatter(row, action_mask) for row in rows))


class ScalarModel(nn.Module):
    """A transformer with a head of one number per token: a reward model or a critic."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) ids and mask -> (B, T) float32, the head at each token."""
        if not len(input_ids):
            return self(*_stand_in(input_ids)[:2])[:0]
        hidden = self.model.base_model(**model_inputs(self.model, input_ids, attention_mask)).last_hidden_state
        return self.model.score(hidden)[..., 0].float()


def last_token(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Value at the last real token of each row: (B, T) -> (B,)."""
    last = (attention_mask.long() * torch.arange(values.shape[1], device=values.device)).argmax(1)
    return values.gather(1, last[:, None])[:, 0]


def policy_inputs(batch: Batch) -> dict[str, Any]:
    """The tensors of a batch that `Policy` takes."""
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "action_mask": batch.action_mask,
        "sequence_ids": batch.sequence_ids,
    }


def model_inputs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, sequence_ids: Tensor | None = None
) -> dict[str, Any]:
    """Arguments of a cacheless forward pass: positions always given, attention within each packed example only."""
    if sequence_ids is None:
        positions, mask = position_ids(attention_mask), attention_mask.long()
    else:
        positions, mask = _packed_positions(sequence_ids), _packed_attention(sequence_ids, model.dtype)
    inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
    if model.config.model_type != "bloom":  # the only architecture without position ids
        inputs["position_ids"] = positions
    return inputs


@torch.no_grad()
def check_packing(policy: Policy, name: str, longest: int = 0) -> None:
    """Raises: UsageError when two packed examples do not score as they do alone on this architecture.

    longest: tokens of the longest example. Our mask of packed rows knows no sliding window, so none may be shorter.
    """
    kind = policy.model.config.model_type
    window = getattr(policy.model.config, "sliding_window", None)
    if window and longest > window:
        raise UsageError(
            f"--packing True: {name} ({kind}) looks back {window} tokens and the longest row has {longest}; "
            "use --packing False"
        )
    was_training = policy.training
    policy.eval()
    device = next(policy.parameters()).device
    ids = torch.arange(2, 14, device=device).remainder(policy.model.config.vocab_size)[None]  # (1, 12)
    alone = torch.cat([policy(part, part >= 0, part[:, 1:] >= 0).logprobs for part in ids.split([7, 5], 1)], 1)
    sequence_ids = torch.tensor([[1] * 7 + [2] * 5], device=device)
    action_mask = torch.ones(1, 11, dtype=torch.bool, device=device)
    try:
        packed = policy(ids, ids >= 0, action_mask, sequence_ids).logprobs[:, [*range(6), *range(7, 11)]]
    except (ValueError, RuntimeError) as problem:  # positions by ALiBi are made from a plain mask
        raise UsageError(
            f"--packing True: {name} ({kind}) takes no mask of packed rows ({_first_line(problem)}); "
            "use --packing False"
        ) from None
    policy.train(was_training)
    if not torch.allclose(alone, packed, atol=0.02 if policy.model.dtype != torch.float32 else 1e-3):
        raise UsageError(
            f"--packing True: {name} ({kind}) lets packed examples see each other "
            f"(log-probabilities differ by {(alone - packed).abs().max():.3f}); use --packing False"
        )


# -------------------------------------------------------------------------------------------------------- loading
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
        raise UsageError(f"no tokenizer in {source}: {_first_line(problem)}") from None
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

    from lightrlhf.common.checkpoint import checkpoints

    folder = next(reversed(checkpoints(Path(model_name))), Path(model_name))
    if not (folder / "tokenizer.json").is_file():
        return
    own = AutoTokenizer.from_pretrained(str(folder)).get_vocab()  # may know more: a reward model's pad token
    if any(own.get(token) != index for token, index in tokenizer.get_vocab().items()):
        raise UsageError(
            f"{data_dir} was prepared with another tokenizer than that of {model_name}; "
            f"prepare the data again with --tokenizer_name {folder}"
        )


def load_policy(name: str, args: ModelArgs, tokenizer: Any, flag: str = "--model_name") -> Policy:
    """A policy with the learning part of `args.finetune_mode` switched on.

    Raises: UsageError naming `flag` when the name cannot be loaded or holds a reward model.
    """
    from transformers import AutoModelForCausalLM

    if name == "tiny":
        model = AutoModelForCausalLM.from_config(tiny_config(tokenizer))
    else:
        source = resolve(name, flag)
        if "ForSequenceClassification" in str(architectures(source)):
            raise UsageError(f"{flag} {name} holds a reward model, not a language model; give an SFT experiment dir")
        model = _from_pretrained(AutoModelForCausalLM, source, flag, trust_remote_code=args.trust_remote_code)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    _prepare(model, args)
    return Policy(model)


def load_scalar(
    name: str, args: ModelArgs, tokenizer: Any, seed: int, flag: str = "--model_name", needs_head: bool = False
) -> ScalarModel:
    """A model with a scalar head, from a reward model or (with a new head, drawn from `seed`) a language model.

    Raises: UsageError naming `flag` when it cannot be loaded, or is no reward model where one is needed.
    """
    from transformers import AutoModelForSequenceClassification

    if name == "tiny":
        model = AutoModelForSequenceClassification.from_config(tiny_config(tokenizer, num_labels=1))
        has_head = False
    else:
        source = resolve(name, flag)
        has_head = "ForSequenceClassification" in str(architectures(source))
        if needs_head and not has_head and architectures(source):
            raise UsageError(f"{flag} {name} holds a language model, not a reward model; give an RM experiment dir")
        model = _from_pretrained(
            AutoModelForSequenceClassification, source, flag, trust_remote_code=args.trust_remote_code, num_labels=1
        )
        if needs_head and getattr(model.config, "compares_pairs", False):
            raise UsageError(
                f"{flag} {name} compares two responses and cannot score one; give a reward model of another --loss_type"
            )
        if has_head and model.config.num_labels != 1:
            raise UsageError(f"{flag} {name} has {model.config.num_labels} labels; a reward model has one")
    if not has_head:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(model.score.weight.shape, generator=generator) * (model.score.in_features + 1) ** -0.5
        model.score.weight.data.copy_(weight)
    _prepare(model, args)
    return ScalarModel(model)


def separate_pad_token(module: ScalarModel, tokenizer: Any) -> None:
    """Give a reward model a pad token that is not its end token: transformers scores the last id that is not pad."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > vocabulary_size(module):
            module.model.resize_token_embeddings(len(tokenizer))
    module.model.config.pad_token_id = tokenizer.pad_token_id


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


def starting_model(args: Any) -> tuple[str, str]:
    """What a later stage starts from, `--sft_experiment_dir` or else `--model_name`, and the flag that said so."""
    if args.sft_experiment_dir:
        return args.sft_experiment_dir, "--sft_experiment_dir"
    return args.model_name, "--model_name"


def resolve(name: str, flag: str = "--model_name") -> str:
    """Folder or hub id behind a name; an experiment dir becomes its newest intact checkpoint.

    Raises: UsageError when a folder is neither, or an experiment dir has no intact checkpoint.
    """
    from lightrlhf.common.checkpoint import newest_checkpoint, verify_checkpoint

    path = Path(name)
    if not path.is_dir():
        if flag != "--model_name" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UsageError(f"{flag} {name} does not exist")
        return name
    if path.name.startswith("checkpoint-"):
        verify_checkpoint(path)
        return name
    if (path / "config.json").is_file():
        return name
    if (path / "args.json").is_file():
        return str(newest_checkpoint(path, flag))
    raise UsageError(f"{flag} {name} is neither a model folder (config.json) nor an experiment dir (args.json)")


def architectures(source: str) -> list[str]:
    """The architectures a local folder was saved with; empty for a hub id."""
    config = Path(source) / "config.json"
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("architectures") or [] if config.is_file() else []
    except ValueError:
        return []  # loading the model says what is wrong with it


def vocabulary_size(module: Policy | ScalarModel) -> int:
    """Rows of the embedding table: ids at or above have no meaning to the model."""
    return module.model.get_input_embeddings().weight.shape[0]


def check_positions(rows: list[Row], module: Policy | ScalarModel, where: str) -> None:
    """Raises: UsageError when a row is longer than the model has positions."""
    room = getattr(module.model.config, "max_position_embeddings", None)
    longest = max(len(row[key]) for row in rows for key in row if key.endswith("input_ids"))
    if room and longest > room:
        raise UsageError(
            f"{where} holds a row of {longest} tokens, but the model has {room} positions; "
            f"prepare the data again with --max_length {room}"
        )


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """All and learning parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns)


# ----------------------------------------------------------------------------------------------- fine-tuning modes
def _prepare(model: nn.Module, args: ModelArgs) -> None:
    model.float()
    if args.disable_dropout:
        for owner in (*model.modules(), model.config):  # some read a plain number of the module, Falcon of the config
            if isinstance(owner, nn.Dropout):
                owner.p = 0.0
            for name in ("dropout", "attention_dropout", "hidden_dropout"):
                if isinstance(getattr(owner, name, None), float):
                    setattr(owner, name, 0.0)
    if args.finetune_mode == "last_layer":
        _train_last_layer(model)
    elif args.finetune_mode == "lora":
        _add_adapters(model, args)


def _train_last_layer(model: nn.Module) -> None:
    """Only the last transformer layer, what stands behind it and the head learn."""
    layers = max(
        (m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: sum(1 for _ in m.parameters())
    )
    model.requires_grad_(False)
    layers[-1].requires_grad_(True)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    elif model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.get_output_embeddings().requires_grad_(True)


def _add_adapters(model: nn.Module, args: ModelArgs) -> None:
    quiet_libraries()
    from peft import LoraConfig, inject_adapter_in_model

    targets = args.lora_targets.split(",")
    if args.lora_targets == "all-linear":
        heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
        linear = [n for n, m in model.named_modules() if _is_linear(m) and id(m) not in heads]
        targets = sorted({name.rpartition(".")[2] for name in linear})
    config = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, target_modules=targets
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as problem:
        raise UsageError(f"--lora_targets {args.lora_targets}: {_first_line(problem)}") from None
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def merged_model(module: Policy | ScalarModel) -> nn.Module:
    """The Hugging Face model, adapters merged into its weights: a copy when there are any, else the model itself."""
    if not any("lora_" in name for name, _ in module.named_parameters()):
        return module.model
    import copy

    from peft.tuners.lora import LoraLayer

    model = copy.deepcopy(module.model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
            setattr(parent, name.rpartition(".")[2], layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False
    return model


# -------------------------------------------------------------------------------------------------------- helpers
def quiet_libraries() -> None:
    """No progress bars, hints or telemetry of the libraries in a program's output; its own lines stay readable."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _from_pretrained(auto_class: Any, source: str, flag: str, **options: Any) -> nn.Module:
    quiet_libraries()
    from safetensors import SafetensorError

    try:
        return auto_class.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise UsageError(f"{flag} {source} cannot be loaded: {_first_line(problem)}") from None


def _first_line(problem: Exception) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _stand_in(nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row for a rank without any, which still has to take part when split weights are gathered; it learns nothing."""
    ids = nothing.new_zeros(1, 2)
    return ids, ids == 0, ids[:, 1:] == 0


def _scatter(row: Tensor, action_mask: Tensor) -> Tensor:
    """(N,) values of the actions back to (B, T-1), 0 elsewhere."""
    return torch.zeros(action_mask.shape, dtype=row.dtype, device=row.device).masked_scatter(action_mask, row)


@torch.no_grad()
def _head_is_plain(model: nn.Module) -> bool:
    """Whether the head applied to the last hidden state gives the model's logits, tried on a few tokens."""
    ids = torch.arange(4, device=model.device)[None]
    was_training = model.training
    model.eval()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    plain: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    same = torch.allclose(plain(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-4, rtol=1e-3)
    model.train(was_training)
    return same


def _packed_positions(sequence_ids: Tensor) -> Tensor:
    """Positions that restart with each example: (B, T) -> (B, T)."""
    index = torch.arange(sequence_ids.shape[1], device=sequence_ids.device).expand_as(sequence_ids)
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return index - torch.where(starts, index, torch.zeros_like(index)).cummax(1).values


def _packed_attention(sequence_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask within each example: (B, T) -> (B, 1, T, T), 0 where seen."""
    width = sequence_ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=sequence_ids.device).tril()
    seen = (sequence_ids[:, :, None] == sequence_ids[:, None, :]) & causal
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
