"""The served model: completions by the generation engine, new weights, adapters by name.

All methods run in one worker thread (see `app.App`), one after another, so weights never change under a request. A
request is one call of `generate`, with the noise that it brings: its choices are bitwise equal to the same call in
another process on the same kind of device with as many threads.

Left out: batching several requests into one call, and several devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.batch import response_batch
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import generate, generate_steps
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.generation.sampling import first_stop
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import lora
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.serving.requests import Completion, Refusal, Served
from lightrlhf.serving.weights import load_weights

MOST_ADAPTERS = 4
UNLIMITED = 2**20  # positions of an architecture that names no limit


class Cancelled(Exception):
    """The client of a request has gone."""


class Choice(NamedTuple):
    """One response, complete or so far."""

    text: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None  # None: not complete


class Answer(NamedTuple):
    """The answer to a request."""

    choices: list[Choice]
    scores: list[list[float]] | None  # log-probability of each token of each prompt after its first, at temperature 1
    version: str  # of the weights


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
    ) -> None:
        policy.eval()  # weights that require gradients, as in training: torch multiplies frozen ones in another order
        self.tokenizer, self.name, self.root, self.num_slots, self.dtype = tokenizer, name, root, num_slots, dtype
        self.policy, self.merged_into = policy, merged_into
        self.adapters: dict[str, Adapter] = {}
        self.num_loaded, self.num_reloads = 0, 0
        self.texts: dict[int, str] = {}  # of tokens
        self.version = "default"  # of the weights, a name that clients give

    def limits(self) -> Served:
        """The model's limits, which requests are checked against."""
        positions = getattr(self.policy.model.config, "max_position_embeddings", None) or UNLIMITED
        return Served(self.tokenizer, vocabulary_size(self.policy), positions, [self.name, *self.adapters])

    # ------------------------------------------------------------------------------------------------------ completions
    def complete(self, request: Completion, cancelled: threading.Event) -> Answer:
        """The answer to a request. Raises: Cancelled."""
        policy = self._policy(request.model)

        def check() -> None:
            if cancelled.is_set():
                raise Cancelled

        check()
        with self._autocast():
            sampled = generate(
                policy,
                request.rows,
                request.sampling,
                self._ends(request),
                request.noise,
                self.num_slots,
                self.tokenizer,
                allowed=request.allowed,
                before_step=check,
            )
        rows = zip(sampled.responses, sampled.logprobs, sampled.truncated)
        choices = [self._choice(request, ids, logprobs, truncated) for ids, logprobs, truncated in rows]
        scores = self._scores(policy, request.prompts) if request.prompt_logprobs else None
        return Answer(choices, scores, self.version)

    def stream(self, request: Completion, cancelled: threading.Event, emit: Callable[[int, Choice, str], None]) -> None:
        """Emit (index, choice so far, version) after each token, choice by choice. Raises: Cancelled."""
        policy, ends = self._policy(request.model), self._ends(request)
        for index, (prompt, noise) in enumerate(zip(request.rows, request.noise[:, None])):
            with self._autocast():
                step = None
                for step in generate_steps(
                    policy, prompt, request.sampling, ends, noise, self.tokenizer, request.allowed
                ):
                    if cancelled.is_set():
                        raise Cancelled
                    emit(index, self._choice(request, step.responses[0], step.logprobs[0], None), self.version)
            if step is not None:
                last = self._choice(request, step.responses[0], step.logprobs[0], step.truncated[0])
                emit(index, last, self.version)

    def _scores(self, policy: Policy, prompts: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of the prompts' tokens after the first, at temperature 1."""
        batch = response_batch([ids[:1] for ids in prompts], [ids[1:] for ids in prompts], 0)
        device = policy.model.device
        with self._autocast():
            logprobs = score_logprobs(policy, batch.to(device), 1.0, self.num_slots).cpu()  # (B, T-1)
        return [row[: len(ids) - 1].tolist() for row, ids in zip(logprobs, prompts)]

    def _policy(self, name: str) -> Policy:
        """The policy of a model's or adapter's name. Raises: Refusal when it was unloaded while the request waited."""
        if name == self.name:
            return self.policy
        if name not in self.adapters:
            raise Refusal(f"unknown model {name!r}; it was unloaded")
        return self.adapters[name].policy

    def _ends(self, request: Completion) -> list[int]:
        return [] if request.ignore_eos else end_ids(self.tokenizer, self.policy.model)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.policy.model.device.type, dtype=self.dtype)

    def _choice(self, request: Completion, ids: list[int], logprobs: list[float], truncated: bool | None) -> Choice:
        """A response with its text; truncated: None while it is not complete.

        Text that further tokens may change is held back until then: an incomplete character, the start of a stop text.
        """
        text, stops = self._text(request, ids), [] if request.include_stop else request.sampling.stop_strings
        if (end := first_stop(self.tokenizer, ids, stops)) is not None:
            known = len(self._text(request, ids[: end - 1]).rstrip("\ufffd"))  # the stop text ends after it
            starts = [at for stop in stops if (at := text.find(stop, max(known - len(stop) + 1, 0))) >= 0]
            text = text[: min(starts, default=None)]
        elif truncated is None:
            text = text.rstrip("\ufffd")
            text = text[: len(text) - begun(text, stops)]
        return Choice(text, ids, logprobs, None if truncated is None else "length" if truncated else "stop")

    def _text(self, request: Completion, ids: list[int]) -> str:
        if request.skip_special_tokens:
            return decode(self.tokenizer, ids)
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def token_text(self, index: int) -> str:
        """The text of one token, remembered; half of a character is U+FFFD."""
        if index not in self.texts:
            self.texts[index] = str(self.tokenizer.decode([index], clean_up_tokenization_spaces=False))
        return self.texts[index]

    # ---------------------------------------------------------------------------------------------------------- weights
    def reload(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder in place. Raises: Refusal, with the old weights as they were."""
        if self.adapters:
            raise Refusal(
                f"adapters are loaded ({', '.join(self.adapters)}), which belong to the old weights; unload them"
            )
        try:
            load_weights(self.policy.model, Path(folder))
        except UsageError as problem:
            raise Refusal(str(problem)) from None
        self.num_reloads += 1
        self.version = f"reloaded-{self.num_reloads}"  # until a client names it: never the name of the old weights
        self.merged_into = None

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a peft folder under a name. Raises: Refusal when that is taken, or the folder does not fit."""
        if name == self.name or name in self.adapters:
            raise Refusal(f"{name} is loaded already; give each version another name")
        if len(self.adapters) >= MOST_ADAPTERS:
            raise Refusal(f"{MOST_ADAPTERS} adapters are loaded; unload one of {', '.join(self.adapters)}")
        if self.merged_into is not None:
            raise Refusal(
                f"{self.root} is an adapter, merged here into {self.merged_into}, and {folder} would come on top; "
                f"serve {self.merged_into} to load adapters"
            )
        if not Path(folder).is_dir():
            raise Refusal(f"{folder} is not a folder that this server can see")
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
            raise Refusal(f"{folder} cannot be loaded: {first_line(problem)}") from None
        finally:  # outside of the roles of adapters the model is as it was
            lora.configure(model, active=self.policy.adapters, trainable=())
        plain, base = self.policy.head_is_plain, self.policy.base
        role = Policy(model, (layer_name,), base, shares=True, trainable=False, head_is_plain=plain).eval()
        self.adapters[name] = Adapter(role, layer_name, folder)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises: Refusal when the name is unknown."""
        if name not in self.adapters:
            raise Refusal(f"no adapter {name!r} is loaded")
        lora.remove_adapter(self.policy.model, self.adapters.pop(name).layer_name)


def begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may become a stop text: the longest beginning of one."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)
