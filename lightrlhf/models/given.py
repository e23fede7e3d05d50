"""Models given from Python, in the role of a policy or as the start of a critic."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError, list_names
from lightrlhf.cli.groups import DataArgs, DataSetsArgs, ModelArgs, RunArgs
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.models import frozen, lora
from lightrlhf.models.architecture import scalar_head
from lightrlhf.models.complete import HEADS
from lightrlhf.models.loading import (
    check_weights,
    choose_attention,
    choose_trainable,
    grow_vocabulary,
    load_policy,
    new_head,
    scalar_on_backbone,
    switch_off_dropout,
)
from lightrlhf.models.names import starting_model
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.tokenizer import check_same_ids, check_stored_ids, store_ends


def load_start(
    given: PreTrainedModel | Policy | None, args: ModelArgs, tokenizer: Tokenizer, shares: bool = False
) -> Policy:
    """The policy that a program starts from: the given model, else `--sft_experiment_dir` or `--model_name`.

    shares: whether other roles may use its backbone, with LoRA.
    """
    if isinstance(args, RunArgs) and args.resume_from:
        where = args.data_name if isinstance(args, DataArgs | DataSetsArgs) else "the data"
        check_stored_ids(tokenizer, where, args.resume_from)
    if given is not None:
        return as_policy(given, args, tokenizer, shares)
    source, flag = starting_model(args)
    return load_policy(source, args, tokenizer, flag, shares)


def as_policy(model: PreTrainedModel | Policy, args: ModelArgs, tokenizer: Tokenizer, shares: bool = False) -> Policy:
    """A causal language model as a policy with the trainable part of `--finetune_mode`.

    The model itself is trained, in float32, not a copy; of a `Policy` its model. With LoRA its weights are saved once,
    as the base.
    Raises: UsageError when it is not a causal language model, or has adapters.
    """
    lora.check_shared(args, shares)
    model = model.model if isinstance(model, Policy) else model
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UsageError(f"policy: a causal language model of transformers is needed, not a {type(model).__name__}")
    if lora.lora_layers(model):
        raise UsageError("policy: the model has adapters; merge them, or give its checkpoint as --sft_experiment_dir")
    if is_quantised(model):
        raise UsageError("policy: the model is quantised; give its folder as --model_name with --load_in_4bit True")
    check_same_ids(tokenizer, model)
    if args.holds_base:  # without a copy in float32, which may not fit beside it
        for buffer in model.buffers():
            buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
        frozen.hold(model.requires_grad_(False))
    else:
        if frozen.is_held(model):
            frozen.release(model)
        model.float().requires_grad_(True)
    check_weights(model, "policy: the given model")
    grow_vocabulary(model, tokenizer, "the given policy")
    if args.disable_dropout:
        switch_off_dropout(model)
    store_ends(model, tokenizer)
    adapters = choose_trainable(model, args, {}, "policy")
    policy = Policy(model, adapters, None, shares=shares and bool(adapters))
    choose_attention(model, args, "policy")
    return policy


def critic_from(policy: Policy, args: ModelArgs, seed: int) -> ScalarModel:
    """A critic on a copy of a policy's weights, or on its shared backbone, with a new head drawn from `seed`."""
    from transformers import AutoModelForSequenceClassification

    if policy.shares:
        return scalar_on_backbone(policy, None, args, seed)
    config: Any = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    config._attn_implementation = None  # chosen below
    with torch.random.fork_rng(devices=[]):  # the head is drawn from `seed`
        try:
            model = AutoModelForSequenceClassification.from_config(config).float()
        except ValueError:  # its message lists all classes that there are
            raise UsageError(
                f"policy: transformers has no {AutoModelForSequenceClassification.__name__} of the architecture "
                f"{config.model_type}, so it cannot start a critic; take one such as Llama, Qwen or GPT-2"
            ) from None
    missing = model.load_state_dict(lora.base_state_dict(policy.model), strict=False).missing_keys
    if other := [key for key in missing if key.split(".")[0] not in HEADS]:
        raise UsageError(
            f"policy: its weights lack {list_names(other)} of a {type(model).__name__} by its config, so they cannot "
            "start a critic or reward model; give a model that is whole"
        )
    if args.holds_base:
        frozen.hold(model)
    head = scalar_head(model)
    head.weight.data.copy_(new_head(head.in_features, seed))
    if args.disable_dropout:
        switch_off_dropout(model)
    critic = ScalarModel(model, choose_trainable(model, args, {}, "scalar"), None)
    choose_attention(model, args, "critic")
    return critic
