"""Adapters on matrices that layers share, such as an output layer that is tied to the embedding.

An adapter changes one of the layers that share a matrix, but its merge would change all of them. So an output layer
gets its own matrix before the merge, and the model's config is updated. Other shared matrices and embeddings, which
are not linear layers, get no adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import PreTrainedModel


def is_tied(model: PreTrainedModel, layer: Any) -> bool:
    """Whether a layer with adapters shares the embedding's matrix.

    The storage decides: in a model that was gathered from ranks, tied layers have separate parameters on it.
    """
    embedding: Any = model.get_input_embeddings()
    return layer.get_base_layer().weight.data_ptr() == embedding.weight.data_ptr()


def would_untie(model: PreTrainedModel, adapters: Sequence[str]) -> bool:
    """Whether the merge of these adapters would untie the output layer."""
    on_output = getattr(model.get_output_embeddings(), "lora_A", {})
    return model.config.get_text_config().tie_word_embeddings and any(name in on_output for name in adapters)


def untie(model: PreTrainedModel, layer: Any) -> None:
    """Give an output layer with adapters its own matrix, in place."""
    base = layer.get_base_layer()
    base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=base.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def check_layers(model: PreTrainedModel, layers: Mapping[str, Any], adapter: str, named: str, remedy: str) -> None:
    """Check the layers of a new adapter. layers: all with adapters; named, remedy: for the error message.

    Raises: UsageError for an embedding, and for a matrix that layers other than embedding and output layer share.
    """
    places = Counter(
        id(parameter)
        for module in model.modules()
        for child in module._modules.values()  # includes a module that is registered twice
        if child is not None
        for parameter in child.parameters(recurse=False)
    )
    head = model.get_output_embeddings()
    for name, layer in layers.items():
        if adapter in layer.lora_embedding_A:
            raise UsageError(f"{named}: {name} is an embedding, and only linear layers have adapters; {remedy}")
        if adapter in layer.lora_A and layer is not head and places[id(layer.get_base_layer().weight)] > 1:
            raise UsageError(f"{named}: {name} shares its matrix with another layer, so it has no adapter; {remedy}")
