"""Tokenizers made here."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(merges: Sequence[tuple[str, str]] = (), normalizer=None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with some merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {one: i for i, one in enumerate(["</s>", *letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
