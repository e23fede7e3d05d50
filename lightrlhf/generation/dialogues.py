"""Multi-turn dialogues: messages for users and scorers, and the token ids that the policy read and sampled.

Sampled ids are kept and never tokenised again: a turn cut by its length has no end token, and the span of each
assistant turn is known by construction. Between two assistant turns stands what the chat template writes around a user
message. Dialogues at different turns are rolled out together: in each round the policy replies to all that await a
reply in one call of the engine, then the user replies to those that continue.

Left out: templates that rewrite earlier turns, tools, and a KV cache kept between turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag
from lightrlhf.cli.groups import RewardArgs, SamplingArgs
from lightrlhf.data import flat
from lightrlhf.data.batch import mix_seed, noise_by_row
from lightrlhf.data.flat import Facts, FlatRows, Rows
from lightrlhf.data.rendering import render
from lightrlhf.data.splits import Row, check_vocabulary, load_split
from lightrlhf.data.tokens import decode, encode_text
from lightrlhf.data.turn_ends import turn_end
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.samplers import Sampler, local_sampler
from lightrlhf.models.roles import Policy, max_positions, vocabulary_size
from lightrlhf.rewards.encoding import Messages, Sample
from lightrlhf.rewards.scorers import GroupScorer


@dataclass(frozen=True, kw_only=True)
class DialogueArgs(RewardArgs):
    """Dialogues and their scores."""

    rm_chat_template: bool = flag(False, show="rarely")
    """Wrap plain-text prompts as user messages of the reward model's chat template."""
    total_length: int = at_least(1, 2048, show="rarely")
    """Maximum tokens of a dialogue up to the trained turn; longer ones are dropped."""
    rollout_mini_batch_size: int = at_least(1, 64, show="rarely")
    """Slots of the generation engine, and the most rows per pass of the reward model."""
    eval_dialogues: int = at_least(0, 100, show="rarely")
    """Number of validation dialogues, the first ones, per evaluation; 0 disables evaluation."""


# -------------------------------------------------------------------------------------------------------- dialogues
@dataclass(frozen=True)
class Dialogue:
    """A dialogue so far. It awaits a reply of the assistant when its last message is a user's."""

    index: int  # with seed and turn it determines the noise of a reply; unique, so that no two rows share noise
    messages: Messages
    input_ids: list[int]  # as they were read and sampled
    turn_spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each assistant turn
    truncated: list[bool] = field(default_factory=list)  # per assistant turn: stopped by length
    columns: dict[str, Any] = field(default_factory=dict)  # the data's other columns
    full: bool = False  # ended early: the model has no positions left for another turn

    @property
    def num_turns(self) -> int:
        return len(self.turn_spans)

    @property
    def awaits_reply(self) -> bool:
        return self.messages[-1]["role"] == "user" and not self.full

    def turn_seed(self, seed: int) -> int:
        """Seed of what is said next, by either speaker."""
        return mix_seed(seed, self.index, self.num_turns)

    def turn_ids(self, turn: int) -> list[int]:
        """The sampled ids of an assistant turn, counted from 0."""
        start, end = self.turn_spans[turn]
        return self.input_ids[start:end]

    def through(self, turn: int) -> list[dict[str, str]]:
        """The messages up to and including an assistant turn."""
        return self.messages[: self._position(turn) + 1]

    def before(self, turn: int) -> Dialogue:
        """The dialogue up to the user message that this assistant turn replies to; all of one that awaits it."""
        if turn == self.num_turns:
            return replace(self, full=False)
        return replace(
            self,
            messages=self.messages[: self._position(turn)],
            input_ids=self.input_ids[: self.turn_spans[turn][0]],
            turn_spans=self.turn_spans[:turn],
            truncated=self.truncated[:turn],
            full=False,
        )

    def _position(self, turn: int) -> int:
        """Index of an assistant turn among the messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"][turn]

    def with_reply(self, ids: list[int], text: str, truncated: bool) -> Dialogue:
        """The dialogue with one more assistant turn."""
        start = len(self.input_ids)
        return replace(
            self,
            messages=[*self.messages, {"role": "assistant", "content": text}],
            input_ids=[*self.input_ids, *ids],
            turn_spans=[*self.turn_spans, (start, start + len(ids))],
            truncated=[*self.truncated, truncated],
        )

    def with_user_message(self, ids: list[int], text: str) -> Dialogue:
        """The dialogue with one more user message; `ids` is what the template writes for it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return replace(self, messages=messages, input_ids=[*self.input_ids, *ids])


