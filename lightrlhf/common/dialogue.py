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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from lightrlhf.common.args import GenerationArgs, ModelArgs, RunFailure, UsageError, check_at_least, check_positive
from lightrlhf.common.batch import Row, decode, encode_prompt, load_split
from lightrlhf.common.loading import load_policy, load_tokenizer
from lightrlhf.common.model import Policy
from lightrlhf.common.remote import RemoteArgs, Servers
from lightrlhf.common.rewards import load_function
from lightrlhf.common.rollout import generate
from lightrlhf.common.scoring import GroupScorer, Messages, Sample

INSTRUCTION = """Here is a conversation between a user and an assistant.

{transcript}

Pretend that you are the user of this conversation. Which question would you ask next? Say first in a sentence why, \
then ask the question as the user would, in this form:

Justification: <your reason>
Question: <the user's next message>"""
QUESTION = "Question:"
USER_SHAPE = "f(dialogues, seeds, **columns) -> list[str | None]"


@dataclass(frozen=True, kw_only=True)
class UserArgs(RemoteArgs):
    """Who speaks as the user, and for how many turns."""

    num_turns: int = 5
    """Assistant turns of a dialogue."""
    user_function: str | None = None
    """Python function by `package.module:function` as the user: f(dialogues, seeds, **columns) -> list of messages."""
    user_model: str | None = None
    """Language model as the user: experiment dir, folder or hub name, or with `base_url` its name at that server."""
    user_temperature: float = 0.8
    """Sampling temperature of that model."""
    user_max_new_tokens: int = 256
    """Longest reply of that model."""

    def check_user(self) -> None:
        """Raises: ValueError, one line, when the user cannot be what the flags say."""
        self.check_remote()
        check_at_least(self, "num_turns", 1)
        check_at_least(self, "user_max_new_tokens", 1)
        check_positive(self, "user_temperature")
        if self.user_function and self.user_model:
            raise ValueError("--user_function and --user_model both speak as the user; give one of them")
        if self.base_url and not self.user_model:
            raise ValueError(f"--base_url {self.base_url[0]} needs --user_model, the model's name at that server")


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


# ------------------------------------------------------------------------------------------------------------ users
class User(Protocol):
    """Who answers the assistant."""

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        """The next message of each dialogue; None where the user has nothing more to say."""


def recorded_user(dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
    """The data's own next message, whatever the assistant said."""
    turns = [dialogue.columns.get("user_turns", []) for dialogue in dialogues]
    return [said[d.num_turns] if d.num_turns < len(said) else None for d, said in zip(dialogues, turns)]


@dataclass
class ScriptedUser:
    """A Python function `f(dialogues, seeds, **columns)`: messages of each dialogue in, its next message out."""

    function: Callable[..., Sequence[str | None]]
    name: str

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        names = {name for dialogue in dialogues for name in dialogue.columns}
        columns = {name: [dialogue.columns.get(name) for dialogue in dialogues] for name in names}
        seeds = [mixed(seed, dialogue.index, dialogue.num_turns) for dialogue in dialogues]
        try:
            said = list(self.function([dialogue.messages for dialogue in dialogues], seeds, **columns))
        except Exception as problem:  # whatever a user's function raises
            raise RunFailure(f"{self.name} failed with {type(problem).__name__}: {problem}") from problem
        if len(said) != len(dialogues) or not all(text is None or isinstance(text, str) for text in said):
            raise RunFailure(f"{self.name} did not return a text or None for each of {len(dialogues)} dialogues")
        return said


@dataclass
class ModelUser:
    """A language model in this process that is asked which question it would ask next; where a conversation has grown
    too long for it, it has nothing more to say."""

    policy: Policy
    tokenizer: Any
    args: GenerationArgs
    num_slots: int

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        asked = [[{"role": "user", "content": instruction(d.messages)}] for d in dialogues]
        if not self.tokenizer.chat_template:
            asked = [messages[0]["content"] for messages in asked]
        prompts = [encode_prompt(self.tokenizer, prompt) for prompt in asked]
        longest = room_of(self.policy) - self.args.max_new_tokens
        fits = [i for i, prompt in enumerate(prompts) if len(prompt) <= longest]
        said: list[str | None] = [None] * len(dialogues)
        if fits:
            noise = torch.stack([noise_of(seed, dialogues[i], self.args.max_new_tokens) for i in fits])
            end, slots = [self.tokenizer.eos_token_id], self.num_slots
            found = generate(self.policy, [prompts[i] for i in fits], self.args, end, noise, slots, self.tokenizer)
            for i, ids in zip(fits, found.responses):
                said[i] = question_of(decode(self.tokenizer, ids))
        return said


@dataclass
class ServedUser:
    """The same behind an OpenAI-compatible server. Raises: RunFailure when it refuses a dialogue."""

    servers: Servers
    temperature: float
    max_new_tokens: int

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        def requests() -> Iterator[Row]:
            for dialogue in dialogues:
                yield {
                    "messages": [{"role": "user", "content": instruction(dialogue.messages)}],
                    "max_tokens": self.max_new_tokens,
                    "temperature": self.temperature,
                    "seed": mixed(seed, dialogue.index, dialogue.num_turns) % 2**31,
                }

        said = []
        for reply in self.servers.replies(requests()):
            if reply.error:
                raise RunFailure(f"--user_model {self.servers.model} refused a dialogue: {reply.error}")
            said.append(question_of(reply.text))
        return said


def instruction(messages: Messages) -> str:
    """What a language model is asked in order to speak as the user."""
    transcript = "\n\n".join(f"### {message['role']}: {message['content']}" for message in messages)
    return INSTRUCTION.format(transcript=transcript)


def question_of(reply: str) -> str | None:
    """What follows the last `Question:`, else the whole reply; None when nothing was said."""
    return reply.rpartition(QUESTION)[2].strip() or reply.replace(QUESTION, "").strip() or None


def load_user(args: UserArgs, device: torch.device, num_slots: int) -> User:
    """The user that the flags name; without any the data's own. Raises: UsageError when it cannot be loaded."""
    if args.user_function:
        function = load_function(args.user_function, "--user_function", USER_SHAPE)
        return ScriptedUser(function, f"--user_function {args.user_function}")
    if args.user_model and args.base_url:
        servers = Servers(args, args.user_model)
        servers.wait_until_healthy()
        return ServedUser(servers, args.user_temperature, args.user_max_new_tokens)
    if args.user_model:
        tokenizer = load_tokenizer(None, args.user_model)
        policy = load_policy(args.user_model, ModelArgs(), tokenizer, "--user_model").eval().to(device)
        sampling = GenerationArgs(max_new_tokens=args.user_max_new_tokens, temperature=args.user_temperature)
        return ModelUser(policy, tokenizer, sampling, num_slots)
    return recorded_user


# -------------------------------------------------------------------------------------------------------- rolling on
def mixed(*key: int) -> int:
    """A seed that follows from all parts of a key and from their order."""
    value = 0
    for part in key:
        value = (value * 1_000_003 + part + 1) % (2**63 - 1)
    return value


def noise_of(seed: int, dialogue: Dialogue, max_new_tokens: int) -> torch.Tensor:
    """(max_new_tokens,) uniform numbers of a dialogue's next reply."""
    generator = torch.Generator().manual_seed(mixed(seed, dialogue.index, dialogue.num_turns))
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
