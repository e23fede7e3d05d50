"""Turns of phrase that make a reader look back, and how often each room of the library may still use them."""

import re
import tokenize
from collections import Counter
from pathlib import Path

from helpers import ROOT

# relative clauses for nouns, pronouns for a noun a line up, negated existence: name the thing, or say "is not a"
WORDS = re.compile(
    r"\b(?:that of|those of|(?:is|are) none|none is|(?<!here )(?:is|are) no|of (?:its|their) own|nobody|so many|"
    r"[Ww]hat (?:a|it)|by what|under way|go(?:es)? on with)\b"
)
BUDGET = {
    ".": 5,
    "cli": 1,
    "cpu": 4,
    "data": 21,
    "demo": 2,
    "envs": 10,
    "evaluation": 0,
    "generation": 3,
    "gguf": 0,
    "maths": 4,
    "models": 1,
    "rewards": 0,
    "serving": 0,
    "storage": 1,
    "teachers": 0,
    "training": 13,
}  # by room; each number may only shrink


def prose_of(path: Path) -> str:
    """Comments and texts of a file in one line each statement, so that phrases across line breaks count."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    texts = (one.string.strip("#\"' ") if one.type in kinds else "|" for one in tokens if one.type != tokenize.NL)
    return " ".join(" ".join(texts).split())


def test_words_that_slow_readers_down_become_fewer():
    found: Counter[str] = Counter()
    for path in (ROOT / "lightrlhf").rglob("*.py"):
        room, *rest = path.relative_to(ROOT / "lightrlhf").parts
        found[room if rest else "."] += len(WORDS.findall(prose_of(path)))
    assert not {room: number for room, number in found.items() if number > BUDGET.get(room, 0)}
