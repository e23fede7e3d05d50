"""Dialogues of several turns: messages for people and scorers, and the ids that the policy read and sampled.

Token in, token out: what was sampled is kept as it is and never tokenised again, so a turn that was cut by its length
has no end token, and the span of each assistant turn is known by construction. Between two assistant turns stands what
the chat template writes around a user's message. Dialogues at different turns roll on together: each round the policy
answers all that wait for it in one pass of the engine, then the user answers those that go on.

A user is the data's own next message, a Python function, or a language model that is asked what it would ask next
(the instruction follows Gao et al. 2024, 2410.04612). Left out: templates that rewrite earlier turns, tools, and
keeping keys and values from one turn to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from lightrlhf.cli.args import GenerationArgs
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import mix_seed
from lightrlhf.data.splits import Row, load_split
from lightrlhf.data.tokens import decode
from lightrlhf.generation.engine import generate
from lightrlhf.models.roles import Policy
from lightrlhf.rewards.scorers import GroupScorer, Messages, Sample


# -------------------------------------------------------------------------------------------------------- dialogues
@dataclass(frozen=True)
class Dialogue:
    """A dialogue so far. It waits for the assistant when its last message is a user's."""

    index: int  # with seed and turn this gives the noise of a reply, so no two rows ever share theirs
    messages: Messages
    input_ids: list[int]  # as they were read and sampled
    turn_spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each assistant turn
    truncated: list[bool] = field(default_factory=list)  # per assistant turn: stopped by length
    columns: dict[str, Any] = field(default_factory=dict)  # the data's other columns
    full: bool = False  # it ended early because the model has no room for another turn

    @property
    def num_turns(self) -> int:
        return len(self.turn_spans)

    @property
    def waits(self) -> bool:
        return self.messages[-1]["role"] == "user" and not self.full

    def turn_ids(self, turn: int) -> list[int]:
        """The sampled ids of an assistant turn, counted from 0."""
        start, end = self.turn_spans[turn]
        return self.input_ids[start:end]

    def through(self, turn: int) -> list[dict[str, str]]:
        """The messages up to and with an assistant turn."""
        return self.messages[: self._place(turn) + 1]

    def before(self, turn: int) -> Dialogue:
        """The dialogue as it was when it waited for this assistant turn."""
        return replace(
            self,
            messages=self.messages[: self._place(turn)],
            input_ids=self.input_ids[: self.turn_spans[turn][0]],
            turn_spans=self.turn_spans[:turn],
            truncated=self.truncated[:turn],
            full=False,
        )

    def _place(self, turn: int) -> int:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return places[turn]

    def answered(self, ids: list[int], text: str, truncated: bool) -> Dialogue:
        """The dialogue with one more assistant turn."""
        start = len(self.input_ids)
        return replace(
            self,
            messages=[*self.messages, {"role": "assistant", "content": text}],
            input_ids=[*self.input_ids, *ids],
            turn_spans=[*self.turn_spans, (start, start + len(ids))],
            truncated=[*self.truncated, truncated],
        )

    def asked(self, ids: list[int], text: str) -> Dialogue:
        """The dialogue with one more user message; `ids` is what the template writes for it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return replace(self, messages=messages, input_ids=[*self.input_ids, *ids])


def as_row(dialogue: Dialogue) -> Row:
    """What a JSON line keeps of a dialogue; its index and columns belong to the line."""
    names = ("messages", "input_ids", "turn_spans", "truncated", "full")
    return {name: getattr(dialogue, name) for name in names}


def from_row(row: Row, index: int, columns: dict[str, Any]) -> Dialogue:
    """The dialogue of such a line."""
    return Dialogue(index, columns=columns, **{**row, "turn_spans": [tuple(span) for span in row["turn_spans"]]})


def load_dialogues(data_dir: str, split: str) -> list[Dialogue]:
    """The dialogues of `dialogue_{split}.pt`, in order; each ends with the assistant.

    The messages of the users are also kept as a column `user_turns`, for the user who repeats them.
    """
    dialogues = []
    for index, row in enumerate(load_split(data_dir, "dialogue", split)):
        said = [message["content"] for message in row["messages"] if message["role"] == "user"]
        spans = [tuple(map(int, span)) for span in row["turn_spans"]]
        columns = {**row.get("columns", {}), "user_turns": said}
        ids = torch.as_tensor(row["input_ids"]).tolist()
        dialogues.append(Dialogue(index, row["messages"], ids, spans, [False] * len(spans), columns))
    return dialogues


def user_turn_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a user's message between two assistant turns, the opening of the next one included.

    Found as what the template adds to a rendered exchange, so that earlier turns are never rendered again.
    Raises: UsageError when the template writes an earlier turn anew.
    """
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = tokenizer.apply_chat_template(said, tokenize=False).rstrip()
    said.append({"role": "user", "content": text})
    whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    if not whole.startswith(before):
        raise UsageError("the chat template rewrites earlier turns, which dialogues cannot follow; use another one")
    # behind an end token, as `encode_response` does it: a SentencePiece tokenizer begins a text with a space
    return tokenizer(tokenizer.eos_token + whole[len(before) :], add_special_tokens=False)["input_ids"][1:]


