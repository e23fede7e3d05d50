"""Flags of sampling: a program that learns from its samples has the first group, all others have both."""

from __future__ import annotations

from dataclasses import dataclass

from lightrlhf.cli.fields import Args, above, at_least, between, flag, positive
from lightrlhf.cli.lists import texts


def check_stop_string(text: str, flag: str) -> None:
    """Raises: ValueError for an empty text, which every response contains."""
    if not text:
        raise ValueError(f"{flag} '' would end every response at once; give a non-empty text")


@dataclass(frozen=True, kw_only=True)
class SamplingArgs(Args):
    """Sampling of responses."""

    max_new_tokens: int = at_least(1, 128)
    """Longest response, end token included."""
    temperature: float = positive(1.0)
    """Divides the logits, in sampling and in log-probabilities."""
    top_k: int = at_least(0, 0, show="rarely")
    """Sample from the k most likely tokens; 0 means all."""
    top_p: float = above(0, 1.0, most=1, show="rarely")
    """Sample from the most likely tokens whose probabilities sum to this (nucleus sampling)."""
    min_p: float = between(0, 1, 0.0, show="rarely")
    """Sample only tokens with at least this fraction of the largest probability; 0 means all."""
    eos_ids: list[int] = at_least(0, [], show="rarely")
    """Token ids that end a response, besides the model's own end tokens."""
    stop_strings: list[str] = flag([], split=texts, check=check_stop_string, show="rarely")
    """Texts that end a response, one per argument; the response keeps their tokens."""

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled; a program that learns from its samples has no flag for it."""
        return True

    @property
    def repetition_penalty(self) -> float:
        """Repetition penalty; fixed at 1 (off) where a program learns from its samples."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DecodingArgs(SamplingArgs):
    """Sampling of responses."""

    temperature: float = positive(1.0, remedy="for greedy text use --do_sample False")
    """Divides the logits, in sampling and in log-probabilities."""
    do_sample: bool = True
    """Sample; if false, decode greedily."""
    repetition_penalty: float = positive(1.0, show="rarely")
    """Repetition penalty: divides positive logits of tokens seen so far and multiplies negative ones; 1 disables it."""
