"""Assignment of a row to a split and, with `--split`, to one stage, by a hash of its group and the seed alone.

So a prompt is assigned independently of the order of rows, `num_samples`, `num_proc`, and runs for other stages. The
shares hold on average, not exactly. A group is a prompt (of a dialogue the first user message, so that a dialogue and
its prefixes stay together), compared without regard to case and spacing.
"""

from __future__ import annotations

from typing import Any

from datasets_prep.encoding import STAGES, Place, hash_of
from datasets_prep.plans import is_messages
from datasets_prep.turns import BadRow
from lightrlhf.data.splits import split_by_hash
from lightrlhf.storage.jsonl import Row


def shares_of(split: str | None) -> list[float]:
    """Shares of SFT, reward model and RL that sum to 1, from "2,4,4"; none from None. Raises: ValueError."""
    if split is None:
        return []
    try:
        shares = [float(word) for word in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < float("inf") for share in shares) or not sum(shares):
        raise ValueError(f"--split {split} must be three shares for SFT, reward model and RL, such as 2,4,4")
    return [share / sum(shares) for share in shares]


DIALOGUE, PROMPTS = frozenset({"finetune", "prompts", "dialogue"}), frozenset({"prompts"})
NEEDED = {  # columns by stage
    "finetune": "prompt and completion, messages, or text",
    "preference": "prompt, chosen and rejected",
    "unpaired": "prompt, completion and label",
    "prompts": "prompt, or messages",
    "dialogue": "messages that end with an answer",
}


class Placement:
    """Assigns each row its `Place`.

    `stages` are those that the dataset supports, `given` the held-out splits of the source, not carved out of train;
    `wraps`: plain prompts become messages.
    """

    def __init__(
        self,
        args: Any,
        stages: tuple[str, ...] = STAGES,
        given: frozenset[str] = frozenset(),
        wraps: bool = False,
    ) -> None:
        self.seed = args.seed
        self.requested = frozenset(stages if args.stage == "all" else [args.stage])
        self.shares = shares_of(args.split)
        self.test = 0.0 if "test" in given else args.test_percentage
        self.validation = 0.0 if "validation" in given else args.validation_percentage
        self.wraps = wraps
        self.asked = args.stage

    def __call__(self, row: Row) -> Place:
        """The place of a row. Raises: BadRow if it has no prompt."""
        group = " ".join(self._group(row).split()).casefold()
        possible = self._possible(row)
        stages = possible & self.requested
        if not stages and self.asked != "all":
            found = ", ".join(sorted(possible))
            raise BadRow(f"columns of {found}, not of {self.asked}, which needs {NEEDED[self.asked]}")
        if row.get("stage"):
            stages &= {row["stage"]}
        elif self.shares and row.get("split") not in ("validation", "test"):  # a set's own serve every stage whole
            stages &= self._part(group)
        split = row.get("split") or self._split(group)
        return Place(_hash(group), split, stages, row.get("source", "a generated row"))

    def _part(self, group: str) -> set[str]:
        sft, rm, _ = self.shares
        part = self._place("stage", group, {"finetune": sft, "preference": rm}, rest="prompts")
        return {"prompts": {"prompts", "dialogue"}, "preference": {"preference", "unpaired"}}.get(part, {part})

    def _split(self, group: str) -> str:
        return self._place("split", group, {"test": self.test, "validation": self.validation}, rest="train")

    def _place(self, what: str, group: str, shares: dict[str, float], rest: str) -> str:
        key = f"{self.seed}/{what}/{group}".encode("utf-8", "surrogatepass")
        return split_by_hash(key, shares, rest, hash_of)

    def _group(self, row: Row) -> str:
        value = row.get("group")
        if value is None:
            value = row.get("messages", row.get("prompt", row.get("text")))
        if isinstance(value, str):
            return value
        if is_messages(value):
            return next((str(message["content"]) for message in value if message["role"] == "user"), "")
        raise BadRow("no_prompt" if value is None else f"prompt_is_{type(value).__name__}")

    def _possible(self, row: Row) -> frozenset[str]:
        """Stages that the row's columns allow."""
        if "messages" in row:
            answered = row["messages"] and row["messages"][-1]["role"] == "assistant"
            if not answered and self.asked in ("finetune", "dialogue"):
                raise BadRow("messages_end_without_an_answer")
            return DIALOGUE if answered else PROMPTS
        if "text" in row:
            return frozenset({"finetune"})
        stages = {"prompts"}
        if "label" in row:
            stages.add("unpaired")
            if self.asked == "finetune":  # good responses are demonstrations only when asked for
                if not row["label"]:
                    raise BadRow("label_is_false")
                stages.add("finetune")
            return frozenset(stages)
        if "chosen" in row or "completion" in row:
            stages.add("finetune")
            if not isinstance(row["prompt"], str) or (self.wraps and not row.get("is_plain")):
                stages.add("dialogue")
        if "chosen" in row and "rejected" in row:
            stages.add("preference")
        return frozenset(stages)


def _hash(text: str) -> int:
    return hash_of(text.encode("utf-8", "surrogatepass"))
