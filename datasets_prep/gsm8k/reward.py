"""A verifiable reward: 1 where the final number of a worked answer is the right one, else 0.

The answer is the number behind the *last* `####`, read with a pattern and compared as a decimal number; text of a
model is never evaluated. Left out: units, fractions and formulas, which the set's answers do not have.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"\s*\$?\s*(-?)\s*\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?)(?![0-9,.]*[0-9])")


def final_number(text: str) -> Decimal | None:
    """The number behind the last `####`, or None."""
    _, mark, tail = text.rpartition("####")
    found = NUMBER.match(tail) if mark else None
    return Decimal(found[1] + found[2].replace(",", "")) if found else None


def exact_answer(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Scores (B,): 1 for the right number, 0 for another or none, NaN (masked) where the data has no answer."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        known = final_number(f"#### {right}")
        scores.append(math.nan if known is None else float(final_number(completion) == known))
    return scores
