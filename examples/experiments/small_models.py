"""Models of 0.1M to 1M parameters over vocabularies of a few words or characters."""

from __future__ import annotations

import re
import string
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


def phrase_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """One id a phrase, and one for each other printable ASCII character; a turn of a dialogue is a line."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [*string.printable[:95], "\n"]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters, *phrases])}
    longest_first = sorted(phrases, key=len, reverse=True)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    pieces = Regex("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
    backend.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    )
    return tokenizer


def write_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast, sizes: dict[str, float] = SIZES) -> str:
    """A Llama with random weights for a tokenizer's vocabulary; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "initializer_range": 0.1} | sizes
    LlamaForCausalLM(LlamaConfig(**size, **special)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
