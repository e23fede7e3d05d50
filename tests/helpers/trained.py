"""Models with changed weights, and models read by plain transformers."""

from __future__ import annotations

import json

import torch


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