def as_row(dialogue: Dialogue) -> Row:
    """A dialogue as a JSON row, without its index and columns."""
    names = ("messages", "input_ids", "turn_spans", "truncated", "full")
    return {name: getattr(dialogue, name) for name in names}


def from_row(row: Row, index: int, columns: dict[str, Any]) -> Dialogue:
    """Inverse of `as_row`."""
    return Dialogue(index, columns=columns, **{**row, "turn_spans": [tuple(span) for span in row["turn_spans"]]})


class Dialogues(Rows):
    """The dialogues of a split, each made when it is read."""

    def __init__(self, rows: FlatRows) -> None:
        self.rows, self.texts = rows, rows.texts

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Any:
        row = self.rows[index]
        user_turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
        columns = {**row.get("columns", {}), "user_turns": user_turns}
        ids, spans = row["input_ids"].tolist(), row["turn_spans"]
        return Dialogue(index, row["messages"], ids, spans, [False] * len(spans), columns)

    def column(self, name: str) -> Tensor:
        return self.rows.column(name)

    def facts(self) -> Facts:
        return self.rows.facts()

    def digest(self) -> str:
        return self.rows.digest()

    def share(self, names: Mapping[str, Any]) -> None:
        self.rows.share(names)


def load_dialogues(data_dir: str, split: str, verify: bool = True) -> Sequence[Dialogue]:
    """The dialogues of `dialogue_{split}.pt`, in order; each ends with an assistant turn.

    A column `user_turns` holds the user messages, for `recorded_user`.
    """
    rows: Any = load_split(data_dir, "dialogue", split, verify)
    return cast(Sequence[Dialogue], Dialogues(rows))


def share_columns(dialogues: Mapping[str, Sequence[Dialogue]]) -> dict[str, Sequence[Dialogue]]:
    """Dialogues by split, with the same columns in each, None where one is missing, since functions get all of them."""
    stored: list[Any] = [ones for ones in dialogues.values() if isinstance(ones, Rows)]
    if len(stored) == len(dialogues):
        flat.share_columns(stored)
        return dict(dialogues)
    names: Row = dict.fromkeys(name for ones in dialogues.values() for one in ones for name in one.columns)
    return {split: [replace(one, columns=names | one.columns) for one in ones] for split, ones in dialogues.items()}


def check_embedded(dialogues: Sequence[Dialogue], policy: Policy, where: str) -> None:
    """Raises: UsageError naming `where` when the model has no embedding for a token of the dialogues."""
    rows: Any = dialogues if isinstance(dialogues, Rows) else [{"input_ids": one.input_ids} for one in dialogues]
    check_vocabulary(rows, vocabulary_size(policy), where)


