"""Prompts and decoding steps of Llama-like models on a CPU, with a copy of their weights that oneDNN has packed.

A decoding step multiplies few rows with all weights. With packed weights such products take half to nine tenths of the
time; queries, keys and values, and the two inputs of the gate, become one product each, with the weights of the norm
before them. Prompts are one row of tokens without padding; attention alone has a padded row for each. The copy is made
for each call of the engine, with the weights of that moment, in the dtype of the products: float32, or under autocast
bfloat16. Adapters are merged into it in float32; in bfloat16, where small changes would be lost, they stay products of
their own.

Attention reads the columns of each slot alone (`cache`): on CPUs torch's own repeats keys and values for each
query of a group, and is slow in bfloat16 where a text has a single query.

Left out: other architectures, sliding windows, quantised weights, DoRA, GPUs and processors other than x86, for which
the engine calls the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrlhf.cpu.cache import Attention, RaggedLayer, has_fast_sums
from lightrlhf.data.types import PreTrainedModel

ARCHITECTURES = {"Llama", "Mistral", "Qwen2", "Qwen3"}  # until the engine's trial finds other log-probabilities
PLAIN = {"Linear", "HeldLinear", "Embedding", "HeldEmbedding"}  # layers, torch's and those held in bfloat16
LEAST_STEPS = 16  # of a call: packing costs what a few of them gain
MOST_BYTES = 2**31  # of a copy: beyond, its memory matters more
ROWS = 64  # that the layout is made for; with other numbers it is as fast


class Norm:
    """Root mean square norm (Zhang and Sennrich 2019) without its weights: (..., H) -> (..., H) in float32.

    x / sqrt(mean(x^2) + epsilon) is `scale` times x / hypot(|x|, sqrt(H epsilon)), which is what is computed, in half
    as many operators; `scale`, sqrt(H), is left to the weights.
    """

    def __init__(self, norm: Any) -> None:
        size = norm.weight.numel()
        self.scale = math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * norm.variance_epsilon))

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = inputs.float()
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)  # (..., 1)
        return inputs / length.hypot(self.floor)


class PackedLinear:
    """Linear layers with the same input, and the norm before them, as one product: (S, in) -> (S, sum of out).

    The norm's weights are multiplied into the layers'. order: of the outputs, if not as the layers.
    """

    def __init__(
        self, layers: Sequence[nn.Module], dtype: torch.dtype, norm: Any = None, order: Tensor | None = None
    ) -> None:
        bases: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        weight = torch.cat([base.weight.detach().float() for base in bases])  # (sum of out, in)
        down, up = adapters_of(layers)
        if dtype is torch.float32:
            weight, down = weight.addmm_(up, down), down[:0]
        self.norm = None if norm is None else Norm(norm)
        if self.norm is not None:
            by_input = norm.weight.detach().float() * self.norm.scale  # (in,)
            weight, down = weight.mul_(by_input), down.mul_(by_input)
        biases = [base.weight.new_zeros(len(base.weight)) if base.bias is None else base.bias for base in bases]
        has_bias = any(base.bias is not None for base in bases)
        bias = torch.cat([bias.detach().to(dtype) for bias in biases]) if has_bias else None
        if order is not None:
            weight, up, bias = weight[order], up[order], None if bias is None else bias[order]
        self.bias, weight = bias, weight.to(dtype)
        self.down, self.up = down.to(dtype), up.to(dtype)  # (rank, in), (sum of out, rank)
        self.is_packed = packs(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.is_packed else weight

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.norm is not None:
            inputs = self.norm(inputs)
        inputs = inputs.to(self.up.dtype)
        if self.is_packed:
            outputs = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        else:
            outputs = F.linear(inputs, self.weight, self.bias)
        return torch.addmm(outputs, inputs @ self.down.t(), self.up.t()) if len(self.down) else outputs


class Layer(NamedTuple):
    """The products of a step in one layer."""

    project: PackedLinear  # queries, keys and values
    head_norm: tuple[Norm, Tensor] | None  # with its weights (heads + groups, D), in Qwen3
    output: PackedLinear
    gate_up: PackedLinear
    activation: Callable[[Tensor], Tensor]
    down: PackedLinear


class PromptStates(NamedTuple):
    """Keys and values of prompts in one layer."""

    keys: Tensor  # (P, groups, W, D), prompts right-aligned
    values: Tensor

    def get_seq_length(self) -> int:
        return self.keys.shape[2]


class PackedDecoder:
    """Prompts and decoding steps over packed weights: what the model computes, up to rounding."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        inner: Any = model.base_model
        attention = inner.layers[0].self_attn
        self.head_size = attention.head_dim
        products = attention.q_proj, attention.k_proj
        self.heads, self.groups = (product.out_features // self.head_size for product in products)
        self.scale = math.sqrt(attention.scaling)  # of queries and of keys
        self.pairs = torch.arange(self.head_size).view(2, -1).t().flatten()  # (D,): 0, D/2, 1, D/2 + 1, ...
        self.embed, self.rotary = inner.embed_tokens, inner.rotary_emb
        self.cache_dtype = torch.float32 if dtype is torch.float32 else torch.float16
        self.layers = [self._pack_layer(layer, dtype) for layer in inner.layers]
        self.head = PackedLinear([model.get_output_embeddings()], dtype, inner.norm)

    def __call__(self, ids: Tensor, positions: Tensor, attention: Attention, caches: Sequence[RaggedLayer]) -> Tensor:
        """Logits (S, V) after the tokens ids (S,) at positions (S,).

        attention: which columns each slot attends to; caches: the layers', to which the tokens' keys and values
        are added.
        """
        attention.begin_step()

        def attend(number: int, turned: Tensor, values: Tensor) -> Tensor:
            caches[number].update(turned[:, self.heads :], values)
            return attention(turned, caches[number])

        with torch.autocast("cpu", enabled=False):
            return self.head(self.hidden_states(ids, positions, attend))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[PromptStates], Tensor, Tensor]:
        """The states of whole prompts in each layer, their mask (P, W), and the logits (P, V) after each."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        count, width = len(prompts), int(lengths.max())
        columns = torch.arange(width)
        mask = columns >= width - lengths[:, None]  # (P, W), right-aligned
        right = mask.flatten().nonzero()[:, 0]  # (N,) places of tokens in the cache
        left = (columns < lengths[:, None]).flatten().nonzero()[:, 0]  # in attention, where no token sees padding
        states: list[PromptStates] = []

        def attend(number: int, turned: Tensor, values: Tensor) -> Tensor:
            tokens = torch.cat([turned, values], 1)  # (N, heads + 2 groups, D)
            rows = tokens.new_zeros(count * width, *tokens.shape[1:]).index_copy_(0, left, tokens)
            parts = rows.view(count, width, -1, self.head_size).transpose(1, 2)
            queries, keys, values = parts.split((self.heads, self.groups, self.groups), 1)  # (P, heads, W, D)
            is_grouped = self.heads != self.groups
            outputs = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=1.0, enable_gqa=is_grouped
            )
            kept = tokens.new_zeros(count * width, 2 * self.groups, self.head_size)
            kept.index_copy_(0, right, tokens[:, self.heads :])
            parts = kept.view(count, width, -1, self.head_size).transpose(1, 2)
            keys, values = parts.to(self.cache_dtype).split(self.groups, 1)
            states.append(PromptStates(keys, values))
            return outputs.transpose(1, 2).reshape(count * width, -1).index_select(0, left)

        with torch.autocast("cpu", enabled=False):
            ids = torch.tensor([token for prompt in prompts for token in prompt])  # (N,)
            hidden = self.hidden_states(ids, left % width, attend)
            logits = self.head(hidden[lengths.cumsum(0) - 1])
        return states, mask, logits

    def states_of(self, layers: Sequence[Any]) -> list[PromptStates]:
        """The states of prompts that the model computed, layers of its cache, as they are kept here."""
        return [
            PromptStates(
                (layer.keys[..., self.pairs] * self.scale).to(self.cache_dtype), layer.values.to(self.cache_dtype)
            )
            for layer in layers
        ]

    def hidden_states(self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        """Hidden states (N, H) of tokens ids (N,) at positions (N,).

        attend: of a layer's number, rotated queries and keys (N, heads + groups, D) and values (N, groups, D), the
        outputs of attention (N, heads * D).
        """
        hidden = self.embed(ids)  # (N, H)
        cos, sin = (part[:, 0, None].float() for part in self.rotary(hidden, positions[:, None]))  # (N, 1, D)
        half = self.head_size // 2
        turn = torch.complex(cos[..., :half], sin[..., :half]) * self.scale  # (N, 1, D / 2)
        for number, layer in enumerate(self.layers):
            states = layer.project(hidden).view(len(ids), -1, self.head_size).float()
            turned, values = states.split((self.heads + self.groups, self.groups), 1)
            hidden = hidden + layer.output(attend(number, self._rotate(layer, turned, turn), values))
            gate, up = layer.gate_up(hidden).chunk(2, -1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        return hidden

    def _rotate(self, layer: Layer, states: Tensor, turn: Tensor) -> Tensor:
        """Queries and keys (S, heads + groups, D), rotated by their positions.

        Rotary positions turn pairs of numbers, which are next to each other here: numbers of the complex plane.
        """
        if layer.head_norm is not None:
            norm, weight = layer.head_norm
            states = norm(states) * weight
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)))  # (S, heads + groups, D / 2)
        return torch.view_as_real(pairs * turn).flatten(-2)

    def _pack_layer(self, layer: Any, dtype: torch.dtype) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        turned = self.heads + self.groups
        order = torch.arange((turned + self.groups) * self.head_size).view(-1, self.head_size)
        order[:turned] = order[:turned, self.pairs]
        head_norm = None
        if norms := norms_of_heads(attention):
            norm = Norm(norms[0])
            weights = [one.weight.detach().float() * norm.scale for one in norms]
            weight = torch.stack([weights[0]] * self.heads + [weights[1]] * self.groups)
            head_norm = norm, weight[:, self.pairs]
        return Layer(
            project=PackedLinear(projections, dtype, layer.input_layernorm, order.flatten()),
            head_norm=head_norm,
            output=PackedLinear([attention.o_proj], dtype),
            gate_up=PackedLinear([mlp.gate_proj, mlp.up_proj], dtype, layer.post_attention_layernorm),
            activation=mlp.act_fn,
            down=PackedLinear([mlp.down_proj], dtype),
        )


def pack_decoder(model: PreTrainedModel, steps: int, own: torch.dtype) -> PackedDecoder | None:
    """A packed copy of a model with its active adapters, for a call of `steps` steps; None where it would not pay.

    own: see `packed_dtype`.
    """
    dtype = packed_dtype(model, steps, own)
    has_data = all(type(parameter.data) is Tensor for parameter in model.parameters())  # not when memory is estimated
    return PackedDecoder(model, dtype) if dtype and has_data else None


class KeptPacking:
    """`pack_decoder` that keeps its last copy, for calls between which no weight and no adapter changes."""

    def __init__(self) -> None:
        self.copies: dict[torch.dtype, PackedDecoder | None] = {}

    def __call__(self, model: PreTrainedModel, steps: int, own: torch.dtype) -> PackedDecoder | None:
        dtype = packed_dtype(model, steps, own)
        if dtype is None:
            return None
        if dtype not in self.copies:
            self.copies = {dtype: pack_decoder(model, steps, own)}
        return self.copies[dtype]


def exclude(model: PreTrainedModel) -> None:
    """Pack no model of this one's architecture from now on."""
    ARCHITECTURES.discard(type(model).__name__.removesuffix("ForCausalLM"))


