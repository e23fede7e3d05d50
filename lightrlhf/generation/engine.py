"""The generation engine, and rollouts with log-probabilities.

Rows live in a fixed number of slots over one preallocated key-value slab. All slots share a column index: a prompt is
right-aligned at the current column, so positions come from the mask and no row needs a cache of its own; a step looks
at the columns from the oldest busy row's first on. Prompts are prefilled apart, each distinct one once whatever the
number of its samples, from where an earlier reading stopped if there is one, and wait with their keys and values until
slots become idle. When nobody waits, the slots that are left close up. Sampling is by inverse CDF with one uniform
number per row and token, given from outside: what a row says does not depend on batch size, slot or rank.

Left out: beam search, speculative decoding, paged caches, servers, architectures without a key-value cache, and on
CUDA captured graphs or a compiled step (steps run eagerly there; none of them waits for the device).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import SamplingArgs
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import inference_batch_size
from lightrlhf.generation.prefix_cache import CachedPrefix, load_prefixes, make_cache, store_prefixes
from lightrlhf.generation.sampling import first_stop, sample
from lightrlhf.maths.ops import position_ids
from lightrlhf.models.roles import Policy, inference, position_inputs

SPARE_COLUMNS = 64  # refilled slots move the shared column on; about this many steps between two moves of the slab
STEPS_BETWEEN_LOOKS = {"cpu": 1}  # elsewhere 8: reading which rows have ended waits; fewer than SPARE_COLUMNS


class Completions(NamedTuple):
    """What was sampled, in the order of the prompts."""

    responses: list[list[int]]  # ids as they were sampled, with the end token or the last token of a stop string
    logprobs: list[list[float]]  # log-probability of each of them at the temperature, over the whole vocabulary
    truncated: list[bool]  # stopped by length
    removed_mass: float  # mean probability that top-k, top-p and min-p took out of the sampling distribution


class SlabLayer:
    """Keys and values of all slots of one layer, written in place; what a transformers cache asks of a layer."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    is_initialized = True

    def __init__(self, prefilled: Any, num_slots: int, num_columns: int) -> None:
        from transformers.cache_utils import CacheLayerMixin

        CacheLayerMixin.register(SlabLayer)  # a cache asks isinstance; a base class would import transformers at start
        self.slabs = [  # keys and values, each (slots, heads, columns, head size)
            states.new_zeros(num_slots, states.shape[1], num_columns, states.shape[3])
            for states in (prefilled.keys, prefilled.values)
        ]
        self.start, self.end = 0, prefilled.get_seq_length()  # the columns that busy rows look at

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One more column, (slots, heads, 1, head size) each; returns all that is looked at."""
        for slab, states in zip(self.slabs, (keys, values)):
            slab[:, :, self.end] = states[:, :, 0]
        self.end += 1
        return self.slabs[0][:, :, self.start : self.end], self.slabs[1][:, :, self.start : self.end]

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def put(self, slots: Tensor, prefilled: Any, source: Tensor) -> None:
        """Copy rows `source` of a prefilled layer into slots, right-aligned at the current column."""
        start = self.end - prefilled.get_seq_length()
        self.start = min(self.start, start)
        for slab, states in zip(self.slabs, (prefilled.keys, prefilled.values)):
            slab[slots, :, start : self.end] = states[source]

    def compact(self, holes: Tensor, movers: Tensor, num_slots: int) -> None:
        """Move rows into holes among the first slots and forget the other slots."""
        for i, slab in enumerate(self.slabs):
            slab[holes, :, self.start : self.end] = slab[movers, :, self.start : self.end]
            self.slabs[i] = slab[:num_slots]

    def drop_columns(self, count: int) -> None:
        """Forget the first columns, which no row looks at any more."""
        for slab in self.slabs:
            slab[:, :, : self.end - count] = slab[:, :, count : self.end].clone()
        self.start, self.end = self.start - count, self.end - count


class Prefilled(NamedTuple):
    """Prompts that have been read and wait for idle slots."""

    layers: list[Any]
    mask: Tensor  # (P, width), prompts on the right
    logits: Tensor  # (P, V) of the first token of the response
    seen: Tensor | None  # (P, V), which tokens stand in the prompt
    waiting: deque[tuple[int, int]]  # (row, which of the P prompts is its own)


class Slots:
    """The rows being decoded: one slab, one mask, one next token each. Slot state is on the device, no step waits."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        args: SamplingArgs,
        eos_ids: Sequence[int],
        uniforms: Tensor,
        num_slots: int,
        reads: list[CachedPrefix | None] | None = None,
    ) -> None:
        self.model, self.args, self.device, self.reads = model, args, model.device, reads
        num_rows, num_slots = len(prompts), min(num_slots, len(prompts))
        self.idle_row = num_rows  # the row an idle slot writes to
        self.eos_ids = torch.tensor([*eos_ids, *args.eos_ids], dtype=torch.int64, device=self.device)
        self.uniforms = torch.cat([uniforms, uniforms[:1]]).to(self.device)  # (N+1, max_new_tokens)
        self.tokens = torch.zeros(num_rows + 1, args.max_new_tokens, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(num_rows + 1, args.max_new_tokens, device=self.device)
        self.removed = torch.zeros_like(self.logprobs)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)
        groups: dict[tuple[int, ...], list[int]] = {}  # the rows of each distinct prompt
        for row, prompt in enumerate(prompts):
            groups.setdefault(tuple(prompt), []).append(row)
        self.groups = deque(sorted(groups.items(), key=lambda group: -len(group[0])))  # a later prompt always fits
        self.longest = len(self.groups[0][0])
        self.num_columns = self.longest + args.max_new_tokens + SPARE_COLUMNS

        self.ready = self._prefill(num_slots)
        self.cache = make_cache(model, [SlabLayer(layer, num_slots, self.num_columns) for layer in self.ready.layers])
        self.mask = torch.zeros(num_slots, self.num_columns, dtype=torch.bool, device=self.device)
        self.row = torch.full((num_slots,), self.idle_row, device=self.device)  # (S,) which prompt each slot answers
        self.position = torch.zeros_like(self.row)  # (S,) position of the next token
        self.first = torch.zeros_like(self.row)  # (S,) column of the prompt's first token
        self.next = torch.zeros_like(self.row)
        self.seen = None if self.ready.seen is None else self.ready.seen.new_zeros(num_slots, self.ready.seen.shape[1])

    def waiting(self) -> bool:
        return bool(self.ready.waiting or self.groups)

    def admit(self, slots: Tensor) -> None:
        """Rows that wait enter idle slots, as many as there are of both."""
        while len(slots) and self.waiting():
            if not self.ready.waiting:
                self.ready = self._prefill(len(self.row))
            count = min(len(slots), len(self.ready.waiting))
            rows, source = torch.tensor([self.ready.waiting.popleft() for _ in range(count)], device=self.device).T
            self._put(slots[:count], rows, source)
            slots = slots[count:]

    def step(self) -> None:
        """One token for every slot."""
        layer = self.cache.layers[0]
        if layer.end == self.num_columns:
            self._drop_columns(min(layer.start, layer.end - self.longest))
        self.mask[:, layer.end] = True
        logits = self.model(
            input_ids=self.next[:, None],
            attention_mask=self.mask[:, layer.start : layer.end + 1].long(),
            **position_inputs(self.model, self.position[:, None]),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.position = torch.where(self.row == self.idle_row, 0, self.position + 1)  # idle slots stay in range
        self._sample(slice(None), logits)

    def stop_at_strings(self, tokenizer: Any) -> None:
        """Make idle the slots whose text holds a stop string; what a row says beyond it is cut in the end."""
        strings = self.args.stop_strings
        window = 4 * max(map(len, strings)) + 8  # tokens that can spell one: a token is a byte of text or more
        for slot, (row, length) in enumerate(zip(self.row.tolist(), self.lengths[self.row].tolist())):
            latest = self.tokens[row, max(length - window, 0) : length].tolist()
            if row != self.idle_row and first_stop(tokenizer, latest, strings):
                self.row[slot] = self.idle_row

    def set_window(self, idle: Tensor) -> None:
        """Let a step look only at the columns that busy rows occupy."""
        start = int(self.first[~idle].min())
        for layer in self.cache.layers:
            layer.start = start

    def compact(self, idle: Tensor) -> None:
        """Give up idle slots for good."""
        count = len(idle) - int(idle.sum())
        holes, movers = idle[:count].nonzero()[:, 0], (~idle[count:]).nonzero()[:, 0] + count
        for layer in self.cache.layers:
            layer.compact(holes, movers, count)
        for name in ("row", "next", "position", "first", "mask", "seen"):
            state = getattr(self, name)
            if state is not None:
                state[holes] = state[movers]
                setattr(self, name, state[:count])

    def _prefill(self, num_rows: int) -> Prefilled:
        """Read the next prompts, all samples of one together: one for each of `num_rows`, or fewer on a processor."""
        prompts: list[tuple[int, ...]] = []
        rows_of: list[list[int]] = []
        most = num_rows  # where part of the prompts has been read, what is left is short
        if not self.reads:
            most = inference_batch_size(len(self.groups[0][0]), num_rows, self.device)
        while self.groups and len(prompts) < most and sum(map(len, rows_of)) < num_rows:
            prompt, rows = self.groups.popleft()
            prompts.append(prompt)
            rows_of.append(rows)
        past = load_prefixes(self.model, prompts, [self.reads[rows[0]] if self.reads else None for rows in rows_of])
        width = max(map(len, past.rest))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # (P, width), prompts on the right
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for i, rest in enumerate(past.rest):
            ids[i, width - len(rest) :] = torch.tensor(rest)
            mask[i, width - len(rest) :] = True
        mask = torch.cat([past.mask, mask.to(self.device)], 1)
        logits = self.model(
            input_ids=ids.to(self.device),
            attention_mask=mask.long(),
            **position_inputs(self.model, position_ids(mask)[:, -width:]),
            past_key_values=past.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if self.reads is not None:
            for rows, read in zip(rows_of, store_prefixes(past, prompts, padded_left=True)):
                for row in rows:
                    self.reads[row] = read
        seen = None
        if self.args.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for i, prompt in enumerate(prompts):
                seen[i, list(prompt)] = True
        waiting = deque((row, i) for i, rows in enumerate(rows_of) for row in rows)
        return Prefilled(past.cache.layers, mask, logits, seen, waiting)

    def _put(self, slots: Tensor, rows: Tensor, source: Tensor) -> None:
        """Rows enter slots with the keys and values of their prompts."""
        for layer, prefilled in zip(self.cache.layers, self.ready.layers):
            layer.put(slots, prefilled, source)
        mask, end = self.ready.mask[source], self.cache.layers[0].end
        self.mask[slots] = False
        self.mask[slots, end - mask.shape[1] : end] = mask
        self.row[slots] = rows
        self.position[slots] = mask.sum(1)
        self.first[slots] = end - mask.sum(1)
        if self.seen is not None:
            self.seen[slots] = self.ready.seen[source]
        self._sample(slots, self.ready.logits[source])

    def _sample(self, slots: Tensor | slice, logits: Tensor) -> None:
        """The next token of these slots; a slot whose row has ended or has no room left becomes idle."""
        row = self.row[slots]
        place = self.lengths[row].clamp(max=self.args.max_new_tokens - 1)
        seen = None if self.seen is None else self.seen[slots]
        token, logprob, removed = sample(logits, self.uniforms[row, place], self.args, seen)
        self.tokens[row, place] = token
        self.logprobs[row, place] = logprob
        self.removed[row, place] = removed
        self.lengths[row] = place + 1
        self.next[slots] = token
        if seen is not None:
            self.seen[slots] = seen.scatter(1, token[:, None], True)
        ended = torch.isin(token, self.eos_ids) | (place + 1 == self.args.max_new_tokens)
        self.row[slots] = torch.where(ended, self.idle_row, row)

    def _drop_columns(self, count: int) -> None:
        """Make room behind the last column."""
        for layer in self.cache.layers:
            layer.drop_columns(count)
        self.first -= count
        self.mask = torch.cat([self.mask[:, count:], torch.zeros_like(self.mask[:, :count])], 1)


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    args: SamplingArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    num_slots: int = 64,
    tokenizer: Any = None,
    reads: list[CachedPrefix | None] | None = None,
) -> Completions:
    """Sample one response for each prompt; a prompt that is given K times is read once.

    prompts: N id lists; uniforms: (N, max_new_tokens) in [0, 1), the only source of randomness; tokenizer: needed for
    stop strings only; reads: what was read last in the place of each prompt and is not read again, replaced by what is
    read now. A row ends at the first token with which its decoded text contains a stop string.
    Raises: UsageError when a prompt with its response does not fit into the model's positions.
    """
    if args.stop_strings and tokenizer is None:
        raise ValueError("stop_strings needs a tokenizer")
    model = policy.model
    check_room(model, prompts, args)
    with inference(policy), policy.active(), no_gradients(model):
        slots = decode_all(Slots(model, prompts, args, eos_ids, uniforms, num_slots, reads), tokenizer)
    return completions_of(slots, eos_ids, tokenizer)


def generate_steps(
    policy: Policy,
    prompt: Sequence[int],
    args: SamplingArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    tokenizer: Any = None,
) -> Iterator[Completions]:
    """`generate` for one prompt, told after each token; what comes last is what `generate` returns.

    The policy must be in evaluation mode. Nothing of it stays switched between two steps, so several of these may take
    turns with one model, and in whatever thread the caller goes on.
    """
    check_room(policy.model, [prompt], args)
    slots: Slots | None = None
    while slots is None or slots.row[0] != slots.idle_row:
        with policy.active(), no_gradients(policy.model):
            if slots is None:
                slots = Slots(policy.model, [prompt], args, eos_ids, uniforms, num_slots=1)
                slots.admit(torch.arange(1, device=slots.device))
            else:
                slots.step()
            if args.stop_strings:
                slots.stop_at_strings(tokenizer)
        yield completions_of(slots, eos_ids, tokenizer)


def completions_of(slots: Slots, eos_ids: Sequence[int], tokenizer: Any) -> Completions:
    """What the rows have said so far, without what follows a stop string."""
    args, ends = slots.args, {*eos_ids, *slots.args.eos_ids}
    responses, logprobs, truncated = [], [], []
    for tokens, values, length in zip(slots.tokens[:-1].tolist(), slots.logprobs.tolist(), slots.lengths.tolist()):
        end = first_stop(tokenizer, tokens[:length], args.stop_strings)
        responses.append(tokens[: end or length])
        logprobs.append(values[: end or length])
        truncated.append(end is None and tokens[length - 1] not in ends)
    removed = sum(float(row[: len(response)].sum()) for row, response in zip(slots.removed.cpu(), responses))
    return Completions(responses, logprobs, truncated, removed / sum(map(len, responses)))


def decode_all(slots: Slots, tokenizer: Any) -> Slots:
    """Step until every row has ended, with waiting rows for idle slots."""
    slots.admit(torch.arange(len(slots.row), device=slots.device))
    check_every = STEPS_BETWEEN_LOOKS.get(slots.device.type, 8)
    for step in count(1):
        if step % check_every == 0:
            if slots.args.stop_strings:
                slots.stop_at_strings(tokenizer)
            idle = slots.row == slots.idle_row
            while slots.waiting() and int(idle.sum()) * 16 >= len(idle):
                slots.admit(idle.nonzero()[:, 0])
                idle = slots.row == slots.idle_row  # a row may end with its first token
            if idle.all():
                return slots
            slots.set_window(idle)
            if not slots.waiting() and int(idle.sum()) * 8 >= len(idle):
                slots.compact(idle)
        slots.step()


@contextmanager
def no_gradients(model: nn.Module) -> Iterator[None]:
    """Inference mode; under autocast no_grad, where each weight is cast once and not at every step.

    Autocast keeps its casts outside of inference mode only, and only those of weights that require a gradient.
    """
    if not torch.is_autocast_enabled(model.device.type):
        with torch.inference_mode():
            yield
        return
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.no_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def check_room(model: nn.Module, prompts: Sequence[Sequence[int]], args: SamplingArgs) -> None:
    """Raises: UsageError when a prompt with its response does not fit into the model's positions, or an end token
    is none of its tokens."""
    size = model.get_input_embeddings().weight.shape[0]
    for index in args.eos_ids:
        if index >= size:
            raise UsageError(f"--eos_ids {index} is none of the model's {size} tokens; give ids below {size}")
    room = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if room and longest + args.max_new_tokens > room:
        raise UsageError(
            f"--max_new_tokens {args.max_new_tokens} behind a prompt of {longest} tokens does not fit into the "
            f"model's {room} positions; use at most {max(room - longest, 0)}"
        )
