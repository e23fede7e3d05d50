"""Search over a small world of documents, in the form of TRL's environments: questions that want two look-ups.

The documents are made by `documents` from a fixed seed, so nothing is shipped or downloaded. They tell of people and
towns of made-up names, which no model knows from its training. A question asks for a fact of the town in which a person
lives; reward 1 for the right answer.

Left out: embeddings; a word counts by how rare it is, and a document by the words of the query that it has.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter

NUM_TOWNS, NUM_PEOPLE = 40, 80
SYLLABLES = (
    "ba be bo da do fa fi ga go ka ke ki la le lo ma mi mo na ne no pa po ra re ri sa se so ta te to va ve".split()
)
CRAFTS = ["glass", "paper", "rope", "bells", "salt", "cheese", "boats", "clocks", "cloth", "honey"]
RIVERS = 12
WORDS = re.compile(r"\w+")


@functools.cache
def documents() -> dict[str, str]:
    """The texts by title, towns first."""
    rng = random.Random("a world of documents")
    names: set[str] = set()
    while len(names) < NUM_TOWNS + NUM_PEOPLE + RIVERS:
        names.add("".join(rng.choices(SYLLABLES, k=3)).capitalize())
    ordered = sorted(names)
    rng.shuffle(ordered)
    towns, people, rivers = ordered[:NUM_TOWNS], ordered[NUM_TOWNS:-RIVERS], ordered[-RIVERS:]
    texts = {}
    for town in towns:
        river, craft, year = rng.choice(rivers), rng.choice(CRAFTS), rng.randint(1100, 1899)
        texts[town] = f"{town} is a town on the river {river}. It was founded in {year} and is known for its {craft}."
    for person in people:
        town, age = rng.choice(towns), rng.randint(20, 79)
        texts[person] = f"{person} is {age} years old and lives in {town}."
    return texts


QUESTIONS = {
    "On which river lies the town where {} lives?": r"river (\w+)",
    "In which year was the town founded where {} lives?": r"founded in (\d+)",
    "What is the town known for where {} lives?": r"known for its (\w+)",
}


class Search:
    """A question of the world, the tools `search` and `answer`. A row may give `question` and `answer` instead."""

    def reset(self, question: str | None = None, answer: str | None = None) -> str:
        texts = documents()
        person = random.choice([*texts][NUM_TOWNS:])
        drawn, pattern = random.choice([*QUESTIONS.items()])
        town = texts[person].rstrip(".").split()[-1]
        found = re.search(pattern, texts[town])
        assert found is not None
        self.expected, self.given = answer or found[1], ""
        return question or drawn.format(person)

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: a few words.
        """
        return "\n".join(search(query)) or "nothing found"

    def answer(self, text: str) -> str:
        """Give the final answer.

        Args:
            text: one word or number.
        """
        self.given = text
        return "noted"

    def get_reward(self) -> float:
        return float(WORDS.findall(self.given.lower()) == WORDS.findall(self.expected.lower()))


@functools.cache
def rarity() -> dict[str, float]:
    """The weight of each word of the documents."""
    counts = Counter(word for text in documents().values() for word in set(WORDS.findall(text.lower())))
    return {word: math.log(len(documents()) / count) for word, count in counts.items()}


def search(query: str, limit: int = 3) -> list[str]:
    """The texts that match a query best, at most `limit`."""
    wanted = {word: rarity().get(word, 0.0) for word in WORDS.findall(query.lower())}
    scores = {}
    for text in documents().values():
        own = {*WORDS.findall(text.lower())}
        scores[text] = sum(weight for word, weight in wanted.items() if word in own)
    best = sorted(scores, key=lambda text: -scores[text])[:limit]
    return [text for text in best if scores[text] > 0]
