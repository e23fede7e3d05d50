"""Bodies of requests, checked field by field before any work: a request, or one line on why it is refused.

Fields and defaults are OpenAI's with vLLM's additions. A field that would change what is sampled and is not served is
refused unless it has its neutral value; a misspelt one is refused, too. `noise` is ours: the uniform numbers to sample
with, so that a server samples bit by bit what the engine samples in the trainer's process.

Left out: log-probabilities of other than the sampled tokens, tools, formats of answers, and penalties other than the
repetition penalty.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import seeded_noise
from lightrlhf.data.chat import Messages
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.data.types import Tokenizer

MOST_ROWS = 16_384  # prompts x n of one request
MOST_TOKENS = 2**26  # rows x max_tokens, for which memory is taken at once
HOTTEST = 1e6  # temperature
LONGEST_LINE = 500  # characters of a refusal


class Refusal(Exception):
    """A request that is not answered: a status, one line on why, and seconds after which it may be."""

    def __init__(self, line: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(" ".join(line.split())[:LONGEST_LINE])
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


class Served(NamedTuple):
    """The model's limits, which requests are checked against."""

    tokenizer: Tokenizer
    vocabulary: int  # token ids are below
    positions: int  # of prompt and response together
    models: Sequence[str]  # the model's name, then its adapters'


class Field(NamedTuple):
    """A field of a body."""

    accepts: Callable[[Any], bool]
    words: str
    default: Any = None


@dataclass(frozen=True)
class Completion:
    """A request of completions: n responses to each prompt, prompt by prompt."""

    model: str
    prompts: list[list[int]]
    n: int
    sampling: DecodingArgs
    noise: Tensor  # (prompts x n, max_new_tokens) uniform numbers
    exact: bool  # they were given, so choices are bit by bit as in one call of the engine
    ignore_eos: bool
    allowed: list[int] | None  # the only tokens that may be sampled
    logprobs: bool
    prompt_logprobs: bool
    return_token_ids: bool
    skip_special_tokens: bool
    include_stop: bool
    stream: bool
    include_usage: bool
    chat: bool

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]


