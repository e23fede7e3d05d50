"""Credit and seeds at fixed weights: mean and variance of estimators of the gradient, from sampled groups.

Nothing is trained. A policy of a few logits plays groups of eight, the advantages are those of `lightrlhf.grpo` with
`--advantage rloo`, and a group's gradient is the mean over its members of advantage times score function.

    credit  An episode of up to three turns. In the first two, going on or stopping (which pays .2 and ends it); in the
            third a try, which pays 1 if it is right. Probabilities .8, .8 and .7. *At the end*: that is all. *In the
            middle*: going on pays besides, half the time 1 and else 0. Estimators: credit by episode, by turn, and *by
            index*, rewards that are centred among the others that reached the turn and then summed, which some
            libraries do and this one does not. Its mean is computed here to be compared with the exact gradient.
    seeds   An environment that draws one of two tasks from its seed, which the policy solves with probability .1 and
            .9. Either all members of a group have one seed, as in this library, or each has its own. The exact
            variance of an advantage is 8/7 of that of the reward, of a task .09, over tasks .25: 2.78 times. That of
            the gradient depends on the policy: *ten answers* are equally likely, and one or nine of them right; of
            *two answers* the rare one, whose score function is long, has probability .1.

A row is 1,000 groups; ten seeds give the intervals.

    python -m examples.experiments.estimators
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from examples.experiments.agent_tasks import BONUS, CREDIT, GO, PLACES, SEEDS, STOP, exact
from examples.experiments.records import TEN, Row, made_by, now, results, spent
from examples.experiments.stats import shown
from lightrlhf import grpo
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.maths.groups import ADVANTAGES, group_advantages, group_moments

K, GROUPS, TURNS = 8, 1000, 3
CHANCE = torch.tensor(GO, dtype=torch.float64)
FEW = torch.tensor([[0.1, 0.9], [0.9, 0.1]], dtype=torch.float64)
ANSWERS = {  # probabilities of answers and which are right, both (tasks, answers)
    "two answers": (FEW, torch.tensor([[True, False]] * 2)),
    "ten answers": (torch.full((2, 10), 0.1, dtype=torch.float64), torch.arange(10) < torch.tensor([[1], [9]])),
}


@dataclass(frozen=True, kw_only=True)
class EstimatorsArgs(Args):
    """Measure estimators of the gradient at fixed weights."""

    output_dir: str = "estimators"
    """Folder of the results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds of the sampled groups; 1 to 10 by default."""
    num_groups: int = at_least(2, GROUPS)
    """Groups of a row."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Measure what has no row yet, and print all."""
    args = parse(EstimatorsArgs, argv)
    folder = Path(args.output_dir)
    settings = {"members": K, "groups": args.num_groups, "go": GO, "stop": STOP, "bonus": BONUS}
    settings |= {"smoke": args.num_groups != GROUPS}
    with results("estimators", folder, settings) as writer:
        done = {(row["setting"], row["arm"], row["seed"]) for row in writer.rows}
        for seed in args.seeds or TEN:
            for setting in (*PLACES, *ANSWERS):
                began = now()
                measure = of_credit if setting in PLACES else of_seeds
                for arm, found in measure(setting, seed, args.num_groups).items():
                    if (setting, arm, seed) not in done:
                        row = {"setting": setting, "arm": arm, "seed": seed} | found
                        writer.append(row | spent(began) | made_by())
        rows = list(writer.rows)
    for cells in [*credit_cells(rows), *seed_cells(rows)]:
        print(" | ".join(cells))


# ---------------------------------------------------------------------------------------------------------- episodes
class Played(NamedTuple):
    """Episodes of groups, which stand next to each other."""

    first: Tensor  # (B, turns) bool: whether the first action of the turn was taken
    reached: Tensor  # (B, turns) bool
    rewards: Tensor  # (B, turns) float64

    def gradients(self, advantages: Tensor, chance: Tensor) -> Tensor:
        """The gradient of each group by its turns' logits, (G, turns); advantages: (B, turns)."""
        score = torch.where(self.reached, self.first.double() - chance, 0.0)  # (B, turns) d log pi / d logit
        return (advantages * score).unflatten(0, (-1, K)).mean(1)


def play(place: str, seed: int, num_groups: int) -> Played:
    """Episodes of three turns."""
    generator = torch.Generator().manual_seed(seed)
    drawn, bonus = torch.rand(2, num_groups * K, TURNS, generator=generator, dtype=torch.float64)
    first = drawn < CHANCE
    reached = torch.cat([torch.ones(len(first), 1, dtype=torch.bool), first[:, :-1].cumprod(1).bool()], 1)
    pays = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64) + (place == "in the middle") * (bonus < BONUS)
    pays[:, -1] = 1.0  # the try has no other reward
    stops = torch.tensor([STOP, STOP, 0.0], dtype=torch.float64)
    return Played(first, reached, torch.where(reached, torch.where(first, pays, stops), 0.0))


