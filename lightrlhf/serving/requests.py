"""Requests of completions and chat, checked before any work: a request, or one line on why it is refused.

The results of a turn's calls are put into the order of the calls. `noise` is ours: the uniform numbers to sample with,
so that a server samples bit by bit what the engine samples in the trainer's process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import seeded_noise
from lightrlhf.data.chat import Messages
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.data.tool_calls import in_order, schema_of
from lightrlhf.data.types import Tokenizer
from lightrlhf.serving.bodies import (
    MOST_ROWS,
    MOST_TOKENS,
    Call,
    ChatBody,
    Function,
    Message,
    Refusal,
    TextBody,
    Tool,
    ToolChoice,
    are_ids,
    is_text,
    read,
    read_body,
    read_json,
)


class Served(NamedTuple):
    """The model's limits, which requests are checked against."""

    tokenizer: Tokenizer
    vocabulary: int  # token ids are below
    positions: int  # of prompt and response together
    models: Sequence[str]  # the model's name, then its adapters'


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
    prompt_logprobs: int | None  # how many of the most likely tokens besides each token of the prompts
    return_token_ids: bool
    skip_special_tokens: bool
    include_stop: bool
    stream: bool
    include_usage: bool
    chat: bool
    tools: list[dict[str, Any]] | None
    reads_calls: bool  # whether responses are read as reasoning, content and calls
    wanted: str | None  # the function that must be called, empty for any; None: no call is needed

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]


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


def read_completion(body: dict[str, Any], served: Served, chat: bool, ids: list[int] | None = None) -> Completion:
    """The request of a body; ids: of its messages, where they are known. Raises: Refusal in one line."""
    values: Any = read_body(ChatBody if chat else TextBody, body)
    model = values.model or served.models[0]
    if model not in served.models:
        raise Refusal(f"unknown model {model[:100]!r}; here are {', '.join(served.models)}", param="model")
    tools, wanted = None, None
    if chat:
        messages, tools = read_conversation(body)
        wanted = read_choice(values.tool_choice, tools)
        prompts = [ids or encode_messages(messages, served, tools)]
    else:
        prompts = read_prompts(values.prompt, served)
    n, longest = values.n, max(map(len, prompts))
    max_tokens = (chat and values.max_completion_tokens) or values.max_tokens
    if max_tokens is None:
        max_tokens = max(served.positions - longest, 1) if chat else 16
    check_room(longest, max_tokens, served.positions)
    if len(prompts) * n > MOST_ROWS or len(prompts) * n * max_tokens > MOST_TOKENS:
        raise Refusal(
            f"{len(prompts) * n} responses of up to {max_tokens} tokens are more than one request may ask for "
            f"({MOST_ROWS} responses, {MOST_TOKENS} tokens); send several"
        )
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(values, name) or [], name, served.vocabulary)
    scores = None if chat else values.prompt_logprobs
    if values.stream and scores is not None:
        raise Refusal("prompt_logprobs are not streamed; leave out stream")
    if wanted is not None and values.noise is not None:
        raise Refusal("a call that must come is sampled again with other noise; leave out noise or tool_choice")
    return Completion(
        model=model,
        prompts=prompts,
        n=n,
        sampling=read_sampling(values, max_tokens),
        noise=noise_of(values, len(prompts) * n, max_tokens),
        exact=values.noise is not None,
        ignore_eos=values.ignore_eos,
        allowed=sorted(set(values.allowed_token_ids)) if values.allowed_token_ids else None,
        logprobs=values.logprobs is not None and values.logprobs is not False,
        prompt_logprobs=scores,
        return_token_ids=values.return_token_ids,
        skip_special_tokens=values.skip_special_tokens,
        include_stop=values.include_stop_str_in_output,
        stream=values.stream,
        include_usage=values.stream_options.get("include_usage") is True,
        chat=chat,
        tools=tools,
        reads_calls=bool(tools) and values.tool_choice != "none",
        wanted=wanted,
    )


