"""Models with changed weights, and models read by plain transformers."""

import json
from pathlib import Path

import torch

from helpers import save_model
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy
from lightrlhf.models.saving import export


def train_a_little(module) -> None:
    """Change every trainable parameter, as optimiser steps would."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model(input_ids=ids, use_cache=False).logits.detach()


def plain(folder, scalar: bool = False):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if scalar:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=0).eval()
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def config_of(folder) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def tied_adapter(architecture: str, folder: Path, tokenizer, **lora) -> tuple[Policy, Path]:
    """A model whose output layer is tied, with a trained adapter on that and other layers, and its saved folder."""
    base = save_model(architecture, folder / "tied", tokenizer, tie_word_embeddings=True)
    targets = {"llama": "lm_head,q_proj", "gpt2": "lm_head,c_attn", "falcon": "lm_head,dense"}[architecture]
    policy = load_policy(str(base), ModelArgs(finetune_mode="lora", lora_targets=targets, **lora), tokenizer)
    train_a_little(policy)
    saved = folder / "adapter"
    saved.mkdir()
    export(policy, saved, folder / "base")
    tokenizer.save_pretrained(saved)
    return policy, saved
