"""Models of 0.1M parameters over vocabularies of a few words, for tasks made of symbols."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One id a word; `<pad>` and `<eos>` come first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def write_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """A Llama with random weights for a tokenizer's vocabulary; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "initializer_range": 0.1}
    LlamaForCausalLM(LlamaConfig(**size, **SIZES, **special)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
