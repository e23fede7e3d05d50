"""Requests of completions and chat, checked before any work: a request, or one line on why it is refused.

The results of a turn's calls are put into the order of the calls. `noise` is ours: the uniform numbers to sample with,
so that a server samples bit by bit what the engine samples in the trainer's process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import seeded_noise
from lightrlhf.data.chat import Messages
from lightrlhf.data.tokens import encode_prompt, num_characters
from lightrlhf.data.tool_calls import in_order, schema_of
from lightrlhf.data.types import Tokenizer
from lightrlhf.serving.bodies import MOST_ROWS, MOST_TOKENS, ChatBody, Json, Refusal, Sampling, TextBody, read_sampling


class Served(NamedTuple):
    """The model's limits, which requests are checked against."""

    tokenizer: Tokenizer
    vocabulary: int  # token ids are below
    positions: int  # of prompt and response together
    characters: int  # of a prompt: of all positions, each with the longest token
    models: Sequence[str]  # the model's name, then its adapters'

    def name_of(self, model: str | None) -> str:
        """The model's or adapter's name; the model's by default. Raises: Refusal when it is unknown."""
        if model is not None and model not in self.models:
            raise Refusal(f"unknown model {model[:100]!r}; here are {', '.join(self.models)}", param="model")
        return model or self.models[0]


