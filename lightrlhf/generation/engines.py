"""Engines of a program that samples responses to rows of prompts: this process, rollout servers, or a text server.

The first two exchange ids, and the noise of a row depends on the seed and its number alone, so that an interrupted or
sharded program samples the same. Rollout servers are given the weights of the model of this process; servers of the
OpenAI protocol have their own, and their seeds depend on the row's number in the same way.

Left out: engines of programs that train (`samplers.py` and `rollout.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs, ServerArgs
from lightrlhf.data.batch import mix_seed, seeded_noise
from lightrlhf.data.prompts import ids_of_prompt, with_text
from lightrlhf.data.splits import check_vocabulary
from lightrlhf.data.tokens import adds_bos, decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.generation.samplers import Sampler, ServedSampler, local_sampler
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import check_room
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.storage.jsonl import Row
from lightrlhf.storage.lazy import Lazy, map_lazily


@dataclass(frozen=True, kw_only=True)
class EngineArgs(DecodingArgs, RemoteArgs, ServerArgs):
    """Model and engine."""

    model_name: str = flag(show="first", positional=True)
    """Experiment dir, checkpoint, folder or hub name of the model; the model's name at the server for `openai`."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a model to run code from its repository."""
    num_generations: int = at_least(1, 1)
    """Responses per prompt (K)."""
    rollout_engine: Literal["local", "openai"] = flag("local", needs="base_url", excludes={"rollout_server": ...})
    """Sample by token ids in this process (or at `rollout_server`), or by text at the servers of `base_url`."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Slots of the generation engine, and the largest number of rows per pass of the reward model."""
    seed: int = random_seed(42)
    """Seed of the sampling noise."""

    def _check(self) -> None:
        if self.rollout_engine == "openai" and self.eos_ids:
            raise ValueError(f"--eos_ids {self.eos_ids[0]}: servers stop at texts, not at ids; use --stop_strings")
        if self.rollout_engine == "local" and self.base_url:
            raise ValueError(f"--base_url {self.base_url[0]} needs --rollout_engine openai")


class Local:
    """The generation engine of this process."""

    def __init__(self, args: EngineArgs, tokenizer: Tokenizer, device: torch.device) -> None:
        self.tokenizer = tokenizer
        models = FrozenArgs(trust_remote_code=args.trust_remote_code)
        self.policy = load_policy(args.model_name, models, tokenizer).eval().to(device)

    def prepare(self, args: EngineArgs, rows: Sequence[Row]) -> Lazy[Row]:
        """The rows with `prompt_ids`. Raises: UsageError when one exceeds the model's vocabulary or its positions."""
        lengths, extremes = array("q"), [0, 0]  # smallest and largest id
        for row in rows:
            ids = ids_of_prompt(self.tokenizer, row)
            lengths.append(len(ids))
            extremes = [min(*extremes, *ids), max(*extremes, *ids)]
        if rows:
            check_vocabulary([{"input_ids": extremes}], vocabulary_size(self.policy), "the prompts")
            check_room(self.policy.model, torch.tensor(lengths), args)
        return map_lazily(rows, lambda row: {**row, "prompt_ids": ids_of_prompt(self.tokenizer, row)})

    def respond(self, args: EngineArgs, rows: Sequence[Row]) -> list[Row]:
        """The prepared rows with their K responses, as texts and as ids, in order."""
        k, rows = args.num_generations, list(rows)
        prompts = [row["prompt_ids"] for row in rows for _ in range(k)]
        noise = torch.cat([noise_of(args, row["index"]) for row in rows])  # (N K, max_new_tokens)
        sampled = self.sampler(args)(prompts, noise)
        assert sampled is not None  # there are prompts
        results = []
        for i, row in enumerate(rows):
            ids, truncated = sampled.responses[i * k : (i + 1) * k], sampled.truncated[i * k : (i + 1) * k]
            texts = [decode(self.tokenizer, response) for response in ids]
            responses = {"responses": texts, "truncated": truncated, "response_ids": ids}
            results.append({**with_text(row, self.tokenizer), **responses})
        return results

    def sampler(self, args: EngineArgs) -> Sampler:
        """Who samples."""
        return local_sampler(self.policy, self.tokenizer, args, args.rollout_mini_batch_size)

    def close(self) -> None:
        """Cancel pending requests."""


class Served(Local):
    """Rollout servers, which are given the weights of the model of this process."""

    def __init__(self, args: EngineArgs, tokenizer: Tokenizer, device: torch.device) -> None:
        super().__init__(args, tokenizer, device)
        self.served = ServedSampler(args, self.policy, tokenizer)

    def sampler(self, args: EngineArgs) -> Sampler:
        return self.served.use(args)

    def close(self) -> None:
        """Cancel pending requests, and remove the exchange folder."""
        self.served.close()


class Remote:
    """OpenAI-compatible servers; tokenizer: of prompts that are ids, None where all are texts or messages."""

    def __init__(self, args: EngineArgs, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.servers = Servers(args, args.model_name)
        self.servers.wait_until_healthy()

    def prepare(self, args: EngineArgs, rows: Sequence[Row]) -> Lazy[Row]:
        """The rows with their prompts as text, or messages."""
        tokenizer = self.tokenizer
        return map_lazily(rows, lambda row: with_text(row, tokenizer) if tokenizer else row)

    def respond(self, args: EngineArgs, rows: Sequence[Row]) -> Iterator[Row]:
        """The prepared rows with their K responses, in order; the text of a refused one is None."""
        replies = self.servers.replies(request for row in rows for request in requests(row, args, self.tokenizer))
        for row in rows:
            own = [next(replies) for _ in range(args.num_generations)]
            texts = [reply.text if reply.error is None else None for reply in own]
            results: Row = {"responses": texts, "truncated": [reply.truncated for reply in own]}
            if errors := [reply.error for reply in own if reply.error]:
                results["errors"] = errors
            yield {**row, **results}

    def close(self) -> None:
        """There are no pending requests."""


def make_engine(args: EngineArgs, tokenizer: Tokenizer | None, device: torch.device) -> Local | Remote:
    """The engine of `--rollout_engine`, or of `--rollout_server`; tokenizer: of the model, where ids are sampled."""
    if args.rollout_engine == "openai":
        return Remote(args, tokenizer)
    assert tokenizer is not None
    return (Served if args.rollout_server else Local)(args, tokenizer, device)


def noise_of(args: EngineArgs, index: int) -> Tensor:
    """(K, max_new_tokens) uniform numbers that depend on the seed and the row's number alone."""
    return seeded_noise(mix_seed(index - 1, start=args.seed), args.num_generations, args.max_new_tokens)


def requests(row: Row, args: EngineArgs, tokenizer: Tokenizer | None) -> Iterable[Row]:
    """K requests for one prompt; text goes to plain completions, messages to chat completions."""
    if isinstance(row["prompt"], list):
        prompt: Row = {"messages": row["prompt"]}
    elif tokenizer is not None and "prompt_ids" in row:  # with its special tokens, except the BOS that the server adds
        ids = row["prompt_ids"]
        prompt = {"prompt": tokenizer.decode(ids[1:] if adds_bos(tokenizer) else ids)}
    else:
        prompt = {"prompt": row["prompt"]}
    options: Row = {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}
    defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # sent only when they differ
    options |= {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}
    if args.stop_strings:
        options["stop"] = args.stop_strings
    for k in range(args.num_generations):
        yield {**prompt, **options, "seed": (args.seed + row["index"] * args.num_generations + k) % 2**31}
