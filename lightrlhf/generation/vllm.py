"""A server with vLLM's routes: it samples by token ids, scores, loads weights, reports their version, and sleeps.

`lightrlhf.serve` has the same routes, and also takes the noise to sample with. No tokenizer stands between: what a
model read and sampled comes back as ids, with the log-probabilities it was sampled by.

Left out: transfer of weights over NCCL, requests of several versions, and several models at a server.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.generation.server_client import (
    LONGEST_REPLY,
    Busy,
    InvalidResponse,
    NoRoute,
    ServerClient,
    message_of,
    one_line,
)

NO_VERSION = "none"  # while weights are loaded, and where a load failed
VERSION, PREFIX = re.compile(r"[0-9a-f]{8}-\d+"), "lightrlhf-"  # names of versions, and of exchange folders
BYTES_PER_TOKEN = 512  # at most, of a reply; vLLM writes about 60
RESETS, RESET_SECONDS = 60, 1.0  # attempts to reset a prefix cache, and the pause between two


class OtherVersion(Busy):
    """A server with other weights than it was given: it was started again, or another trainer uses it."""


class Chunk(NamedTuple):
    """Prompts of one request; equal prompts are adjacent."""

    prompts: list[list[int]]
    uniforms: Tensor  # (rows, max_new_tokens)
    allowed: list[list[int]] | None = None  # the only tokens that each row may sample; None: any

    def select(self, rows: list[int]) -> Chunk:
        """Some of the rows."""
        return Chunk(
            [self.prompts[i] for i in rows], self.uniforms[rows], self.allowed and [self.allowed[i] for i in rows]
        )


class Response(NamedTuple):
    """One response of a server."""

    ids: list[int]
    logprobs: list[float]
    truncated: bool


class Target(NamedTuple):
    """Weights for servers."""

    folder: Path
    version: str
    is_adapter: bool


class VLLM:
    """vLLM 0.26 and later in developer mode (VLLM_SERVER_DEV_MODE=1), or `lightrlhf.serve`.

    deadline: seconds for a request that computes. Its methods raise as `ServerClient.ask` does.
    """

    def __init__(self, client: ServerClient, deadline: float) -> None:
        self.client, self.ask, self.deadline = client, client.ask, deadline
        self.takes_noise = False  # our own server, whose samples are bitwise the local engine's
        self.model = ""  # name of the served model
        self.adapter = ""  # name of the adapter to sample from; the model itself when empty
        self.settings: dict[str, Any] = {}  # dtype, logprobs_mode and more, where it tells them
        self.loading = asyncio.Lock()  # one load at a time

    async def connect(self, follows: bool = True) -> None:
        """Find out whether it is vLLM or our own server, its model and settings. Raises: RunFailure if neither.

        follows: its weights are to follow a trainer's.
        """
        await self.client.check_health()
        about = None
        with suppress(NoRoute):
            about = await self.ask("/version")
        if not isinstance(about, dict) or about.get("version") is None:
            raise RunFailure(f"{self.client.name} is neither vLLM nor lightrlhf.serve")
        self.takes_noise = str(about["version"]).startswith("lightrlhf")
        self.model = next((str(model.get("id")) for model in await self._models() if not model.get("parent")), "")
        if not follows:
            return
        try:
            answer = await self.ask("/server_info?config_format=json")
        except NoRoute:
            raise RunFailure(
                f"{self.client.name} is not in developer mode, so weights cannot follow; start it by "
                "python -m lightrlhf.serve, or with VLLM_SERVER_DEV_MODE=1"
            ) from None
        config = answer.get("vllm_config") if isinstance(answer, dict) else None
        settings = config.get("model_config") if isinstance(config, dict) else None
        self.settings = settings if isinstance(settings, dict) else {}

    async def _models(self) -> list[dict[str, Any]]:
        """The models and adapters that it serves."""
        answer = await self.ask("/v1/models")
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list) or not data or not all(isinstance(model, dict) for model in data):
            raise InvalidResponse("/v1/models names no model")
        return data

    # -------------------------------------------------------------------------------------------------------- sampling
    async def sample(self, chunk: Chunk, args: SamplingArgs, ends: Collection[int]) -> list[Response]:
        """The responses to a chunk, in order; by one request for each list of allowed tokens, all at once.

        ends: ids of the tokens that end a response.
        """
        if chunk.allowed is None:
            return await self._sample(chunk, args, ends)
        rows: dict[tuple[int, ...], list[int]] = {}  # with the same list
        for row, ids in enumerate(chunk.allowed):
            rows.setdefault(tuple(ids), []).append(row)
        requests = (self._sample(chunk.select(own), args, ends) for own in rows.values())
        answers = await asyncio.gather(*requests, return_exceptions=True)  # all end before one is asked again
        responses: dict[int, Response] = {}
        for own, answer in zip(rows.values(), answers):
            if isinstance(answer, BaseException):
                raise answer
            responses |= zip(own, answer)
        return [responses[row] for row in range(len(chunk.prompts))]

    async def _sample(self, chunk: Chunk, args: SamplingArgs, ends: Collection[int]) -> list[Response]:
        count, model = len(chunk.prompts), self.adapter or self.model
        longest = max(map(len, chunk.prompts)) + args.max_new_tokens
        room = self.settings.get("max_model_len")
        if type(room) is int and longest > room:  # vLLM would cut responses without a word
            raise RunFailure(
                f"{self.client.name} has room for {room} tokens, a prompt with its response needs {longest}; start it "
                f"with --max-model-len {longest} or more, or lower --max_new_tokens"
            )
        body = {"model": model, **completion_body(chunk, args, ends)}
        if self.takes_noise:
            body["noise"] = base64.b64encode(chunk.uniforms.float().numpy().astype("<f4").tobytes()).decode()
        else:
            body["cache_salt"] = await self.version()  # keys and values of other weights are never reused
        reply = await self.ask(
            "/v1/completions", body, self.deadline, LONGEST_REPLY + BYTES_PER_TOKEN * count * longest
        )
        if isinstance(reply, dict) and reply.get("model", model) != model:
            raise InvalidResponse(f"an answer of the model {reply['model']!r}, not of {model!r}")
        responses = []
        for row, choice in enumerate(order_choices(reply, count)):
            if choice.get("prompt_token_ids") != chunk.prompts[row]:
                raise InvalidResponse(f"an answer to another prompt in choice {row}")
            responses.append(response_of(choice, args, ends))
            if chunk.allowed is not None and not {*responses[-1].ids} <= {*chunk.allowed[row]}:
                raise InvalidResponse("tokens that were not allowed; does the server know allowed_token_ids?")
        return responses

    async def score(self, texts: list[list[int]]) -> list[list[float]]:
        """Log-probability of each token after the first, read without cached prefixes, at temperature 1."""
        told = await self.score_top(texts, 0)
        return [[places[i][token] for i, token in enumerate(ids[1:])] for ids, places in zip(texts, told)]

    async def score_top(self, texts: list[list[int]], count: int) -> list[list[dict[int, float]]]:
        """Log-probabilities, by id, of each token after the first and of the `count` likeliest ones in its place."""
        body = {"model": self.adapter or self.model, "prompt": texts, "max_tokens": 1, "prompt_logprobs": count}
        salt = {} if self.takes_noise else {"cache_salt": secrets.token_hex(8)}
        longest = LONGEST_REPLY + BYTES_PER_TOKEN * (1 + count) * sum(map(len, texts))
        reply = await self.ask("/v1/completions", body | salt, self.deadline, longest)
        try:
            return [
                [
                    _values_at(values, token)
                    for token, values in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                for ids, choice in zip(texts, order_choices(reply, len(texts)))
            ]
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as problem:
            raise InvalidResponse(f"prompt_logprobs that cannot be read: {message_of(problem)}") from None

    # --------------------------------------------------------------------------------------------------------- weights
    async def version(self) -> str:
        """The version of its weights."""
        answer = await self.ask("/weight_info")
        return str(answer.get("weight_version")) if isinstance(answer, dict) else NO_VERSION

    async def check_version(self, version: str) -> None:
        """Raises: OtherVersion when it has other weights, as after a restart."""
        if (found := await self.version()) != version:
            raise OtherVersion(f"it has weights of version {one_line(found)[:80]}, not {version}")

    async def load(self, target: Target) -> None:
        """Load weights while sampling is paused, set their version, and read it back."""
        async with self.loading:
            with suppress(NoRoute):
                answer = await self.ask("/is_sleeping")
                if isinstance(answer, dict) and answer.get("is_sleeping") is True:  # left so by a run that was killed
                    await self.sleep(False)
            try:
                await self.ask("/pause?mode=wait", {}, self.deadline)
                await self._load(target)
            finally:
                await self.ask("/resume", {})
            answer = await self.ask("/is_paused")
            if isinstance(answer, dict) and answer.get("is_paused"):
                raise RunFailure(f"{self.client.name} stays paused after /resume; restart it")
            if (found := await self.version()) != target.version:
                raise RunFailure(
                    f"{self.client.name} was given weights of version {target.version} and says that it has "
                    f"{one_line(found)[:80]}; does another trainer use it?"
                )

    async def _load(self, target: Target) -> None:
        for model in await self._models():  # adapters of trainers that have ended: their folders went with them
            name, root = str(model.get("id")), str(model.get("root"))
            if model.get("parent") and VERSION.fullmatch(name) and PREFIX in root and not Path(root).exists():
                await self.ask("/v1/unload_lora_adapter", {"lora_name": name})
        await self.ask("/update_weight_version", {"new_version": NO_VERSION})
        if target.is_adapter:
            await self._load_adapter(target)
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(target.folder)}}
            await self.ask("/collective_rpc", body, self.deadline)
        await self._reset_cache()
        await self.ask("/update_weight_version", {"new_version": target.version})

    async def _load_adapter(self, target: Target) -> None:
        """Load the adapter under a new name and unload this run's older ones."""
        body = {"lora_name": target.version, "lora_path": str(target.folder)}
        if target.version not in [model.get("id") for model in await self._models()]:  # else a load that failed later
            await self.ask("/v1/load_lora_adapter", body, self.deadline)
        roots = {str(model.get("id")): model.get("root") for model in await self._models()}
        if roots.get(target.version) != str(target.folder):
            raise RunFailure(
                f"{self.client.name} serves adapter {target.version} from {roots.get(target.version)}, not from "
                f"{target.folder}; restart the server"
            )
        self.adapter = target.version
        token = target.version.partition("-")[0]
        for old in roots:
            if old.startswith(f"{token}-") and old != target.version:
                await self.ask("/v1/unload_lora_adapter", {"lora_name": old})

    async def _reset_cache(self) -> None:
        """Drop cached keys and values of earlier weights; a server refuses while requests hold some."""
        for _ in range(RESETS):
            answer = await self.ask("/reset_prefix_cache", {})
            if not isinstance(answer, dict) or answer.get("success", True) is True:  # before 0.26 there is no answer
                return
            await asyncio.sleep(RESET_SECONDS)
        raise Busy(f"its prefix cache could not be reset in {RESETS} attempts; other clients hold blocks of it")

    async def sleep(self, asleep: bool) -> None:
        """Free the server's memory of the accelerator, or take it again."""
        await self.ask("/sleep?level=1" if asleep else "/wake_up", {}, self.deadline)


