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
from typing import Any

import torch

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import Completions, cache_bytes, generate_turns
from lightrlhf.generation.rollout import score_prompts
from lightrlhf.generation.scheduler import Scheduler
from lightrlhf.generation.tickets import Ask, Failed, Job, Token
from lightrlhf.models.named_adapters import NamedAdapters
from lightrlhf.models.reloading import load_weights
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.serving.answers import Answer, Choice
from lightrlhf.serving.bodies import TextBody
from lightrlhf.serving.requests import Completion, Served

UNLIMITED = 2**20  # positions of an architecture that names no limit


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
        self.policy, self.num_reloads = policy, 0
        self.adapters = NamedAdapters(policy, name, merged_into)
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # in characters
        self.version = "default"  # of the weights, a name that clients give
        self.scheduler = Scheduler(tokenizer, num_slots, cache_bytes, self._autocast)
        self.packed: dict[Policy, cpu.KeptPacking] = {}  # of requests with noise

    def limits(self) -> Served:
        """The model's limits, which requests are checked against."""
        positions = getattr(self.policy.model.config, "max_position_embeddings", None) or UNLIMITED
        models = [self.name, *self.adapters.by_name]
        return Served(self.tokenizer, vocabulary_size(self.policy), positions, positions * self.longest_token, models)

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
            columns = max(map(len, request.prompts)) + request.sampling.max_new_tokens
            rows = min(self.num_slots, len(request.rows))
            num_bytes = cache_bytes(self.policy.model.config, rows, columns, self.dtype)
            sampled, version = await self.run(self._sample_exactly(request), num_bytes=num_bytes)
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
        if policy not in self.packed:
            self.packed = {policy: cpu.KeptPacking()}  # one copy at a time
        given = policy, request.rows, request.sampling, self._ends(request), request.noise, self.num_slots
        more = self.tokenizer, request.body.allowed_token_ids, self._autocast, self.packed[policy]
        sampled = yield from generate_turns(*given, *more)
        return sampled, self.version

    def _scores(self, request: Completion, count: int) -> list[list[dict[int, float]]]:
        """Log-probabilities of the prompts' tokens after the first, and of the `count` likeliest ones."""
        with self._autocast():
            return score_prompts(self._policy(request.model), request.prompts, count, self.num_slots)

    def _policy(self, name: str) -> Policy:
        """The policy of a model's or adapter's name. Raises: UsageError when it was unloaded meanwhile."""
        if name == self.name:
            return self.policy
        if name not in self.adapters.by_name:
            raise UsageError(f"unknown model {name!r}; it was unloaded")
        return self.adapters.by_name[name].policy

    def _ends(self, request: Completion) -> list[int]:
        return [] if request.body.ignore_eos else end_ids(self.tokenizer, self.policy.model)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.policy.model.device.type, dtype=self.dtype)

    # ---------------------------------------------------------------------------------------------------------- weights
    def reload(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder in place. Raises: UsageError, with the old weights as they were."""
        if names := ", ".join(self.adapters.by_name):
            raise UsageError(f"adapters are loaded ({names}), which belong to the old weights; unload them")
        load_weights(self.policy.model, Path(folder))
        self.num_reloads += 1
        self.version = f"reloaded-{self.num_reloads}"  # until a client names it: never the name of the old weights
        self.adapters.merged_into = None


def at_once(work: Callable[[], Any]) -> Generator[None, None, Any]:
    """Work as a job of one turn, with its value."""
    return work()
    yield
