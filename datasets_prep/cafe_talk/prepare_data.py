"""The café's conversations: demonstrations and dialogues of three turns in which the guest leaves something out.

Whoever serves in them asks for something that is missing in a fifth of its turns and otherwise repeats an order,
guessing what it was not told. So supervised fine-tuning learns to ask and to repeat, and seldom asks. What a guest
wants belongs to one split only, the one that the café itself puts this order into.
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
from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import SPLITS

NUM_TURNS = 3
STAGES = ("finetune", "dialogue")


@dataclass(frozen=True, kw_only=True)
class CafeTalkArgs(PrepareArgs):
    """Write the café's conversations."""

    destination_dir: str = "data/cafe_talk/tiny"
    """Folder to write."""
    dataset_name: str = "cafe_talk"
    """Name in the report; the café is generated, not read."""
    tokenizer_name: str | None = None
    """Tokenizer of the model to be trained; when not given a small BPE is trained on the café's language."""
    num_dialogues: int = 2000
    """Dialogues of the training split."""
    num_held_out: int = 300
    """Dialogues of the validation and of the test split."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt (of each sequence of user turns for dialogues)."""
    ask: float = 0.2
    """How often a turn asks while something is missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_dialogues", "num_held_out"):
            check_at_least(self, name, 1)
        if not 0 <= self.ask <= 1:
            raise ValueError(f"--ask {self.ask} must lie in [0, 1]")


def rows(args: CafeTalkArgs) -> Iterator[dict[str, Any]]:
    """All dialogues of all splits; the same serve as demonstrations and as dialogues."""
    for stage in STAGES:
        for split in SPLITS:
            rng = random.Random(f"{args.seed} {stage} {split}")
            for _ in range(args.num_dialogues if split == "train" else args.num_held_out):
                row = dialogue(rng, args.ask)
                while row["split"] != split:
                    row = dialogue(rng, args.ask)
                yield {"stage": stage, **row}


def dialogue(rng: random.Random, ask: float) -> dict[str, Any]:
    """Messages of three turns, and as a column what the guest wanted."""
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
