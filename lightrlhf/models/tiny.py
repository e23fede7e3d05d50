"""The model `tiny`: a Llama of under 1M parameters for tests and first trials, built from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrlhf.data.types import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaConfig

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # about hidden_size ** -0.5, the ratio of 0.02 in wide models
}
MAX_POSITIONS = 2048


def tiny_config(tokenizer: Tokenizer, **changes: Any) -> LlamaConfig:
    """Config of the model `tiny`: 0.8M parameters without the embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **SIZES,
        **changes,
    )