def _values_at(values: dict[str, dict[str, Any]], token: int) -> dict[int, float]:
    """Log-probabilities by id in one place of a prompt, the token's among them. Raises: KeyError, ValueError."""
    found = {int(index): float(one["logprob"]) for index, one in values.items()}
    if not all(value <= 1e-3 for value in (found[token], *found.values())):  # NaN, too
        raise ValueError("a log-probability above 0")
    return found


# ------------------------------------------------------------------------------------------------ requests and replies
def completion_body(chunk: Chunk, args: SamplingArgs, ends: Collection[int]) -> dict[str, Any]:
    """The body of a request for a chunk; equal prompts are sent once where each is asked for equally often."""
    groups = [list(rows) for _, rows in itertools.groupby(chunk.prompts)]
    is_even = len({len(rows) for rows in groups}) == 1
    body = {"prompt": [rows[0] for rows in groups] if is_even else chunk.prompts, "n": len(groups[0]) if is_even else 1}
    body |= {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}
    body |= {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    body |= {"repetition_penalty": args.repetition_penalty, "logprobs": 0, "return_token_ids": True}
    body |= {"stop": args.stop_strings or None, "include_stop_str_in_output": True}
    body |= {"stop_token_ids": sorted(ends), "ignore_eos": True}  # the ends are the policy's
    return body if chunk.allowed is None else body | {"allowed_token_ids": chunk.allowed[0]}


def order_choices(reply: Any, count: int) -> list[dict[str, Any]]:
    """The choices of a reply by their index. Raises: InvalidResponse unless there is one for each of `count` rows."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != count:
        raise InvalidResponse(f"{len(choices) if isinstance(choices, list) else 'no'} choices for {count} responses")
    if not all(isinstance(choice, dict) and type(choice.get("index")) is int for choice in choices):
        raise InvalidResponse("a choice without an index")
    ordered = sorted(choices, key=lambda choice: choice["index"])
    if [choice["index"] for choice in ordered] != list(range(count)):
        raise InvalidResponse("choices whose indices are not the request's")
    return ordered


def response_of(choice: dict[str, Any], args: SamplingArgs, ends: Collection[int]) -> Response:
    """The response in a choice. Raises: InvalidResponse unless the model could have sampled it."""
    ids, end, values = choice.get("token_ids"), choice.get("finish_reason"), choice.get("logprobs")
    logprobs = values.get("token_logprobs") if isinstance(values, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InvalidResponse("a response without token ids; is the server too old to return them?")
    if len(ids) > args.max_new_tokens:
        raise InvalidResponse(f"a response of {len(ids)} tokens, {args.max_new_tokens} were asked for")
    if not {*ids[:-1]}.isdisjoint(ends):
        raise InvalidResponse("a response that goes on after an end token")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise InvalidResponse("a response without one log-probability for each token")
    if not all(type(x) in (int, float) and -1e9 < x <= 1e-3 for x in logprobs):  # NaN and infinite ones neither
        raise InvalidResponse("log-probabilities that are not numbers of at most 0")
    if end == "length" and len(ids) == args.max_new_tokens:
        return Response(ids, [float(x) for x in logprobs], ids[-1] not in ends)
    if end == "stop" and (ids[-1] in ends or args.stop_strings):
        return Response(ids, [float(x) for x in logprobs], False)
    raise InvalidResponse(
        f"a response of {len(ids)} tokens that ends at token {ids[-1]} with finish_reason {one_line(str(end))[:50]!r}"
    )