@dataclass(frozen=True)
class Completion:
    """A request of completions: n responses to each prompt, prompt by prompt."""

    body: TextBody | ChatBody
    model: str
    prompts: list[list[int]]
    n: int
    sampling: DecodingArgs
    noise: Tensor  # (prompts x n, max_new_tokens) uniform numbers
    tools: list[Json] | None = None
    wanted: str | None = None  # the function that must be called, empty for any; None: no call is needed

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of one choice."""
        return self.prompts[index // self.n]

    @property
    def is_exact(self) -> bool:
        """Whether noise was given, so that choices are bit by bit as in one call of the engine."""
        return self.body.noise is not None

    @property
    def is_chat(self) -> bool:
        """Whether a message is answered, not a text."""
        return isinstance(self.body, ChatBody)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are asked for."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    @property
    def reads_calls(self) -> bool:
        """Whether responses are read as reasoning, content and calls."""
        return bool(self.tools) and getattr(self.body, "tool_choice", "") != "none"


def read_completion(given: Json, served: Served, chat: bool) -> Completion:
    """The request of a body. Raises: UsageError in one line."""
    if not chat:
        text = read_sampling(TextBody, given)
        if text.stream and text.prompt_logprobs is not None:
            raise Refusal("prompt_logprobs are not streamed; leave out stream")
        prompts = [encode(one, served) if isinstance(one, str) else one for one in text.prompt]
        return completion_of(text, prompts, served)
    body, messages, tools = read_chat(given)
    return completion_of(body, [encode(messages, served, tools)], served, tools)


def read_chat(given: Json) -> tuple[ChatBody, list[Json], list[Json] | None]:
    """A body of chat, its messages and its tools, as chat templates take them. Raises: UsageError in one line."""
    body = read_sampling(ChatBody, given)
    functions = [tool["function"] for tool in given.get("tools") or []]  # their fields in the order in which they came
    kept = [{name: one[name] for name in one if name != "strict" and one[name] is not None} for one in functions]
    messages = in_order([message.shown() for message in body.messages])
    return body, messages, [{"type": "function", "function": one} for one in kept] or None


def completion_of(
    body: TextBody | ChatBody,
    prompts: list[list[int]],
    served: Served,
    tools: list[Json] | None = None,
    most: int | None = None,
) -> Completion:
    """The request of a body, with the ids of its prompts; most: tokens of a response. Raises: Refusal."""
    model, wanted = served.name_of(body.model), None
    count, longest = len(prompts) * body.n, max(map(len, prompts))
    max_tokens = body.max_tokens or 16
    if isinstance(body, ChatBody):
        wanted = wanted_of(body, tools)
        max_tokens = body.max_completion_tokens or body.max_tokens or max(served.positions - longest, 1)
    max_tokens = min(max_tokens, most or max_tokens)
    room = served.positions - longest
    if room < 1:
        raise Refusal(f"a prompt of {longest} tokens fills the {served.positions} positions; leave room for a response")
    if max_tokens > room:
        raise Refusal(
            f"max_tokens {max_tokens} after a prompt of {longest} tokens does not fit into the {served.positions} "
            f"positions; use at most {room}"
        )
    if count > MOST_ROWS or count * max_tokens > MOST_TOKENS:
        raise Refusal(
            f"{count} responses of up to {max_tokens} tokens are more than one request may ask for "
            f"({MOST_ROWS} responses, {MOST_TOKENS} tokens); send several"
        )
    for number, prompt in enumerate(prompts):
        check_ids(prompt, f"prompt {number}", served.vocabulary)
    check_ids(body.stop_token_ids, "stop_token_ids", served.vocabulary)
    check_ids(body.allowed_token_ids or [], "allowed_token_ids", served.vocabulary)
    sampling, noise = sampling_of(body, max_tokens), noise_of(body, count, max_tokens)
    return Completion(body, model, prompts, body.n, sampling, noise, tools, wanted)


def sampling_of(body: Sampling, max_tokens: int) -> DecodingArgs:
    """The sampling settings of a body. Raises: Refusal for a temperature that is too small to divide by."""
    greedy = body.temperature == 0
    if not greedy and body.temperature < 1e-6:
        raise Refusal(f"temperature {body.temperature} is neither 0, the most likely token, nor at least 1e-6")
    return DecodingArgs(
        max_new_tokens=max_tokens,
        temperature=1.0 if greedy else body.temperature,
        do_sample=not greedy,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        eos_ids=body.stop_token_ids,
        stop_strings=[body.stop] if isinstance(body.stop, str) else body.stop,
    )


def wanted_of(body: ChatBody, tools: list[Json] | None) -> str | None:
    """The function that must be called, empty for any of them; None if no call is needed. Raises: Refusal."""
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return None
    if body.noise is not None:
        raise Refusal("a call that must come is sampled again with other noise; leave out noise or tool_choice")
    name = "" if isinstance(choice, str) else choice.function.name
    names = [tool["function"]["name"] for tool in tools or []]
    if not names or name not in ("", *names):
        raise Refusal(f"tool_choice {name[:100] or 'required'}: the tools are {', '.join(names)[:300] or 'none'}")
    return name


def encode(prompt: str | Messages, served: Served, tools: list[Json] | None = None) -> list[int]:
    """Token ids of a prompt, in which no text becomes a control token.

    Raises: UsageError, also for tools that the chat template cannot write.
    """
    if not isinstance(prompt, str) and not served.tokenizer.chat_template:
        raise Refusal("this model's tokenizer has no chat template; send a prompt to /v1/completions")
    check_size([prompt, tools], served)
    if tools:
        schema_of(served.tokenizer)
    if not (ids := encode_prompt(served.tokenizer, prompt, tools)):
        raise Refusal("the prompt has no tokens")
    return ids


def check_size(given: Any, served: Served) -> None:
    """Raises: Refusal of texts, messages or tools that cannot fit, before it takes a minute to tokenise them."""
    if (count := num_characters(given)) > served.characters:
        raise Refusal(f"a prompt of {count} characters does not fit into the {served.positions} positions; shorten it")


def check_ids(ids: Sequence[int], where: str, vocabulary: int) -> None:
    """Raises: Refusal when a token id is beyond the vocabulary."""
    largest = max(ids, default=0)
    if largest >= vocabulary:
        raise Refusal(f"{where} has the token id {str(largest)[:30]}; the model has {vocabulary} tokens")


def noise_of(body: Sampling, rows: int, width: int) -> Tensor:
    """(rows, width) uniform numbers: those given as `noise`, else drawn from `seed`, else random. Raises: Refusal."""
    if body.noise is None:
        return seeded_noise(secrets.randbits(63) if body.seed is None else body.seed, rows, width)
    try:
        content = base64.b64decode(body.noise, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal("noise is not base64") from None
    if len(content) != 4 * rows * width:
        raise Refusal(
            f"noise must have {rows} x {width} float32 numbers ({4 * rows * width} bytes), not {len(content)}"
        )
    noise = torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(rows, width)
    if not bool(((noise >= 0) & (noise < 1)).all()):
        raise Refusal("noise must be numbers from 0 to below 1")
    return noise


def further_noise(noise: Tensor, number: int) -> Tensor:
    """Noise of the same shape to sample a `number`-th time with, the same for the same noise."""
    digest = hashlib.sha256(noise.numpy().tobytes() + bytes([number])).digest()
    return seeded_noise(int.from_bytes(digest[:7], "big"), *noise.shape)