def longest_lengths(dialogues: Sequence[Dialogue], max_new_tokens: int) -> Tensor:
    """Tokens (N,) of each dialogue if its assistant turns were at least of `max_new_tokens`."""
    if not isinstance(dialogues, Dialogues):
        missing = [sum(max(max_new_tokens - (b - a), 0) for a, b in one.turn_spans) for one in dialogues]
        return torch.tensor([len(one.input_ids) for one in dialogues]) + torch.tensor(missing)
    spans = dialogues.rows.ragged["turn_spans"]
    ends = spans.values.unflatten(0, (-1, 2)).long()
    rows = torch.repeat_interleave(torch.arange(len(dialogues)), spans.lengths() // 2)
    missing_of_turns = (max_new_tokens - (ends[:, 1] - ends[:, 0])).clamp(min=0)
    return dialogues.column("input_ids").index_add(0, rows, missing_of_turns)


def user_turn_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids between two assistant turns: what the template writes after the token that ends a turn, with the message.

    Found by rendering a short exchange with and without the message, so that earlier turns are never rendered again.
    Raises: UsageError when the template rewrites earlier turns.
    """
    word = "assistant-turn-words"
    exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]
    before, _, _ = render(tokenizer, exchange).rpartition(word)
    exchange.append({"role": "user", "content": text})
    rendered = render(tokenizer, exchange, add_generation_prompt=True)
    if not rendered.startswith(before + word):
        raise UsageError("the chat template rewrites earlier turns, which dialogues do not support; use another one")
    ids = encode_text(tokenizer, rendered[len(before + word) :], behind=word)
    end = turn_end(tokenizer)
    return ids[ids.index(end) + 1 :] if end in ids else ids


class User(Protocol):
    """The other speaker of a dialogue."""

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        """The next message of each dialogue; None ends it."""


# --------------------------------------------------------------------------------------------------------- roll-outs
def roll_out(
    policy: Policy,
    tokenizer: Tokenizer,
    dialogues: Sequence[Dialogue],
    num_turns: int | Sequence[int],
    user: User,
    args: SamplingArgs,
    seed: int,
    num_slots: int,
    sample: Sampler | None = None,
) -> list[Dialogue]:
    """Continue dialogues that await a reply until each has `num_turns` assistant turns, one number or one for each.

    sample: who replies for the policy; the engine of this process, with `num_slots`, when not given.
    A dialogue ends early when its user returns None, or when the model has no positions left (`full`). Order is kept.
    """
    rolled = list(dialogues)
    goals = [num_turns] * len(rolled) if isinstance(num_turns, int) else list(num_turns)
    longest_prompt = max_positions(policy) - args.max_new_tokens
    sample = sample or local_sampler(policy, tokenizer, args, num_slots)
    message_ids: dict[str, list[int]] = {}  # by text of a user message

    def find_unfinished() -> list[int]:
        return [i for i, d in enumerate(rolled) if d.num_turns < goals[i] and not d.full]

    while True:
        for i in find_unfinished():
            if len(rolled[i].input_ids) > longest_prompt:
                rolled[i] = replace(rolled[i], full=True)
        active = [i for i in find_unfinished() if rolled[i].awaits_reply]
        prompts = [rolled[i].input_ids for i in active]
        replies = sample(prompts, noise_by_row([rolled[i].turn_seed(seed) for i in active], args.max_new_tokens))
        if replies is None:
            return rolled
        for i, ids, truncated in zip(active, replies.responses, replies.truncated):
            rolled[i] = rolled[i].with_reply(ids, decode(tokenizer, ids).strip(), truncated)
        continuing = [i for i in active if rolled[i].num_turns < goals[i]]
        for i, text in zip(continuing, user([rolled[i] for i in continuing], seed) if continuing else []):
            if text is not None:
                if text not in message_ids:
                    message_ids[text] = user_turn_ids(tokenizer, text)
                rolled[i] = rolled[i].with_user_message(message_ids[text], text)


def score_turns(scorer: GroupScorer, dialogues: Sequence[Dialogue]) -> list[list[float | None]]:
    """The score of each dialogue after each of its assistant turns; None where the scorer gave none."""
    scores = iter(scorer([[sample_of(dialogue, turn)] for dialogue in dialogues for turn in range(dialogue.num_turns)]))
    return [[next(scores)[0] for _ in dialogue.turn_spans] for dialogue in dialogues]


def sample_of(dialogue: Dialogue, turn: int) -> Sample:
    """A turn as a scorer's sample: the messages before it are the prompt, the turn is the response, and the column
    `messages` has both."""
    messages = dialogue.through(turn)
    ids = dialogue.input_ids[: dialogue.turn_spans[turn][0]], dialogue.turn_ids(turn)
    columns = {**dialogue.columns, "messages": messages}
    return Sample(messages[:-1], messages[-1]["content"], dialogue.truncated[turn], *ids, columns)
