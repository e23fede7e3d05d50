"""What is known exactly of the tasks of `estimators` and `agents`, and how their rows are read."""

from __future__ import annotations

from examples.experiments.records import Row
from lightrlhf.envs.games import GuessNumber

GO = (0.8, 0.8, 0.7)  # probability of the first action of each turn
STOP, BONUS = 0.2, 0.5  # what stopping pays; chance of a reward of 1 for going on, in the middle
CREDIT = ("by episode", "by turn", "by index")
PLACES = ("at the end", "in the middle")
SEEDS = ("one seed a group", "a seed each")
POLICIES = ("two answers", "ten answers")
LAST = 10  # steps of an agent that are read


def exact(place: str) -> list[float]:
    """The gradient of the mean reward by the logits of the three turns."""
    bonus = BONUS if place == "in the middle" else 0.0
    first, second, third = GO
    after_second = second * (bonus + third) + (1 - second) * STOP
    gains = bonus + after_second - STOP, bonus + third - STOP, 1.0  # of the first action over the other
    reach = 1.0, first, first * second
    return [r * gain * p * (1 - p) for r, gain, p in zip(reach, gains, GO)]


def end(row: Row, last: int = LAST) -> float:
    """Share of right episodes in the last steps of a run."""
    return sum(row["scores"][-last:]) / len(row["scores"][-last:])


def bounds() -> dict[str, float]:
    """Success at guessing, exact: numbers at random, at random among those that the answers allow, and halving."""
    game = GuessNumber()

    def allowed(left: int, turns: int) -> float:
        """Mean number of `left` numbers that are found by guessing one of them at random, over the guesses."""
        if not left or not turns:
            return 0.0
        return 1 + sum(allowed(i, turns - 1) + allowed(left - 1 - i, turns - 1) for i in range(left)) / left

    return {
        "at random": 1 - (1 - 1 / game.highest) ** game.turns,
        "at random among the allowed": allowed(game.highest, game.turns) / game.highest,
        "halving": min(game.highest, 2**game.turns - 1) / game.highest,
    }
