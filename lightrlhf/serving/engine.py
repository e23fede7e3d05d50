"""The served model: completions by the scheduler, new weights, adapters by name.

Requests are decoded together, and share prefixes if they name the same adapter (`generation.scheduler`). A request that
brings its noise is a separate batch, one call of `generate` by turns: its choices are bitwise equal to the same call in
another process on the same kind of device with as many threads. Weights change when the requests before have ended, and
those after it wait, so never under a request.

Left out: several devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import Completions, generate_turns
from lightrlhf.generation.rollout import score_prompts
from lightrlhf.generation.scheduler import Scheduler
from lightrlhf.generation.slots import SPARE_COLUMNS
from lightrlhf.generation.tickets import Ask, Failed, Job, Token
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import lora
from lightrlhf.models.reloading import load_weights
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.serving.answers import Answer, Choice
from lightrlhf.serving.bodies import TextBody
from lightrlhf.serving.requests import Completion, Served

MOST_ADAPTERS = 4
UNLIMITED = 2**20  # positions of an architecture that names no limit


class Adapter(NamedTuple):
    """An adapter on the model."""

    policy: Policy
    layer_name: str  # in the model's layers, where names may have no dots
    folder: str


class Engine:
    """A model behind the routes.

    name: what requests call it; root: the folder or hub name that it was loaded from; merged_into: the base of an
    adapter that was merged when it was loaded, else None; dtype: float32, or a half one by autocast as in a training
    run with `--precision bf16-mixed` or `16-mixed`.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        name: str,
        root: str,
        num_slots: int = 64,
        dtype: torch.dtype = torch.float32,
        merged_into: str | None = None,
        cache_bytes: int = 2**30,
    ) -> None:
        policy.eval()  # weights that require gradients, as in training: torch multiplies frozen ones in another order
        self.tokenizer, self.name, self.root, self.num_slots, self.dtype = tokenizer, name, root, num_slots, dtype
        self.policy, self.merged_into = policy, merged_into
        self.adapters: dict[str, Adapter] = {}
        self.num_loaded, self.num_reloads = 0, 0
        self.version = "default"  # of the weights, a name that clients give
        self.scheduler = Scheduler(tokenizer, num_slots, cache_bytes, self._autocast)
        self.packed: dict[tuple[Policy, torch.dtype], Any] = {}  # weights for requests with noise

    def limits(self) -> Served:
        """The model's limits, which requests are checked against."""
        positions = getattr(self.policy.model.config, "max_position_embeddings", None) or UNLIMITED
        return Served(self.tokenizer, vocabulary_size(self.policy), positions, [self.name, *self.adapters])

    # ------------------------------------------------------------------------------------------------------ completions
    async def complete(self, request: Completion) -> Answer:
        """The answer to a request; cancelling ends it. Raises: UsageError."""
        answer = Answer([Choice() for _ in request.rows], None, self.version)
        async with aclosing(self.stream(request)) as parts:
            async for index, choice, about in parts:
                answer.choices[index] = choice
                answer = about._replace(choices=answer.choices)
        scores = None
        if isinstance(request.body, TextBody) and (count := request.body.prompt_logprobs) is not None:
            scores = await self.run(at_once(lambda: self._scores(request, count)))
        return answer._replace(scores=scores)

    async def stream(self, request: Completion) -> AsyncGenerator[tuple[int, Choice, Answer], None]:
        """Each choice so far, by its index, when it has more tokens, and an answer without choices. Raises: UsageError.

        Choices of given noise come whole.
        """
        if request.is_exact:
            sampled, version = await self.run(self._sample_exactly(request), num_bytes=self._cache_of(request))
            found = zip(sampled.responses, sampled.logprobs, sampled.truncated)
            for index, (ids, logprobs, cut) in enumerate(found):
                yield index, Choice(ids, logprobs, "length" if cut else "stop"), Answer([], None, version)
            return
        choices = [Choice() for _ in request.rows]
        async with aclosing(self._tokens(request)) as parts:  # whose end frees the rows
            async for tokens, cached, version in parts:
                about = Answer([], None, version, cached)
                for token in tokens:
                    choices[token.index].add(token)
                    yield token.index, choices[token.index], about

    async def _tokens(self, request: Completion) -> AsyncGenerator[tuple[list[Token], int, str], None]:
        """What each turn of the scheduler adds, with the tokens of prompts that were known, and the version."""
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[list[Token] | Failed, str]]()

        def emit(part: list[Token] | Failed) -> None:  # in the scheduler's thread
            loop.call_soon_threadsafe(parts.put_nowait, (part, self.version))

        ends = self._ends(request)
        rows = zip(request.rows, request.noise)
        asks = [Ask(prompt, request.sampling, ends, noise, request.body.allowed_token_ids) for prompt, noise in rows]
        ticket = self.scheduler.submit(lambda: self._policy(request.model), request.model, asks, emit)
        left = len(asks)
        try:
            while left:
                part, version = await parts.get()
                if isinstance(part, Failed):
                    raise part.problem
                left -= sum(token.finish is not None for token in part)
                yield part, ticket.cached, version
        finally:
            ticket.cancel()

    async def run(self, turns: Generator[Any, None, Any], alone: bool = False, num_bytes: int = 0) -> Any:
        """The result of a job of the scheduler; cancelling ends it before its next turn."""
        job = self.scheduler.run(Job(turns, alone, num_bytes))
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.cancel()

    async def change(self, work: Callable[[], None]) -> None:
        """Change weights: when requests before have ended, and before those after."""

        def change() -> None:
            try:
                work()
            finally:
                self.scheduler.memory.forget_weights()
                self.packed.clear()

        await self.run(at_once(change), alone=True)

    async def rename(self, version: str) -> None:
        """Give the weights another name, for the requests after this."""
        await self.run(at_once(lambda: setattr(self, "version", version)), alone=True)

    def _sample_exactly(self, request: Completion) -> Generator[None, None, tuple[Completions, str]]:
        """One call of `generate` by turns, and the version of the weights."""
        policy = self._policy(request.model)

        def pack(model: Any, steps: int, own: torch.dtype) -> Any:
            dtype = cpu.packed_dtype(model, steps, own)
            if dtype is None:
                return None
            if (policy, dtype) not in self.packed:
                self.packed.clear()  # one copy at a time
                self.packed[policy, dtype] = cpu.pack_decoder(model, steps, own)
            return self.packed[policy, dtype]

        given = policy, request.rows, request.sampling, self._ends(request), request.noise, self.num_slots
        more = self.tokenizer, request.body.allowed_token_ids, self._autocast, pack
        sampled = yield from generate_turns(*given, *more)
        return sampled, self.version

    def _cache_of(self, request: Completion) -> int:
        """Bytes of keys and values of a call of `generate`, about."""
        config = self.policy.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        columns = max(map(len, request.prompts)) + request.sampling.max_new_tokens + SPARE_COLUMNS
        rows = min(self.num_slots, len(request.rows))
        return rows * columns * config.num_hidden_layers * heads * size * 2 * self.dtype.itemsize

    def _scores(self, request: Completion, count: int) -> list[list[dict[int, float]]]:
        """Log-probabilities of the prompts' tokens after the first, and of the `count` likeliest ones."""
        with self._autocast():
            return score_prompts(self._policy(request.model), request.prompts, count, self.num_slots)

    def _policy(self, name: str) -> Policy:
        """The policy of a model's or adapter's name. Raises: UsageError when it was unloaded meanwhile."""
        if name == self.name:
            return self.policy
        if name not in self.adapters:
            raise UsageError(f"unknown model {name!r}; it was unloaded")
        return self.adapters[name].policy

    def _ends(self, request: Completion) -> list[int]:
        return [] if request.body.ignore_eos else end_ids(self.tokenizer, self.policy.model)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.policy.model.device.type, dtype=self.dtype)

    # ---------------------------------------------------------------------------------------------------------- weights
    def reload(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder in place. Raises: UsageError, with the old weights as they were."""
        if self.adapters:
            raise UsageError(
                f"adapters are loaded ({', '.join(self.adapters)}), which belong to the old weights; unload them"
            )
        load_weights(self.policy.model, Path(folder))
        self.num_reloads += 1
        self.version = f"reloaded-{self.num_reloads}"  # until a client names it: never the name of the old weights
        self.merged_into = None

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a peft folder under a name. Raises: UsageError when that is taken, or the folder does not fit."""
        if name == self.name or name in self.adapters:
            raise UsageError(f"{name} is loaded already; give each version another name")
        if len(self.adapters) >= MOST_ADAPTERS:
            raise UsageError(f"{MOST_ADAPTERS} adapters are loaded; unload one of {', '.join(self.adapters)}")
        if self.merged_into is not None:
            raise UsageError(
                f"{self.root} is an adapter, merged here into {self.merged_into}, and {folder} would come on top; "
                f"serve {self.merged_into} to load adapters"
            )
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is not a folder that this server can see")
        model, layer_name = self.policy.model, f"served_{self.num_loaded}"
        self.num_loaded += 1
        try:
            config = lora.adapter_config(folder, "lora_path")
            if config is None:
                raise UsageError(f"{folder} holds no adapter ({lora.ADAPTER_CONFIG})")
            lora.load_adapter(model, layer_name, folder, config)
            weights = lora.adapter_modules(model, layer_name).to(model.device)
            if bad := not_finite(weights.named_parameters()):
                raise UsageError(f"{folder} has weights that are not finite: {bad[0].replace('/', '.')}")
        except Exception as problem:  # a damaged file makes the libraries raise anything
            lora.remove_adapter(model, layer_name)
            raise UsageError(f"{folder} cannot be loaded: {first_line(problem)}") from None
        finally:  # outside of the roles of adapters the model is as it was
            lora.configure(model, active=self.policy.adapters, trainable=())
        plain, base = self.policy.head_is_plain, self.policy.base
        role = Policy(model, (layer_name,), base, shares=True, trainable=False, head_is_plain=plain).eval()
        self.adapters[name] = Adapter(role, layer_name, folder)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises: UsageError when the name is unknown."""
        if name not in self.adapters:
            raise UsageError(f"no adapter {name!r} is loaded")
        lora.remove_adapter(self.policy.model, self.adapters.pop(name).layer_name)


def at_once(work: Callable[[], Any]) -> Generator[None, None, Any]:
    """Work as a job of one turn, with its value."""
    return work()
    yield