class User(Protocol):
    """Who answers the assistant."""

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        """The next message of each dialogue; None where the user has nothing more to say."""


# -------------------------------------------------------------------------------------------------------- rolling on
def noise_of(seed: int, dialogue: Dialogue, max_new_tokens: int) -> torch.Tensor:
    """(max_new_tokens,) uniform numbers of a dialogue's next reply."""
    generator = torch.Generator().manual_seed(mix_seed(seed, dialogue.index, dialogue.num_turns))
    return torch.rand(max_new_tokens, generator=generator)


def room_of(policy: Policy) -> float:
    """Positions of a model; infinite where its config names none."""
    return getattr(policy.model.config, "max_position_embeddings", None) or math.inf


def roll_out(
    policy: Policy,
    tokenizer: Any,
    dialogues: Sequence[Dialogue],
    num_turns: int | Sequence[int],
    user: User,
    args: GenerationArgs,
    seed: int,
    num_slots: int,
) -> list[Dialogue]:
    """Let dialogues that wait for the assistant go on until each has `num_turns` assistant turns, one number or each
    its own; in order. A dialogue ends early where its user has nothing to say, or where the model has no room (`full`).
    """
    rolled = list(dialogues)
    wanted = [num_turns] * len(rolled) if isinstance(num_turns, int) else list(num_turns)
    room = room_of(policy) - args.max_new_tokens
    between: dict[str, list[int]] = {}  # what the template writes for a message of the user

    def going_on() -> list[int]:
        return [i for i, d in enumerate(rolled) if d.num_turns < wanted[i] and not d.full]

    while True:
        for i in going_on():
            if len(rolled[i].input_ids) > room:
                rolled[i] = replace(rolled[i], full=True)
        waiting = [i for i in going_on() if rolled[i].waits]
        if not waiting:
            return rolled
        prompts = [rolled[i].input_ids for i in waiting]
        noise = torch.stack([noise_of(seed, rolled[i], args.max_new_tokens) for i in waiting])  # (W, max_new_tokens)
        said = generate(policy, prompts, args, [tokenizer.eos_token_id], noise, num_slots, tokenizer)
        for i, ids, cut in zip(waiting, said.responses, said.truncated):
            rolled[i] = rolled[i].answered(ids, decode(tokenizer, ids).strip(), cut)
        talking = [i for i in waiting if rolled[i].num_turns < wanted[i]]
        for i, text in zip(talking, user([rolled[i] for i in talking], seed) if talking else []):
            if text is not None:
                if text not in between:
                    between[text] = user_turn_ids(tokenizer, text)
                rolled[i] = rolled[i].asked(between[text], text)


def score_turns(scorer: GroupScorer, dialogues: Sequence[Dialogue]) -> list[list[float | None]]:
    """The score of each dialogue after each of its assistant turns; None where there is no valid one."""
    scores = iter(scorer([[sample_of(dialogue, turn)] for dialogue in dialogues for turn in range(dialogue.num_turns)]))
    return [[next(scores)[0] for _ in dialogue.turn_spans] for dialogue in dialogues]


def sample_of(dialogue: Dialogue, turn: int) -> Sample:
    """What a scorer sees of a turn: the messages before it as the prompt, the turn as the response, and among the
    columns `messages`, all of them together."""
    said = dialogue.through(turn)
    ids = dialogue.input_ids[: dialogue.turn_spans[turn][0]], dialogue.turn_ids(turn)
    columns = {**dialogue.columns, "messages": said}
    return Sample(said[:-1], said[-1]["content"], dialogue.truncated[turn], *ids, columns)
