"""The café as a conversation: a guest who leaves something out, and answers one question at a time.

The guest wants a drink with milk, in a size and with a milk, and says one or neither of the two. Whoever serves may ask
for what is missing or guess. `guest` replies by a program, `gold` scores the last order that was repeated; neither is
random, and what the guest says after an order does not tell whether it was right.
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
    """What a guest wants, and which of size and milk are left out at first: one of them or, half of the time, both."""
    item = Item(rng.choice(MILK_DRINKS), rng.choice(COUNTS), rng.choice(SIZES), rng.choice(MILKS))
    return item, rng.choice([["size", "milk"], ["size", "milk"], ["size"], ["milk"]])


def opening(rng: random.Random, item: Item, left_out: Sequence[str]) -> str:
    """The guest's first message."""
    said = Item(
        item.name, item.count, *(None if slot in left_out else getattr(item, slot) for slot in ("size", "milk"))
    )
    text = rng.choice(OPENINGS).format(order=said.text())
    return text[0].upper() + text[1:]


def order_of(text: str) -> Item | None:
    """The order that a reply repeats: the last drink with both size and milk; None when it names none."""
    complete = [item for item in parse_items(text) if item.size and item.milk]
    return complete[-1] if complete else None


def reply(messages: Sequence[dict[str, str]], item: Item) -> str:
    """What the guest says to the last message."""
    said = messages[-1]["content"]
    if order_of(said):
        return AGAIN
    if "size" in said.lower():
        return f"{item.size.capitalize()}, please."
    if "milk" in said.lower():
        return f"{item.milk.capitalize()}, please."
    return PUZZLED


def guest(dialogues: Sequence[Sequence[dict[str, str]]], seeds: Sequence[int], order: Sequence[Any], **_: Any) -> list:
    """The user of `lightrlhf.refuel --user_function datasets_prep.cafe_talk.guest:guest`."""
    return [reply(messages, Item(*item)) for messages, item in zip(dialogues, order)]


def gold(
    prompts: Sequence[str], completions: Sequence[str], order: Sequence[Any], messages: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the last order that the assistant repeated is what the guest wants, else 0: also before any order."""
    scores = []
    for wish, dialogue in zip(order, messages):
        orders = [order_of(message["content"]) for message in dialogue if message["role"] == "assistant"]
        repeated = [item for item in orders if item]
        scores.append(float(bool(repeated) and repeated[-1] == Item(*wish)))
    return scores
