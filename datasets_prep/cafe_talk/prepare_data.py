"""The café's conversations: demonstrations and dialogues of three turns in which the guest leaves something out.

The assistant asks for a missing part in a fifth of its turns and otherwise repeats an order, guessing missing parts. So
the SFT policy learns to ask and to repeat, and seldom asks. An order occurs in one split only, the same as in `cafe`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datasets_prep.cafe.tokenizer import train_tokenizer
from datasets_prep.cafe.world import MILKS, SIZES, Item, split_of
from datasets_prep.cafe_talk.guest import ANSWERS, QUESTIONS, opening, reply, wanted
from datasets_prep.common import PrepareArgs, load_tokenizer, prepare
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least, between
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import SPLITS

NUM_TURNS = 3
STAGES = ("finetune", "dialogue")


@dataclass(frozen=True, kw_only=True)
class CafeTalkArgs(PrepareArgs):
    """Write the café's conversations."""

    destination_dir: str = "data/cafe_talk/tiny"
    """Output folder."""
    dataset_name: str = "cafe_talk"
    """Name in the report; the café is generated, not read."""
    tokenizer_name: str | None = None  # type: ignore[assignment]  # optional here only
    """Tokenizer of the model to be trained; by default a small BPE is trained on the café's language."""
    num_dialogues: int = at_least(1, 2000)
    """Dialogues in the training split."""
    num_held_out: int = at_least(1, 300)
    """Dialogues in the validation and in the test split."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt (for dialogues: of each sequence of user turns)."""
    ask: float = between(0, 1, 0.2)
    """Probability that the assistant asks in a turn in which something is missing."""


def rows(args: CafeTalkArgs) -> Iterator[dict[str, Any]]:
    """All dialogues of all splits, once as demonstrations and once as dialogues."""
    for stage in STAGES:
        for split in SPLITS:
            rng = random.Random(f"{args.seed} {stage} {split}")
            for _ in range(args.num_dialogues if split == "train" else args.num_held_out):
                row = dialogue(rng, args.ask)
                while row["split"] != split:
                    row = dialogue(rng, args.ask)
                yield {"stage": stage, **row}


def dialogue(rng: random.Random, ask: float) -> dict[str, Any]:
    """Messages of three turns, with the guest's order as a column."""
    item, missing = wanted(rng)
    messages = [{"role": "user", "content": opening(rng, item, missing)}]
    missing = list(missing)
    for turn in range(NUM_TURNS):
        if missing and rng.random() < ask:
            slot = missing.pop(rng.randrange(len(missing)))
            text = QUESTIONS[slot]
        else:
            guessed = {slot: rng.choice({"size": SIZES, "milk": MILKS}[slot]) for slot in missing}
            text = rng.choice(ANSWERS).format(order=dataclasses.replace(item, **guessed).text())
        messages.append({"role": "assistant", "content": text})
        if turn + 1 < NUM_TURNS:
            messages.append({"role": "user", "content": reply(messages, item)})
    columns = {"order": list(dataclasses.astuple(item))}
    return {"messages": messages, "columns": columns, "group": item.text(), "split": split_of((item,))}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(CafeTalkArgs, argv)
    tokenizer = load_tokenizer(args.tokenizer_name) if args.tokenizer_name else train_tokenizer(seed=args.seed)
    example = [{"role": "user", "content": opening(random.Random(0), Item("latte", "a", "large", "oat"), ["milk"])}]
    judge = "datasets_prep.cafe_talk.guest:gold"
    prepare(args, rows(args), tokenizer=tokenizer, judge=judge, example_prompt=example, stages=STAGES)


if __name__ == "__main__":
    main()