def packed_dtype(model: PreTrainedModel, steps: int, own: torch.dtype) -> torch.dtype | None:
    """The dtype of the copy for a call of `steps` steps; None where the model itself is called.

    own: the dtype of the model's hidden states without autocast.
    """
    if model.device.type != "cpu" or steps < LEAST_STEPS or not has_fast_sums() or not is_known(model):
        return None
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else own
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return dtype if dtype in (torch.float32, torch.bfloat16) and size <= MOST_BYTES else None


def is_known(model: PreTrainedModel) -> bool:
    """Whether the decoder computes the same as a model: its architecture, without changed layers or windows."""
    name = type(model).__name__.removesuffix("ForCausalLM")
    if name not in ARCHITECTURES or not type(model).__module__.startswith("transformers."):
        return False
    layers: Any = model.base_model.layers
    if any(type(layer).__name__ != f"{name}DecoderLayer" for layer in layers):  # as in a sharded model
        return False
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms += [norm for layer in layers for norm in norms_of_heads(layer.self_attn)]
    if any(type(norm).__name__ != f"{name}RMSNorm" for norm in (*norms, model.base_model.norm)):
        return False
    if getattr(model.config, "sliding_window", None) or type(model.get_input_embeddings()).__name__ not in PLAIN:
        return False
    found = [getattr(layer.self_attn, name) for layer in layers for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    found += [getattr(layer.mlp, name) for layer in layers for name in ("gate_proj", "up_proj", "down_proj")]
    return all(map(is_plain, [*found, model.get_output_embeddings()]))


def norms_of_heads(attention: Any) -> tuple[Any, ...]:
    """The norms of each head's queries and keys, where an architecture has them."""
    return (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()


def is_plain(layer: Any) -> bool:
    """Whether a layer is a linear one, with nothing on it but adapters of LoRA."""
    base = getattr(layer, "base_layer", layer)
    others = [name for name in ("lora_magnitude_vector", "lora_variant") if len(getattr(layer, name, ()))]
    is_linear = isinstance(base, nn.Linear) and type(base).__name__ in PLAIN
    return is_linear and not others and not any(getattr(layer, "lora_bias", {}).values())


def adapters_of(layers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The active adapters of layers with the same input, as one: (rank, in), and (sum of out, rank) with its scale."""
    first: Any = getattr(layers[0], "base_layer", layers[0])
    downs, ups = [first.weight.new_zeros(0, first.in_features, dtype=torch.float32)], []
    for layer in layers:
        base = getattr(layer, "base_layer", layer)
        of_layer = [base.weight.new_zeros(base.out_features, 0, dtype=torch.float32)]
        for name in getattr(layer, "active_adapters", ()):
            if name in layer.lora_A:
                downs.append(layer.lora_A[name].weight.detach().float())
                of_layer.append(layer.lora_B[name].weight.detach().float() * layer.scaling[name])
        ups.append(torch.cat(of_layer, 1))
    return torch.cat(downs), torch.block_diag(*ups)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products of a dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