def rollout_of(played: Played) -> tuple[Rollout, Scores]:
    """Episodes as `grpo` sees them: a prompt of one token, and one token a turn."""
    batch, width = played.first.shape
    taken = torch.arange(width).expand(batch, width)
    facts = [
        {"turns": int(reached.sum()), "rewards": rewards[reached].tolist(), "cut": False}
        for reached, rewards in zip(played.reached, played.rewards)
    ]
    whole = torch.cat([torch.ones(batch, 1, dtype=torch.bool), played.reached], 1)
    rollout = Rollout(
        input_ids=torch.zeros(batch, width + 1, dtype=torch.int64),
        attention_mask=whole,
        action_mask=played.reached,
        row=torch.zeros(batch, dtype=torch.int64),
        logprobs=torch.zeros(batch, width),
        ref_logprobs=torch.full((batch, width), torch.nan),
        group=torch.arange(batch) // K,
        num_groups=batch // K,
        prompt_len=torch.ones(batch, dtype=torch.int64),
        truncated=torch.zeros(batch, dtype=torch.bool),
        turn=torch.where(played.reached, taken, 0),
        columns=[{"episode": one} for one in facts],
    )
    total = played.rewards.sum(1).float()  # (B,)
    return rollout, Scores(
        total=total, parts=total[:, None], names=("env",), weights=torch.ones(1, dtype=torch.float64)
    )


def advantages_of(played: Played, credit: str) -> Tensor:
    """Advantages of the turns, (B, turns), of the program, or *by index*."""
    if credit == "by index":
        return by_index(played)
    args = grpo.GRPOArgs(
        env="lightrlhf.envs.games:GuessNumber",
        num_generations=K,
        mini_batch_size=K,
        max_turns=TURNS,
        advantage="rloo",
        credit="turn" if credit == "by turn" else "episode",
    )
    return grpo.estimate_advantages(args, *rollout_of(played)).advantages.double()


def by_index(played: Played) -> Tensor:
    """Rewards less the mean of the others that reached the turn, summed from the turn on: (B, turns)."""
    group = torch.arange(len(played.first)) // K
    centred = []
    for rewards, reached in zip(played.rewards.unbind(1), played.reached.unbind(1)):
        known = torch.where(reached, rewards, torch.nan)
        moments = group_moments(known, group, len(group) // K)
        centred.append(group_advantages(known, moments, ADVANTAGES["rloo"]))
    return torch.stack(centred, 1).flip(1).cumsum(1).flip(1)


# ---------------------------------------------------------------------------------------------------------- measures
def of_credit(place: str, seed: int, num_groups: int) -> dict[str, Row]:
    """Mean and variance of the gradient by each credit, of the same episodes."""
    played = play(place, seed, num_groups)
    return {credit: moments_of(played.gradients(advantages_of(played, credit), CHANCE)) for credit in CREDIT}


def of_seeds(setting: str, seed: int, num_groups: int) -> dict[str, Row]:
    """Variance of advantages and gradient, with one seed for a group and with a seed for each member."""
    generator = torch.Generator().manual_seed(seed)
    of_group, of_member = torch.randint(2, (2, num_groups * K), generator=generator)
    chance, right = ANSWERS[setting]
    found = {}
    for arm, task in zip(SEEDS, (of_group[:num_groups].repeat_interleave(K), of_member)):
        answer = chance[task].multinomial(1, generator=generator)[:, 0]  # (B,)
        reward = right[task, answer].double()[:, None]  # (B, 1)
        is_one = torch.ones_like(reward, dtype=torch.bool)
        advantages = advantages_of(Played(is_one, is_one, reward), "by episode")  # (B, 1)
        score = torch.zeros(len(task), *chance.shape, dtype=torch.float64)  # (B, tasks, answers) d log pi / d logits
        score[torch.arange(len(task)), task] = one_hot(answer, chance.shape[1]) - chance[task]
        found[arm] = moments_of((advantages * score.flatten(1)).unflatten(0, (-1, K)).mean(1))
        found[arm] |= {"advantages": float(advantages.var()), "mean": []}
    return found


def moments_of(gradients: Tensor) -> Row:
    """Mean and total variance of the gradients of groups, (G, P)."""
    return {"mean": gradients.mean(0).tolist(), "variance": float(gradients.var(0).sum())}


# ----------------------------------------------------------------------------------------------------------- results
def credit_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A row for each place of the rewards and each credit: the gradient's mean by turn, and its variance."""
    table = []
    for place in PLACES:
        table.append((f"{place}: exact", *(f"{one:.3f}" for one in exact(place)), ""))
        for credit in CREDIT:
            own = [row for row in rows if (row["setting"], row["arm"]) == (place, credit)]
            means = [shown([row["mean"][turn] for row in own]) for turn in range(TURNS)]
            table.append((credit, *means, shown([row["variance"] for row in own], 4)))
    return table


def seed_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The variance of advantages and gradient of both arms, and how many times more with a seed each."""
    table = []
    for setting in ANSWERS:
        for name, title in (("advantages", "advantages"), ("variance", "gradient")):
            own = [[row[name] for row in rows if (row["setting"], row["arm"]) == (setting, arm)] for arm in SEEDS]
            ratio = shown([each / one for one, each in zip(*own, strict=True)], 2)
            table.append((f"{setting}, {title}", *(shown(values, 4) for values in own), ratio))
    return table


if __name__ == "__main__":
    main()
