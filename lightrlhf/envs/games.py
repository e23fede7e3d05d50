"""Small environments for a first agent: guess a number by turns of text, and sums that want a calculator.

Both draw their task from the seed of `reset`, so a group's members play the same one; a row may give it instead.
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable
from typing import Any

LARGEST_BITS = 10_000  # of a number in the calculator
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class GuessNumber:
    """Guess a whole number from 1 to `highest` in `turns`; after each guess: higher, lower, right.

    Reward 1 for a right guess. The first number in a text is the guess; a text without one costs its turn.
    """

    def __init__(self, highest: int = 9, turns: int = 4) -> None:
        if highest < 1 or turns < 1:
            raise ValueError(f"highest={highest} and turns={turns} must be at least 1")
        self.highest, self.turns = highest, turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        drawn = random.Random(seed).randint(1, self.highest)
        self.number, self.left = int((options or {}).get("number", drawn)), self.turns
        return f"Guess my number from 1 to {self.highest}. You have {self.turns} guesses.", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        found = re.search(r"-?\d{1,9}", text)
        if found and int(found[0]) == self.number:
            return "right", 1.0, True, False, {}
        hint = "say a number" if not found else "higher" if int(found[0]) < self.number else "lower"
        return hint, 0.0, self.left == 0, False, {"invalid": not found}


class Sums:
    """A sum that is hard without the calculator, in the form of TRL's environments; reward 1 for the right answer.

    A row's column `expression` gives the sum, else it is drawn.
    """

    def __init__(self, digits: int = 4, terms: int = 3) -> None:
        if digits < 1 or terms < 2:
            raise ValueError(f"digits={digits} must be at least 1, terms={terms} at least 2")
        self.digits, self.terms = digits, terms

    def reset(self, expression: str | None = None) -> str:
        numbers = [str(random.randrange(10 ** (self.digits - 1), 10**self.digits)) for _ in range(self.terms)]
        drawn = numbers[0] + "".join(f" {random.choice('+-*')} {number}" for number in numbers[1:])
        self.expression, self.given = expression or drawn, ""
        return f"What is {self.expression}? Use the calculator, then give the number to answer."

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: numbers and + - * / // % ** with parentheses, such as (2 + 3) * 4.
        """
        return calculator(expression)

    def answer(self, number: str) -> str:
        """Give the final answer.

        Args:
            number: the number.
        """
        self.given = number.strip().replace(",", "")
        return "noted"

    def get_reward(self) -> float:
        return float(self.given == calculator(self.expression))


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers and + - * / // % ** with parentheses, such as (2 + 3) * 4.
    """
    if len(expression) > 1000:
        raise ValueError("the expression is longer than 1000 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError):
        raise ValueError(f"not an arithmetic expression: {expression[:60]}") from None
    return str(value_of(tree.body))


def value_of(node: ast.AST) -> Any:
    """The value of a parsed expression. Raises: ValueError, ZeroDivisionError, OverflowError."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in OPERATORS:
        parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        values = [value_of(part) for part in parts]
        if isinstance(node.op, ast.Pow):
            base, exponent = values
            if exponent and math.log2(abs(base) or 1) * abs(exponent) > LARGEST_BITS:
                raise OverflowError("the result is too large")
        found = OPERATORS[type(node.op)](*values)
        if not isinstance(found, int | float):
            raise ValueError("the result is not a real number")
        if isinstance(found, int) and found.bit_length() > LARGEST_BITS:
            raise OverflowError("the result is too large")
        return found
    raise ValueError("only numbers and + - * / // % ** with parentheses can be computed")
