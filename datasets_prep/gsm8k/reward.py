"""A verifiable reward: 1 if the final number of a worked answer is right, else 0.

The answer is the number after the *last* `####`, parsed by a regular expression and compared as a decimal number; model
output is never evaluated. Left out: units, fractions and formulas, which do not occur in the dataset's answers.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"\s*\$?\s*(-?)\s*\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?)(?![0-9,.]*[0-9])")


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, or None."""
    _, mark, tail = text.rpartition("####")
    match = NUMBER.match(tail) if mark else None
    return Decimal(match[1] + match[2].replace(",", "")) if match else None


def exact_answer(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Scores (B,): 1 for the right number, 0 for another or none, NaN (masked) if the row has no valid answer."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        known = final_number(f"#### {right}")
        scores.append(math.nan if known is None else float(final_number(completion) == known))
    return scores
