"""The café, the bundled task: demonstrations, preference pairs and prompts from a seeded grammar.

Demonstrations mix good and flawed answers, so that the SFT policy is mediocre on purpose; pairs state which of two
answers a guest prefers, and a share of the training pairs has a swapped label. Orders of the test split occur in no
other split, for any seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datasets_prep.cafe.tokenizer import PROMPT, train_tokenizer
from datasets_prep.cafe.world import (
    CONTENT_FLAWS,
    MIXTURE,
    Order,
    Plan,
    flawed,
    good_plan,
    orders,
    possible_flaws,
    random_answer,
    random_flaws,
    request,
)
from datasets_prep.common import PrepareArgs, load_tokenizer, prepare
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import SPLITS


@dataclass(frozen=True, kw_only=True)
class CafeArgs(PrepareArgs):
    """Write the café's splits."""

    destination_dir: str = "data/cafe/tiny"
    """Output folder."""
    dataset_name: str = "cafe"
    """Name in the report; the café is generated, not read."""
    tokenizer_name: str | None = None  # type: ignore[assignment]  # optional here only
    """Tokenizer of the model to be trained; by default a small BPE is trained on the café's language."""
    num_finetune: int = at_least(1, 2000)
    """Demonstrations in the training split."""
    num_preference: int = at_least(1, 6000)
    """Pairs in the training split."""
    num_prompts: int = at_least(1, 6400)
    """Prompts in the training split."""
    num_held_out: int = at_least(1, 400)
    """Demonstrations and prompts in the validation and in the test split."""
    num_held_out_pairs: int = at_least(1, 1200)
    """Pairs in the validation and in the test split; the default suffices for an accuracy per flaw."""
    label_noise: float = at_least(0, 0.05, below=0.5)
    """Share of training pairs with swapped labels."""


def rows(args: CafeArgs) -> Iterator[dict[str, Any]]:
    """All rows of all stages and splits, each in the split of its order."""
    sizes = {"finetune": args.num_finetune, "preference": args.num_preference, "prompts": args.num_prompts}
    for stage, make in (("finetune", demonstration), ("preference", preference), ("prompts", prompt)):
        for split in SPLITS:
            rng = random.Random(f"{args.seed} {stage} {split}")
            source = orders(rng, split)
            held_out = args.num_held_out_pairs if stage == "preference" else args.num_held_out
            for _ in range(sizes[stage] if split == "train" else held_out):
                noise = args.label_noise if split == "train" else 0.0
                yield {"stage": stage, "split": split, **make(rng, next(source), noise)}


def prompt(rng: random.Random, order: Order, noise: float = 0.0) -> dict[str, Any]:
    return {"prompt": PROMPT.format(request=request(rng, order)), "columns": {}}


def demonstration(rng: random.Random, order: Order, noise: float = 0.0) -> dict[str, Any]:
    """A request with an answer from `MIXTURE`."""
    return prompt(rng, order) | {"completion": " " + random_answer(rng, order, **MIXTURE)}


def preference(rng: random.Random, order: Order, noise: float) -> dict[str, Any]:
    """A request with two answers: in half of the rows a good one and the same with one flaw, in the others any two of
    unequal quality. `columns` has the flaw (or `mixed`) and whether the label was swapped."""
    row = prompt(rng, order)
    if rng.random() < 0.5:
        flaw = rng.choice(possible_flaws(order))
        better = good_plan(rng, order)
        worse = flawed(rng, better, flaw)
    else:
        flaw, (better, worse) = "mixed", unequal_answers(rng, order)
    swapped = rng.random() < noise
    chosen, rejected = (worse, better) if swapped else (better, worse)
    columns = {"group": flaw, "swapped": swapped}
    return row | {"chosen": " " + chosen.text(), "rejected": " " + rejected.text(), "columns": columns}


def unequal_answers(rng: random.Random, order: Order) -> tuple[Plan, Plan]:
    """Two answers from `MIXTURE` of unequal quality, the better one first.

    Penalties: a wrong order counts two, rudeness and rambling one each.
    """
    while True:
        answers = []
        for _ in range(2):
            plan = good_plan(rng, order)
            flaws = random_flaws(rng, order, **MIXTURE)
            for flaw in flaws:
                plan = flawed(rng, plan, flaw)
            answers.append((sum(2 if flaw in CONTENT_FLAWS else 1 for flaw in flaws), plan))
        (one, first), (two, second) = answers
        if one != two:
            return (first, second) if one < two else (second, first)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(CafeArgs, argv)
    tokenizer = load_tokenizer(args.tokenizer_name) if args.tokenizer_name else train_tokenizer(seed=args.seed)
    example = PROMPT.format(request="Could I get a large oat latte and two muffins, please?")
    prepare(args, rows(args), tokenizer=tokenizer, judge="datasets_prep.cafe.judge:gold", example_prompt=example)


if __name__ == "__main__":
    main()
