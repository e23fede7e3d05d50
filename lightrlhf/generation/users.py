"""Users of multi-turn dialogues: the data's own messages, a Python function, or a language model.

The instruction of a language model as the user follows Gao et al. 2024 (2410.04612).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.fields import at_least, flag, positive
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import FrozenArgs, SamplingArgs
from lightrlhf.data.batch import noise_by_row
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.dialogues import Dialogue, User
from lightrlhf.generation.engine import generate
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy, max_positions
from lightrlhf.models.tokenizer import end_ids, load_tokenizer
from lightrlhf.rewards.encoding import Messages

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
    """User of the dialogues."""

    num_turns: int = at_least(1, 5)
    """Assistant turns of a dialogue."""
    user_function: str | None = flag(None, excludes={"user_model": ...})
    """Python function `package.module:function` as the user: f(dialogues, seeds, **columns) -> list of messages."""
    user_model: str | None = None
    """Language model as the user: experiment dir, folder or hub name, or with `base_url` its name at the server."""
    user_temperature: float = positive(0.8, show="rarely")
    """Sampling temperature of the user model."""
    user_max_new_tokens: int = at_least(1, 256, show="rarely")
    """Maximum tokens of the user model's reply."""

    def _check(self) -> None:
        if self.base_url and not self.user_model:
            raise ValueError(f"--base_url {self.base_url[0]} requires --user_model, the model's name at that server")


def recorded_user(dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
    """Replays the data's next message, whatever the assistant replied."""
    turns = [dialogue.columns.get("user_turns") or [] for dialogue in dialogues]
    return [texts[d.num_turns] if d.num_turns < len(texts) else None for d, texts in zip(dialogues, turns)]


@dataclass
class ScriptedUser:
    """A Python function `f(dialogues, seeds, **columns)` from the messages of each dialogue to its next message."""

    function: Callable[..., Sequence[str | None]]
    name: str

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        names = {name for dialogue in dialogues for name in dialogue.columns}
        columns = {name: [dialogue.columns.get(name) for dialogue in dialogues] for name in names}
        seeds = [dialogue.turn_seed(seed) for dialogue in dialogues]
        try:
            texts = self.function([dialogue.messages for dialogue in dialogues], seeds, **columns)
        except Exception as problem:  # whatever a user's function raises
            raise RunFailure(f"{self.name} failed with {type(problem).__name__}: {problem}") from problem
        is_list = isinstance(texts, list | tuple) and len(texts) == len(dialogues)
        if not is_list or not all(text is None or isinstance(text, str) for text in texts):
            raise RunFailure(f"{self.name} did not return a text or None for each of {len(dialogues)} dialogues")
        return list(texts)


@dataclass
class ModelUser:
    """A local language model, asked for the user's next question; None when the dialogue exceeds its positions."""

    policy: Policy
    tokenizer: Tokenizer
    args: SamplingArgs
    num_slots: int

    def __call__(self, dialogues: Sequence[Dialogue], seed: int) -> list[str | None]:
        texts = [instruction(dialogue.messages) for dialogue in dialogues]
        has_template = bool(self.tokenizer.chat_template)
        prompts = [
            encode_prompt(self.tokenizer, [{"role": "user", "content": text}] if has_template else text)
            for text in texts
        ]
        longest = max_positions(self.policy) - self.args.max_new_tokens
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) <= longest]
        questions: list[str | None] = [None] * len(dialogues)
        if fitting:
            noise = noise_by_row([dialogues[i].turn_seed(seed) for i in fitting], self.args.max_new_tokens)
            ends, slots = end_ids(self.tokenizer, self.policy.model), self.num_slots
            chosen = [prompts[i] for i in fitting]
            replies = generate(self.policy, chosen, self.args, ends, noise, slots, self.tokenizer)
            for i, ids in zip(fitting, replies.responses):
                questions[i] = question_of(decode(self.tokenizer, ids))
        return questions


@dataclass
class ServedUser:
    """A language model at an OpenAI-compatible server as the user. Raises: RunFailure when it refuses a dialogue."""

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
                    "seed": dialogue.turn_seed(seed) % 2**31,
                }

        questions = []
        for reply in self.servers.replies(requests()):
            if reply.error:
                raise RunFailure(f"--user_model {self.servers.model} refused a dialogue: {reply.error}")
            questions.append(question_of(reply.text))
        return questions


def instruction(messages: Messages) -> str:
    """The prompt of a language model that plays the user."""
    transcript = "\n\n".join(f"### {message['role']}: {message['content']}" for message in messages)
    return INSTRUCTION.format(transcript=transcript)


def question_of(reply: str) -> str | None:
    """The text after the last `Question:`, else the whole reply; None when it is empty."""
    return reply.rpartition(QUESTION)[2].strip() or reply.replace(QUESTION, "").strip() or None


def load_user(args: UserArgs, device: torch.device, num_slots: int) -> User:
    """The user that the flags name, by default the data's own messages. Raises: UsageError when it cannot be loaded."""
    if args.user_function:
        function = load_function(args.user_function, "--user_function", USER_SHAPE)
        return ScriptedUser(function, f"--user_function {args.user_function}")
    if args.user_model and args.base_url:
        servers = Servers(args, args.user_model)
        servers.wait_until_healthy()
        return ServedUser(servers, args.user_temperature, args.user_max_new_tokens)
    if args.user_model:
        tokenizer = load_tokenizer(None, args.user_model)
        policy = load_policy(args.user_model, FrozenArgs(), tokenizer, "--user_model").eval().to(device)
        sampling = SamplingArgs(max_new_tokens=args.user_max_new_tokens, temperature=args.user_temperature)
        return ModelUser(policy, tokenizer, sampling, num_slots)
    return recorded_user
