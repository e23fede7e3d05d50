"""Borders of words, which cut the judgement of a teacher with another tokenizer into past and later.

No token of such a teacher has a word's last character and the space behind it: then every tokenisation of a text has a
border there, and what is before it is cut in the same way whatever follows. With the next word's first character the
past knows that there is a border, and so the teacher's log-probability of all before it. A baseline may know the past,
so that a student's token needs the later difference alone: the student's log-probability from the last known border on
less the teacher's. Places are bytes of the text, since tokens may end within a character.

Left out: borders beside other letters than ASCII's, which a pattern of a tokenizer may read in another way.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from lightrlhf.data.types import Tokenizer

BORDER = re.compile(rb"(?<=[!-~]) (?=[!-~])")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's tokens of single bytes
BYTE_SPACE, WORD_SPACE = "\u0120", "\u2581"  # a space in vocabularies of bytes, and of SentencePiece


def crosses_words(tokenizer: Tokenizer) -> bool:
    """Whether a token has a space behind another character, so that no border is certain."""
    across = re.compile(f"[!-~][ {BYTE_SPACE}{WORD_SPACE}]")
    return any(across.search(token) for token in tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens))


def token_starts(tokenizer: Tokenizer, ids: list[int], text: str) -> Tensor:
    """Where each token of a text begins: (n,); those behind its end begin there.

    All begin at 0 where the tokens' names do not tell their bytes.
    """
    of_bytes = BYTE_SPACE in tokenizer.get_vocab()
    names = tokenizer.convert_ids_to_tokens(ids)
    sizes = [len(name) if of_bytes else 1 if BYTE.fullmatch(name) else len(name.encode()) for name in names]
    if not of_bytes:
        sizes = [size - 2 * name.count(WORD_SPACE) for size, name in zip(sizes, names)]  # three bytes for one
    ends, length = torch.tensor([0, *sizes]).cumsum(0), len(text.encode())
    extra = 1 if not of_bytes and length + 1 in ends else 0  # the space that SentencePiece begins with
    if length + extra not in ends:
        return torch.zeros(len(ids), dtype=torch.int64)
    return (ends[:-1] - extra).clamp(0, length)


def last_borders(text: str, known: Tensor) -> Tensor:
    """The last border that a past of some bytes knows, 0 without one: (n,) -> (n,)."""
    borders = torch.tensor([0, *(match.start() for match in BORDER.finditer(text.encode()))])
    seen = torch.searchsorted(borders + 2, known, right=True)  # how many, 0 included
    return borders[(seen - 1).clamp(min=0)]


def sum_from(values: Tensor, starts: Tensor, borders: Tensor) -> Tensor:
    """Sum of the values of the tokens that begin at a border or later: (m,), (m,), (n,) -> (n,)."""
    later = torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)])  # (m + 1,)
    return later[torch.searchsorted(starts, borders)]
