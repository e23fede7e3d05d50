"""Where texts may be tokenised apart, and whether ids give back their text: what is known of a tokenizer beforehand.

Of a byte-level BPE the tokens of a text are those of its words, and their bytes are the bytes of the text. The words at
a border of two texts depend on the characters near it.

Left out: tokenizers without words, such as SentencePiece's, and those that change more of a text than its Unicode form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lightrlhf.data.chat import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Borders:
    """Tells whether a prompt and its answer have the same ids as one text, as in a later prompt, and apart.

    asks: the text with which each prompt ends, behind its last control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, asks: str) -> None:
        self.backend, self.asks = tokenizer.backend_tokenizer, asks
        self.known: dict[str, bool] = {}

    def are_kept(self, answer: str) -> bool:
        """Whether no token spans the border, and none beside it is another one when the text ends or begins there.

        answer: its first characters.
        """
        if answer not in self.known:
            self.known[answer] = self._words(self.asks) + self._words(answer) == self._words(self.asks + answer)
        return self.known[answer]

    def _words(self, text: str) -> list[str]:
        normalizer = self.backend.normalizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]


def is_bytes_of_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is a byte-level BPE that reads words one by one and knows all bytes."""
    model = model_of(tokenizer)
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    from tokenizers.pre_tokenizers import ByteLevel

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    words, decoder, normalizer = (parts[name] or {} for name in ("pre_tokenizer", "decoder", "normalizer"))
    steps = words.get("pretokenizers", [words])
    changes = any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
    splits = any(step.get("use_regex", True) for step in steps)
    return (
        all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and steps[-1]["type"] == "ByteLevel"
        and decoder.get("type") == "ByteLevel"
        and normalizer.get("type") in (None, "NFC")
        and splits
        and not changes
        and all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
    )
