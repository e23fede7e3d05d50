"""Users of multi-turn dialogues: the data's own next message, a Python function, or a language model.

The instruction of a language model as user follows Gao et al. 2024 (2410.04612).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightrlhf.cli.args import GenerationArgs, ModelArgs, check_at_least, check_positive
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.generation.dialogues import Dialogue, User, mix_seed, noise_of, room_of
from lightrlhf.generation.engine import generate
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_function
from lightrlhf.rewards.scorers import Messages

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
        seeds = [mix_seed(seed, dialogue.index, dialogue.num_turns) for dialogue in dialogues]
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
                    "seed": mix_seed(seed, dialogue.index, dialogue.num_turns) % 2**31,
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
