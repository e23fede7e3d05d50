"""Types of transformers for annotations. Importing transformers takes a second, so only type checkers do it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    PreTrainedModel = Tokenizer = Any