def is_whole(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
    """Whether a value is a whole number between two others; True and 1.0 are not."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and abs(value) <= 1e30 and math.isfinite(value)


def is_text(value: Any) -> bool:
    """Whether a value is a text that can be encoded, without halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def are_ids(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_stops(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(is_text(one) and one for one in value)


def _has_usage(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {"include_usage", "continuous_usage_stats"}


FIELDS = {
    "model": Field(is_text, "a text"),
    "n": Field(lambda n: is_whole(n, 1, MOST_ROWS), f"a whole number from 1 to {MOST_ROWS}", 1),
    "max_tokens": Field(lambda n: is_whole(n, 1, MOST_TOKENS), "a whole number of at least 1"),
    "temperature": Field(lambda t: is_number(t) and t >= 0, "a number of at least 0", 1.0),
    "top_p": Field(lambda p: is_number(p) and 0 < p <= 1, "a number above 0 and up to 1", 1.0),
    "top_k": Field(lambda k: is_whole(k, -1), "a whole number; 0 and -1 take all tokens", 0),
    "min_p": Field(lambda p: is_number(p) and 0 <= p <= 1, "a number from 0 to 1", 0.0),
    "repetition_penalty": Field(lambda p: is_number(p) and p > 0, "a number above 0", 1.0),
    "seed": Field(lambda seed: is_whole(seed), "a whole number of at least 0"),
    "stop": Field(lambda s: (is_text(s) and bool(s)) or _are_stops(s), "a text or up to 16 texts, none empty"),
    "stop_token_ids": Field(are_ids, "a list of token ids", []),
    "include_stop_str_in_output": Field(_is_flag, "true or false", False),
    "skip_special_tokens": Field(_is_flag, "true or false", True),
    "ignore_eos": Field(_is_flag, "true or false", False),
    "allowed_token_ids": Field(lambda ids: are_ids(ids) and bool(ids), "a list of token ids, not empty"),
    "return_token_ids": Field(_is_flag, "true or false", False),
    "noise": Field(is_text, "base64 of little-endian float32"),
    "stream": Field(_is_flag, "true or false", False),
    "stream_options": Field(_has_usage, "an object with include_usage", {}),
}
OF_TEXT = FIELDS | {
    "prompt": Field(lambda prompt: True, ""),
    "logprobs": Field(lambda n: is_whole(n, 0, 0), "0 (for the sampled tokens; no others are served), or null"),
    "prompt_logprobs": Field(lambda n: is_whole(n, 0, 0), "0 (for the prompt's own tokens), or null"),
}
OF_CHAT = FIELDS | {
    "messages": Field(lambda messages: True, ""),
    "max_completion_tokens": FIELDS["max_tokens"],
    "logprobs": Field(_is_flag, "true or false", False),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are taken with these values, or null, only
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "priority", "request_id", "cache_salt"}


def read_json(content: bytes) -> dict[str, Any]:
    """The object in a body. Raises: Refusal when it is not a JSON object, is nested too deep, or has NaN."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        body = json.loads(content, parse_constant=constant)
    except RecursionError:
        raise Refusal("the body is nested too deep") from None
    except ValueError as problem:  # UnicodeDecodeError and numbers of too many digits, too
        raise Refusal(f"the body is not JSON: {problem}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, not a {type(body).__name__}")
    return body


def read_fields(body: dict[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """The values of all fields, null as not given. Raises: Refusal naming a field that is wrong or unknown."""
    for name, value in body.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refusal(f"{name} is not served; leave it out")
        if name not in fields and name not in NEUTRAL and name not in WITHOUT_EFFECT:
            raise Refusal(f"unknown field {name[:100]!r}")
        if name in fields and value is not None and not fields[name].accepts(value):
            raise Refusal(f"{name} must be {fields[name].words}, not {json.dumps(value)[:100]}")
    return {name: field.default if body.get(name) is None else body[name] for name, field in fields.items()}


def read_required(body: dict[str, Any], *names: str) -> list[str]:
    """Texts of a body that must be given. Raises: Refusal naming the field."""
    for name in names:
        if not is_text(body.get(name)) or not body[name] or "\0" in body[name]:
            raise Refusal(f"{name} must be given, a text")
    return [body[name] for name in names]


def check_room(longest: int, max_tokens: int, positions: int) -> None:
    """Raises: Refusal when the longest prompt and its response exceed the model's positions."""
    if longest >= positions:
        raise Refusal(
            f"a prompt of {longest} tokens fills the {positions} positions, without room for a response; shorten it"
        )
    if longest + max_tokens > positions:
        raise Refusal(
            f"max_tokens {max_tokens} after a prompt of {longest} tokens does not fit into the {positions} positions; "
            f"use at most {positions - longest}"
        )


def read_completion(body: dict[str, Any], served: Served, chat: bool) -> Completion:
    """The request of a body. Raises: Refusal with one line on what is wrong."""
    values = read_fields(body, OF_CHAT if chat else OF_TEXT)
    model = values["model"] or served.models[0]
    if model not in served.models:
        raise Refusal(f"unknown model {model[:100]!r}; here are {', '.join(served.models)}")
    prompts = [read_messages(body.get("messages"), served)] if chat else read_prompts(body.get("prompt"), served)
    n, longest = values["n"], max(map(len, prompts))
    max_tokens = values.get("max_completion_tokens") or values["max_tokens"]
    if max_tokens is None:
        max_tokens = max(served.positions - longest, 1) if chat else 16
    check_room(longest, max_tokens, served.positions)
    if len(prompts) * n > MOST_ROWS or len(prompts) * n * max_tokens > MOST_TOKENS:
        raise Refusal(
            f"{len(prompts) * n} responses of up to {max_tokens} tokens are more than one request may ask for "
            f"({MOST_ROWS} responses, {MOST_TOKENS} tokens); send several"
        )
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(values[name] or [], name, served.vocabulary)
    greedy = values["temperature"] == 0
    if not greedy and values["temperature"] < 1e-6:
        raise Refusal(f"temperature {values['temperature']} is neither 0, the most likely token, nor at least 1e-6")
    if values["temperature"] > HOTTEST:
        raise Refusal(f"temperature {values['temperature']:g} is above {HOTTEST:g}, where all tokens are as likely")
    if values["stream"] and values.get("prompt_logprobs") is not None:
        raise Refusal("prompt_logprobs are not streamed; leave out stream")
    stop = values["stop"] or []
    sampling = DecodingArgs(
        max_new_tokens=max_tokens,
        temperature=1.0 if greedy else values["temperature"],
        do_sample=not greedy,
        top_k=max(values["top_k"], 0),
        top_p=values["top_p"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        eos_ids=values["stop_token_ids"],
        stop_strings=[stop] if isinstance(stop, str) else stop,
    )
    return Completion(
        model=model,
        prompts=prompts,
        n=n,
        sampling=sampling,
        noise=noise_of(values, len(prompts) * n, max_tokens),
        exact=values["noise"] is not None,
        ignore_eos=values["ignore_eos"],
        allowed=sorted(set(values["allowed_token_ids"])) if values["allowed_token_ids"] else None,
        logprobs=values["logprobs"] is not None and values["logprobs"] is not False,
        prompt_logprobs=values.get("prompt_logprobs") is not None,
        return_token_ids=values["return_token_ids"],
        skip_special_tokens=values["skip_special_tokens"],
        include_stop=values["include_stop_str_in_output"],
        stream=values["stream"],
        include_usage=values["stream_options"].get("include_usage") is True,
        chat=chat,
    )


def read_prompts(given: Any, served: Served) -> list[list[int]]:
    """Prompts as lists of ids: of a text, of ids, or of several of either. Raises: Refusal."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list | str)
    prompts = given if several else [given]
    if len(prompts) > MOST_ROWS:
        raise Refusal(f"{len(prompts)} prompts are more than one request may have ({MOST_ROWS}); send several")
    results = []
    for number, prompt in enumerate(prompts):
        where = f"prompt {number}" if several else "prompt"
        if is_text(prompt):
            prompt = encode(prompt, served)
        if not are_ids(prompt) or not prompt:
            raise Refusal(f"{where} must be a text or a list of token ids, not empty")
        check_ids(prompt, where, served.vocabulary)
        results.append(prompt)
    return results


def read_messages(given: Any, served: Served) -> list[int]:
    """The ids of messages by the chat template. Raises: Refusal."""
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list of {role, content}, not empty")
    messages = []
    for number, message in enumerate(given):
        if not isinstance(message, dict) or not is_text(message.get("role")):
            raise Refusal(f"messages {number} must be an object with a role and a content")
        if more := message.keys() - {"role", "content", "name"}:
            raise Refusal(f"messages {number} has {min(more)[:100]!r}, which is not served")
        messages.append({**message, "content": content_of(message.get("content"), number)})
    ids = encode(messages, served)
    check_ids(ids, "the messages", served.vocabulary)
    return ids


def content_of(content: Any, number: int) -> str:
    """The text of a message, which may come in parts. Raises: Refusal."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(part, dict) and part.get("type") == "text" and is_text(part.get("text")) for part in parts):
        raise Refusal(f"the content of messages {number} must be a text, or parts of type text")
    return "".join(part["text"] for part in parts)


def encode(prompt: str | Messages, served: Served) -> list[int]:
    """Token ids of a prompt, in which no text becomes a control token. Raises: Refusal."""
    if not isinstance(prompt, str) and not served.tokenizer.chat_template:
        raise Refusal("this model's tokenizer has no chat template; send a prompt to /v1/completions")
    try:
        ids = encode_prompt(served.tokenizer, prompt)
    except UsageError as problem:
        raise Refusal(str(problem)) from None
    if not ids:
        raise Refusal("the prompt has no tokens")
    return ids


def check_ids(ids: Sequence[int], where: str, vocabulary: int) -> None:
    """Raises: Refusal when a token id is beyond the vocabulary."""
    largest = max(ids, default=0)
    if largest >= vocabulary:
        raise Refusal(f"{where} has the token id {str(largest)[:30]}; the model has {vocabulary} tokens")


def noise_of(values: dict[str, Any], rows: int, width: int) -> Tensor:
    """(rows, width) uniform numbers: those given as `noise`, else drawn from `seed`, else random. Raises: Refusal."""
    if values["noise"] is None:
        seed = secrets.randbits(63) if values["seed"] is None else values["seed"]
        return seeded_noise(seed, rows, width)
    try:
        content = base64.b64decode(values["noise"], validate=True)
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
