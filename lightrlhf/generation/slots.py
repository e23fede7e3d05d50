"""Slots of the generation engine: rows that are decoded together over one preallocated KV cache.

All slots share a column index of the KV cache: a prompt is right-aligned at the current column, so positions follow
from the mask, and no row needs a separate cache. A step attends to the columns from the first one of any busy row.
Prompts are prefilled in batches, each distinct one once for all its samples and from a cached prefix if there is one;
their keys and values wait until slots become idle. Packed decoding keeps its own kind of cache (`cpu`), and
computes prompts without cached prefixes itself.

Left out: paged caches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf import cpu
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.batch import INFERENCE_TOKENS, to_device
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.generation.prefix_cache import CachedPrefix, load_prefixes, make_cache, store_prefixes
from lightrlhf.generation.sampling import first_stop, sample
from lightrlhf.maths.ops import position_ids
from lightrlhf.models.forward import cache_inputs, position_inputs
from lightrlhf.models.frozen import activation_dtype

SPARE_COLUMNS = 64  # each step of refilled slots advances the shared column; the slab is shifted about this often, by
# a multiple of the layer's `multiple`, which must not be larger than this
MOST_PADDED = 2  # of packed prompts: columns of attention to tokens of a pass that is full
LATE_STEPS = 16  # at most, from one look of the engine to the next: columns to spare where no slot is refilled


class SlabLayer:
    """The KV cache of one layer for all slots, updated in place; has the interface of a transformers cache layer."""

    multiple = 1
    is_compileable = False
    is_sliding = False
    is_croppable = False
    is_initialized = True

    def __init__(self, prefilled: Any, num_slots: int, num_columns: int) -> None:
        self.register()
        self.slabs = [  # keys and values, each (slots, heads, columns, head size)
            states.new_zeros(num_slots, states.shape[1], num_columns, states.shape[3])
            for states in (prefilled.keys, prefilled.values)
        ]
        self.start, self.end = 0, prefilled.get_seq_length()  # the columns that busy rows attend to
        self.is_compileable |= prefilled.keys.device.type != "cpu"  # transformers then makes a mask without reading it

    @staticmethod
    def register() -> None:
        """Be a cache layer for `isinstance`; a base class would import transformers with this module."""
        from transformers.cache_utils import CacheLayerMixin

        CacheLayerMixin.register(SlabLayer)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one column, (slots, heads, 1, head size) each; returns the columns to attend to."""
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

    def insert(self, slots: Tensor, prefilled: Any, source: Tensor) -> None:
        """Copy rows `source` of a prefilled layer into slots, right-aligned at the current column."""
        start = self.end - prefilled.get_seq_length()
        self.start = min(self.start, start)
        for slab, states in zip(self.slabs, (prefilled.keys, prefilled.values)):
            slab[slots, :, start : self.end] = states[source]

    def compact(self, holes: Tensor, movers: Tensor, num_slots: int) -> None:
        """Move rows into the holes among the first `num_slots` slots and drop the other slots."""
        for i, slab in enumerate(self.slabs):
            slab[holes, :, self.start : self.end] = slab[movers, :, self.start : self.end]
            self.slabs[i] = slab[:num_slots]

    def drop_columns(self, count: int) -> None:
        """Drop the first columns, which no row attends to any more."""
        for slab in self.slabs:
            slab[:, :, : self.end - count] = slab[:, :, count : self.end].clone()
        self.start, self.end = self.start - count, self.end - count


class Prefilled(NamedTuple):
    """Prefilled prompts whose rows wait for idle slots."""

    layers: Sequence[Any]
    mask: Tensor  # (P, width), prompts right-aligned
    logits: Tensor  # (P, V) of the first token of the response
    seen: Tensor | None  # (P, V), tokens that occur in the prompt, for the repetition penalty
    waiting: deque[tuple[int, int]]  # (row, index of its prompt among the P)


