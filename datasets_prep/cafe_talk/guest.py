"""The café as a conversation: a guest who leaves something out, and answers one question at a time.

The guest wants a drink of some size with some milk, and names one or neither of the two. The assistant may ask for
missing parts or guess. `guest` simulates the user, `gold` scores the last repeated order; neither is random, and the
guest's reply to an order does not reveal whether it was right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from datasets_prep.cafe.world import COUNTS, MILK_DRINKS, MILKS, SIZES, Item, parse_items

OPENINGS = (
    "Could I get {order}, please?",
    "Can I have {order}?",
    "Hi, I would like {order}.",
    "For me {order}, please.",
    "May I order {order}?",
)
ANSWERS = ("Of course, {order}, coming right up.", "Certainly, {order}. Thank you!", "With pleasure: {order}. Enjoy!")
QUESTIONS = {"size": "What size, please?", "milk": "Which milk, please?"}
AGAIN = "Thank you. What was that again?"
PUZZLED = "Sorry?"


def wanted(rng: random.Random) -> tuple[Item, list[str]]:
    """A guest's order, and which of size and milk the first message omits: one of them or, half of the time, both."""
    item = Item(rng.choice(MILK_DRINKS), rng.choice(COUNTS), rng.choice(SIZES), rng.choice(MILKS))
    return item, rng.choice([["size", "milk"], ["size", "milk"], ["size"], ["milk"]])


def opening(rng: random.Random, item: Item, left_out: Sequence[str]) -> str:
    """The guest's first message."""
    parts = (None if slot in left_out else getattr(item, slot) for slot in ("size", "milk"))
    text = rng.choice(OPENINGS).format(order=Item(item.name, item.count, *parts).text())
    return text[0].upper() + text[1:]


def order_of(text: str) -> Item | None:
    """The order that a reply repeats: the last drink with both size and milk; None if there is none."""
    complete = [item for item in parse_items(text) if item.size and item.milk]
    return complete[-1] if complete else None


def reply(messages: Sequence[dict[str, str]], item: Item) -> str:
    """The guest's reply to the last message."""
    last = messages[-1]["content"]
    if order_of(last):
        return AGAIN
    for name, value in (("size", item.size), ("milk", item.milk)):
        if name in last.lower():
            return f"{str(value).capitalize()}, please."
    return PUZZLED


def guest(dialogues: Sequence[Sequence[dict[str, str]]], seeds: Sequence[int], order: Sequence[Any], **_: Any) -> list:
    """A simulated user, for `--user_function datasets_prep.cafe_talk.guest:guest`."""
    return [reply(messages, Item(*item)) for messages, item in zip(dialogues, order)]


def gold(
    prompts: Sequence[str], completions: Sequence[str], order: Sequence[Any], messages: Sequence[Any], **_: Any
) -> list[float]:
    """1 if the last order that the assistant repeated is the guest's, else 0; 0 before any order."""
    scores = []
    for wish, dialogue in zip(order, messages):
        orders = [order_of(message["content"]) for message in dialogue if message["role"] == "assistant"]
        repeated = [item for item in orders if item]
        scores.append(float(bool(repeated) and repeated[-1] == Item(*wish)))
    return scores