def read_sampling(values: Any, max_tokens: int) -> DecodingArgs:
    """The sampling settings of a body. Raises: Refusal for a temperature that is too small to divide by."""
    greedy = values.temperature == 0
    if not greedy and values.temperature < 1e-6:
        raise Refusal(f"temperature {values.temperature} is neither 0, the most likely token, nor at least 1e-6")
    return DecodingArgs(
        max_new_tokens=max_tokens,
        temperature=1.0 if greedy else values.temperature,
        do_sample=not greedy,
        top_k=max(values.top_k, 0),
        top_p=values.top_p,
        min_p=values.min_p,
        repetition_penalty=values.repetition_penalty,
        eos_ids=values.stop_token_ids,
        stop_strings=[values.stop] if isinstance(values.stop, str) else values.stop,
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


# ----------------------------------------------------------------------------------------------------------------- chat
def read_conversation(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and tools of a body, as chat templates take them. Raises: Refusal."""
    given, tools = body.get("messages"), body.get("tools")
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list of {role, content}, not empty", param="messages")
    messages = [read_message(message, f"messages {number}") for number, message in enumerate(given)]
    try:
        messages = in_order(messages)
    except UsageError as problem:
        raise Refusal(str(problem), param="messages") from None
    return messages, [read_tool(tool, f"tools {number}") for number, tool in enumerate(tools or [])] or None


def read_message(given: Any, where: str) -> dict[str, Any]:
    """A message; its calls have objects as arguments. Raises: Refusal."""
    message = read(Message, given, where)
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise Refusal(f"the content of {where} must be a text, or parts of type text", param=f"{where} content")
    row: dict[str, Any] = {"role": message.role, "content": content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            row[name] = value
    if message.tool_calls:
        calls = [read(Call, call, f"call {number} of {where}") for number, call in enumerate(message.tool_calls)]
        row["tool_calls"] = [{"id": call.id, "type": "function", "function": _function(call, where)} for call in calls]
        if len({call.id for call in calls}) < len(calls):
            raise Refusal(f"{where} has two calls of one id", param=f"{where} tool_calls")
    return row


def _function(call: Call, where: str) -> dict[str, Any]:
    try:
        arguments = read_json(call.function.arguments.encode())
    except Refusal:
        raise Refusal(
            f"the arguments of call {call.id[:60]} of {where} must be the JSON text of an object",
            param=f"{where} tool_calls",
        ) from None
    return {"name": call.function.name, "arguments": arguments}


def read_tool(given: Any, where: str) -> dict[str, Any]:
    """A tool as templates take it. Raises: Refusal."""
    function = read(Tool, given, where).function
    read(Function, function, f"the function of {where}")
    kept = {name: value for name, value in function.items() if name != "strict" and value is not None}
    try:
        shown = json.dumps(kept, ensure_ascii=False)
    except RecursionError:
        raise Refusal(f"{where} is nested too deep") from None
    if not is_text(shown):
        raise Refusal(f"{where} has a text that cannot be encoded")
    return {"type": "function", "function": kept}


def read_choice(given: Any, tools: list[dict[str, Any]] | None) -> str | None:
    """The function that must be called, empty for any of them; None if no call is needed. Raises: Refusal."""
    if given in ("none", "auto"):
        return None
    if given != "required" and not isinstance(given, dict):
        raise Refusal(f"tool_choice must be none, auto, required or a function, not {json.dumps(given)[:100]}")
    name = "" if given == "required" else read(ToolChoice, given, "tool_choice").function.get("name", "")
    names = [tool["function"]["name"] for tool in tools or []]
    if not names or (given != "required" and name not in names):
        raise Refusal(f"tool_choice {name[:100] or 'required'}: the tools are {', '.join(names)[:300] or 'none'}")
    return name


def encode_messages(messages: Messages, served: Served, tools: list[dict[str, Any]] | None) -> list[int]:
    """The ids of messages by the chat template. Raises: Refusal, also for tools that it cannot write."""
    if tools:
        try:
            schema_of(served.tokenizer)
        except UsageError as problem:
            raise Refusal(str(problem), param="tools") from None
    ids = encode(messages, served, tools)
    check_ids(ids, "the messages", served.vocabulary)
    return ids


def encode(prompt: str | Messages, served: Served, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Token ids of a prompt, in which no text becomes a control token. Raises: Refusal."""
    if not isinstance(prompt, str) and not served.tokenizer.chat_template:
        raise Refusal("this model's tokenizer has no chat template; send a prompt to /v1/completions")
    try:
        ids = encode_prompt(served.tokenizer, prompt, tools)
    except UsageError as problem:
        raise Refusal(str(problem)) from None
    except RecursionError:
        raise Refusal("the messages are nested too deep") from None
    if not ids:
        raise Refusal("the prompt has no tokens")
    return ids


def check_ids(ids: Sequence[int], where: str, vocabulary: int) -> None:
    """Raises: Refusal when a token id is beyond the vocabulary."""
    largest = max(ids, default=0)
    if largest >= vocabulary:
        raise Refusal(f"{where} has the token id {str(largest)[:30]}; the model has {vocabulary} tokens")


def noise_of(values: Any, rows: int, width: int) -> Tensor:
    """(rows, width) uniform numbers: those given as `noise`, else drawn from `seed`, else random. Raises: Refusal."""
    if values.noise is None:
        seed = secrets.randbits(63) if values.seed is None else values.seed
        return seeded_noise(seed, rows, width)
    try:
        content = base64.b64decode(values.noise, validate=True)
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