class Slots:
    """Decoding state of the busy rows. It stays on the device, so a step does not synchronise.

    Its tensors change in place, and fewer slots are the first part of them: each starts at the same address.
    """

    layer_type: type[SlabLayer] = SlabLayer

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        args: SamplingArgs,
        eos_ids: Sequence[int],
        uniforms: Tensor,
        num_slots: int,
        prefixes: list[CachedPrefix | None] | None = None,
        allowed: Sequence[int] | None = None,
        pack: Callable[[PreTrainedModel, int, torch.dtype], Any] = cpu.pack_decoder,
    ) -> None:
        self.model, self.args, self.device, self.prefixes = model, args, model.device, prefixes
        num_rows, num_slots = len(prompts), min(num_slots, len(prompts))
        self.idle_row = num_rows  # an idle slot writes to this extra row
        self.eos_ids = to_device(torch.tensor([*eos_ids, *args.eos_ids], dtype=torch.int64), self.device)
        self.uniforms = to_device(torch.cat([uniforms, uniforms[:1]]), self.device)  # (N+1, max_new_tokens)
        self.tokens = torch.zeros(num_rows + 1, args.max_new_tokens, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(num_rows + 1, args.max_new_tokens, device=self.device)
        self.removed = torch.zeros_like(self.logprobs)
        self.allowed = None if allowed is None else to_device(torch.tensor(allowed, dtype=torch.int64), self.device)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)
        groups: dict[tuple[int, ...], list[int]] = {}  # rows of each distinct prompt
        for row, prompt in enumerate(prompts):
            groups.setdefault(tuple(prompt), []).append(row)
        self.groups = deque(
            sorted(groups.items(), key=lambda group: -len(group[0]))
        )  # longest first, so later prompts fit
        self.longest = len(self.groups[0][0])
        takes_copies, own = self.layer_type is SlabLayer, activation_dtype(model)
        self.decoder = pack(model, args.max_new_tokens, own) if takes_copies else None
        self.prefilled = self._prefill(num_slots)
        kind = self.layer_type if self.decoder is None else cpu.RaggedLayer
        spare = SPARE_COLUMNS if num_slots < num_rows else min(SPARE_COLUMNS, LATE_STEPS)
        num_columns = self.columns_for(self.longest + args.max_new_tokens + spare)
        self.num_columns = -(-num_columns // kind.multiple) * kind.multiple
        self.layers: Sequence[Any] = [kind(layer, num_slots, self.num_columns) for layer in self.prefilled.layers]
        self.attention: cpu.Attention | None = None  # of the decoder, until slots change
        self.cache = make_cache(model, self.layers)
        self.mask = torch.zeros(num_slots, self.num_columns, dtype=torch.bool, device=self.device)
        self.row = torch.full((num_slots,), self.idle_row, device=self.device)  # (S,) the row that each slot decodes
        self.position = torch.zeros_like(self.row)  # (S,) position of the next token
        self.first = torch.zeros_like(self.row)  # (S,) column of the prompt's first token
        self.next = torch.zeros_like(self.row)  # (S,) input of the next step
        self.seen = (
            None
            if self.prefilled.seen is None
            else self.prefilled.seen.new_zeros(num_slots, self.prefilled.seen.shape[1])
        )

    @staticmethod
    def columns_for(count: int) -> int:
        """Columns to allocate for this many."""
        return count

    @staticmethod
    def slots_for(busy: int) -> int:
        """Slots to keep for this many busy ones."""
        return busy

    def waiting(self) -> bool:
        """Whether rows wait for a slot."""
        return bool(self.prefilled.waiting or self.groups)

    def admit(self, slots: Tensor) -> None:
        """Fill idle slots with waiting rows until either runs out."""
        while len(slots) and self.waiting():
            if not self.prefilled.waiting:
                self.prefilled = self._prefill(len(self.row))
            count = min(len(slots), len(self.prefilled.waiting))
            waiting = torch.tensor([self.prefilled.waiting.popleft() for _ in range(count)])  # (count, 2)
            rows, source = to_device(waiting, self.device).T
            self._insert(slots[:count], rows, source)
            slots = slots[count:]

    def step(self) -> None:
        """Decode one token in every slot."""
        layer = self.layers[0]
        if layer.end == self.num_columns:
            count = min(layer.start, layer.end - self.longest)
            self._drop_columns(count - count % layer.multiple)
        self.mask[:, layer.end] = True
        self._decode(self.mask[:, layer.start : layer.end + 1])

    def _decode(self, window: Tensor) -> None:
        """Compute and sample the next token of every slot, which attends to the columns of `window` (S, C)."""
        if self.decoder is not None:
            if self.attention is None or not self.attention.holds(self.layers[0]):
                self.attention = cpu.Attention(self.mask, self.layers[0], self.decoder.heads)
            logits = self.decoder(self.next, self.position, self.attention, self.layers)
        else:
            logits = self.model(
                input_ids=self.next[:, None],
                attention_mask=window.long(),
                **position_inputs(self.model, self.position[:, None]),
                **cache_inputs(self.model, self.cache),
            ).logits[:, -1]
        self.position[:] = torch.where(self.row == self.idle_row, 0, self.position + 1)  # 0 keeps idle slots in range
        self._sample(slice(None), logits)

    def stop_at_strings(self, tokenizer: Tokenizer | None) -> None:
        """Idle the slots whose text contains a stop string; `completions_of` cuts the text after it."""
        strings = self.args.stop_strings
        window = 4 * max(map(len, strings)) + 8  # tokens that may spell one: a token has at least one byte of text
        for slot, (row, length) in enumerate(zip(self.row.tolist(), self.lengths[self.row].tolist())):
            latest = self.tokens[row, max(length - window, 0) : length].tolist()
            if row != self.idle_row and first_stop(tokenizer, latest, strings):
                self.row[slot] = self.idle_row

    def set_window(self, idle: Tensor) -> None:
        """Restrict attention to the columns that busy rows occupy."""
        start = int(self.first[~idle].min())
        for layer in self.layers:
            layer.start = start

    def compact(self, idle: Tensor) -> None:
        """Remove idle slots, moving busy rows into their places."""
        count = self.slots_for(len(idle) - int(idle.sum()))
        if count >= len(idle):
            return
        movers = (~idle[count:]).nonzero()[:, 0] + count
        holes = idle[:count].nonzero()[: len(movers), 0]
        self.attention = None
        for layer in self.layers:
            layer.compact(holes, movers, count)
        for name in ("row", "next", "position", "first", "mask", "seen"):
            state = getattr(self, name)
            if state is not None:
                state[holes] = state[movers]
                setattr(self, name, state[:count])

    def _prefill(self, num_rows: int) -> Prefilled:
        """Prefill the next distinct prompts: enough for `num_rows` rows, but at most what one pass takes."""
        prompts: list[tuple[int, ...]] = []
        rows_of: list[list[int]] = []
        decoder = self.decoder if self.prefixes is None else None
        longest, num_tokens = len(self.groups[0][0]), 0
        most = math.inf  # with cached prefixes the uncached parts are short
        if self.prefixes is None:
            most = INFERENCE_TOKENS.get(self.device.type, math.inf)
        while self.groups and sum(map(len, rows_of)) < num_rows:
            columns: float = (len(prompts) + 1) * longest  # with padding
            num_tokens += len(self.groups[0][0])
            if decoder is not None:
                columns = max(num_tokens, columns / MOST_PADDED)
            if prompts and columns > most:
                break
            prompt, rows = self.groups.popleft()
            prompts.append(prompt)
            rows_of.append(rows)
        layers: Sequence[Any]
        if decoder is not None:
            layers, mask, logits = decoder.prefill(prompts)
        else:
            layers, mask, logits = self._prefill_by_model(prompts, rows_of)
            layers = layers if self.decoder is None else self.decoder.states_of(layers)
        seen = None
        if self.args.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for i, prompt in enumerate(prompts):
                seen[i, list(prompt)] = True
        waiting = deque((row, i) for i, rows in enumerate(rows_of) for row in rows)
        return Prefilled(layers, mask, logits, seen, waiting)

    def _prefill_by_model(
        self, prompts: list[tuple[int, ...]], rows_of: list[list[int]]
    ) -> tuple[Sequence[Any], Tensor, Tensor]:
        """Layers of a cache with these prompts, their mask (P, W), and the logits (P, V) after each."""
        cached = load_prefixes(
            self.model, prompts, [self.prefixes[rows[0]] if self.prefixes else None for rows in rows_of]
        )
        width = max(map(len, cached.rest))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # (P, width), left-padded
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for i, rest in enumerate(cached.rest):
            ids[i, width - len(rest) :] = torch.tensor(rest)
            mask[i, width - len(rest) :] = True
        mask = to_device(torch.cat([cached.mask, mask], 1), self.device)
        logits = self.model(
            input_ids=to_device(ids, self.device),
            attention_mask=mask.long(),
            **position_inputs(self.model, position_ids(mask)[:, -width:]),
            **cache_inputs(self.model, cached.cache),
            logits_to_keep=1,
        ).logits[:, -1]
        if self.prefixes is not None:
            for rows, prefix in zip(rows_of, store_prefixes(cached, prompts, padded_left=True)):
                for row in rows:
                    self.prefixes[row] = prefix
        return cached.cache.layers, mask, logits

    def _insert(self, slots: Tensor, rows: Tensor, source: Tensor) -> None:
        """Put rows into slots with the keys and values of their prompts, and sample their first tokens."""
        self.attention = None
        for layer, prefilled in zip(self.layers, self.prefilled.layers):
            layer.insert(slots, prefilled, source)
        mask, end = self.prefilled.mask[source], self.layers[0].end
        self.mask[slots] = False
        self.mask[slots, end - mask.shape[1] : end] = mask
        self.row[slots] = rows
        self.position[slots] = mask.sum(1)
        self.first[slots] = end - mask.sum(1)
        if self.seen is not None and self.prefilled.seen is not None:
            self.seen[slots] = self.prefilled.seen[source]
        self._sample(slots, self.prefilled.logits[source])

    def _sample(self, slots: Tensor | slice, logits: Tensor) -> None:
        """Sample the next token of these slots; a slot becomes idle when its row ends or reaches `max_new_tokens`."""
        row = self.row[slots]
        place = self.lengths[row].clamp(max=self.args.max_new_tokens - 1)
        seen = None if self.seen is None else self.seen[slots]
        if self.allowed is not None:  # all others get probability 0
            logits = torch.full_like(logits, -torch.inf).index_copy(-1, self.allowed, logits[:, self.allowed])
        token, logprob, removed = sample(logits, self.uniforms[row, place], self.args, seen)
        self.tokens[row, place] = token
        self.logprobs[row, place] = logprob
        self.removed[row, place] = removed
        self.lengths[row] = place + 1
        self.next[slots] = token
        if self.seen is not None and seen is not None:
            self.seen[slots] = seen.scatter(1, token[:, None], True)
        ended = (token[:, None] == self.eos_ids).any(1) | (place + 1 == self.args.max_new_tokens)
        self.row[slots] = torch.where(ended, self.idle_row, row)

    def _drop_columns(self, count: int) -> None:
        """Drop the first columns, to make room after the last one."""
        self.attention = None
        for layer in self.layers:
            layer.drop_columns(count)
        self.first -= count
        kept = self.mask[:, count:].clone()
        self.mask[:, : kept.shape[1]] = kept
        self.mask[:, kept.shape[1] :] = False
