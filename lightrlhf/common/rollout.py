"""The generation engine, and rollouts with log-probabilities.

Rows live in a fixed number of slots over one preallocated key-value slab. All slots share a column index: a prompt is
right-aligned at the current column, so positions come from the mask and no row needs a cache of its own. A finished
row leaves its slot to a waiting prompt, prefilled apart and copied in; when nobody waits, the slots that are left
close up. Sampling is by inverse CDF with one uniform number per row and token, given from outside: what a row says
does not depend on batch size, slot or rank.

Left out: beam search, speculative decoding, paged caches, servers, and architectures without a key-value cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.common.args import GenerationArgs, UsageError
from lightrlhf.common.batch import Batch, Rollout, Row, response_batch
from lightrlhf.common.model import Policy, policy_inputs
from lightrlhf.common.ops import position_ids
from lightrlhf.common.ranks import whole

SPARE_COLUMNS = 64  # refilled slots move the shared column on; this many steps between two moves of the slab


class Completions(NamedTuple):
    """What was sampled, in the order of the prompts."""

    responses: list[list[int]]  # ids, end token included where one was sampled
    truncated: list[bool]  # stopped by length
    removed_mass: float  # mean probability that top-k and top-p took out of the sampling distribution


class SlabLayer:
    """Keys and values of all slots of one layer, written in place; what a transformers cache asks of a layer."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self.length = 0
        self.is_initialized = False
        self.keys: Tensor | None = None  # (slots, heads, length, head size), a view of the slab
        self.values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            rows, heads, _, size = key_states.shape
            self._keys = key_states.new_zeros(rows, heads, self.num_columns, size)
            self._values = value_states.new_zeros(*value_states.shape[:2], self.num_columns, value_states.shape[3])
            self.is_initialized = True
        end = self.length + key_states.shape[2]
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self._show(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def keep_rows(self, rows: Tensor) -> None:
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._show(self.length)

    def drop_columns(self, count: int) -> None:
        """Forget the first columns, which no row looks at any more."""
        kept = slice(count, self.length)
        for slab in (self._keys, self._values):
            slab[:, :, : self.length - count] = slab[:, :, kept].clone()
        self._show(self.length - count)

    def put_rows(self, rows: Tensor, other: SlabLayer) -> None:
        """Copy freshly prefilled rows in, right-aligned at the current column."""
        start = self.length - other.length
        self._keys[rows, :, start : self.length] = other.keys
        self._values[rows, :, start : self.length] = other.values

    def _show(self, length: int) -> None:
        self.length = length
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]


def slab_cache(model: nn.Module, num_columns: int) -> Any:
    """A transformers cache on slabs. Sliding-window layers keep all columns; their mask still hides the old ones.

    Raises: UsageError for architectures with other layers than attention.
    """
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    CacheLayerMixin.register(SlabLayer)  # a cache asks isinstance; a base class would import transformers at start
    cache = DynamicCache(config=model.config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise UsageError(f"the generation engine knows attention layers only, not those of {model.config.model_type}")
    cache.layers = [SlabLayer(num_columns) for _ in range(model.config.num_hidden_layers)]
    return cache


class Slots:
    """The rows being decoded: one slab, one mask, one next token each. Slot state is on the device, no step waits."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], args: GenerationArgs, uniforms: Tensor
    ) -> None:
        self.model, self.prompts, self.args = model, prompts, args
        self.device = model.device
        self.num_columns = max(map(len, prompts)) + args.max_new_tokens + SPARE_COLUMNS
        num_rows = len(prompts)
        self.nobody = num_rows  # the row an idle slot writes to
        self.uniforms = torch.cat([uniforms, uniforms[:1]]).to(self.device)  # (N+1, max_new_tokens)
        self.tokens = torch.zeros(num_rows + 1, args.max_new_tokens, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)
        self.removed = torch.zeros((), device=self.device)

    def fill(self, rows: Sequence[int]) -> None:
        """Prefill the first rows into all slots."""
        self.cache, self.mask, logits = self._prefill(rows)
        self.row = torch.tensor(rows, device=self.device)  # (S,) which prompt each slot answers
        self.position = self.mask.sum(1)  # (S,) position of the next token
        self.next = torch.zeros_like(self.row)
        self._sample(torch.arange(len(rows), device=self.device), logits)

    def refill(self, slots: Tensor, rows: Sequence[int]) -> None:
        """Prefill rows apart and copy them into idle slots."""
        cache, mask, logits = self._prefill(rows)
        for layer, new in zip(self.cache.layers, cache.layers):
            layer.put_rows(slots, new)
        length, width = self.cache.get_seq_length(), mask.shape[1]
        self.mask[slots] = False
        self.mask[slots, length - width : length] = mask[:, :width]
        self.row[slots] = torch.tensor(rows, device=self.device)
        self.position[slots] = mask.sum(1)
        self._sample(slots, logits)

    def step(self) -> None:
        """One token for every slot."""
        if self.cache.get_seq_length() >= self.num_columns:
            self._drop_columns()
        column = self.cache.get_seq_length()
        self.mask[:, column] = True
        inputs = {"input_ids": self.next[:, None], "position_ids": self.position[:, None]}
        if self.model.config.model_type == "bloom":
            del inputs["position_ids"]
        logits = self.model(
            **inputs, attention_mask=self.mask[:, : column + 1].long(), past_key_values=self.cache, use_cache=True
        ).logits[:, -1]
        self.position += 1
        self._sample(torch.arange(len(self.row), device=self.device), logits)

    def release(self, eos_ids: Tensor) -> None:
        """Make idle the slots whose row has ended or has no room left."""
        length = self.lengths[self.row]
        ended = torch.isin(self.next, eos_ids) | (length >= self.args.max_new_tokens)
        self.row = torch.where(ended, self.nobody, self.row)

    def close_up(self, idle: Tensor) -> None:
        """Give up idle slots for good."""
        busy = (~idle).nonzero()[:, 0]
        for layer in self.cache.layers:
            layer.keep_rows(busy)
        for name in ("row", "next", "position", "mask"):
            setattr(self, name, getattr(self, name)[busy])

    def _prefill(self, rows: Sequence[int]) -> tuple[Any, Tensor, Tensor]:
        width = max(len(self.prompts[row]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)  # (S, width), prompts on the right
        mask = torch.zeros(len(rows), self.num_columns, dtype=torch.bool)
        for i, row in enumerate(rows):
            prompt = self.prompts[row]
            ids[i, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[i, width - len(prompt) : width] = True
        ids, mask = ids.to(self.device), mask.to(self.device)
        cache = slab_cache(self.model, self.num_columns if not hasattr(self, "cache") else width)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask[:, :width].long(),
            "position_ids": position_ids(mask[:, :width]),
        }
        if self.model.config.model_type == "bloom":
            del inputs["position_ids"]
        logits = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return cache, mask if not hasattr(self, "cache") else mask[:, :width], logits

    def _sample(self, slots: Tensor, logits: Tensor) -> None:
        row = self.row[slots]
        place = self.lengths[row].clamp(max=self.args.max_new_tokens - 1)
        token, removed = sample(logits, self.uniforms[row, place], self.args)
        self.tokens[row, place] = token
        self.lengths[row] += 1
        self.removed += (removed * (row != self.nobody)).sum()
        self.next[slots] = token

    def _drop_columns(self) -> None:
        """Make room: at the last column every row still busy began behind the first SPARE_COLUMNS."""
        for layer in self.cache.layers:
            layer.drop_columns(SPARE_COLUMNS)
        self.mask = torch.cat([self.mask[:, SPARE_COLUMNS:], torch.zeros_like(self.mask[:, :SPARE_COLUMNS])], 1)


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    args: GenerationArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    num_slots: int = 64,
) -> Completions:
    """Sample one response for each prompt.

    prompts: N id lists; uniforms: (N, max_new_tokens) in [0, 1), the only source of randomness.
    Raises: UsageError when a prompt with its response does not fit into the model's positions.
    """
    model = policy.model
    check_room(model, prompts, args)
    was_training = policy.training
    policy.eval()
    ends = torch.tensor(list(eos_ids), device=model.device)
    waiting = deque(sorted(range(len(prompts)), key=lambda row: -len(prompts[row])))  # a later prompt always fits
    slots = Slots(model, prompts, args, uniforms)
    slots.fill([waiting.popleft() for _ in range(min(num_slots, len(waiting)))])
    check_every = 1 if model.device.type == "cpu" else 8  # reading a device tensor waits for the device
    steps = 0
    while True:
        slots.release(ends)
        steps += 1
        if steps % check_every == 0:
            idle = slots.row == slots.nobody
            num_idle = int(idle.sum())
            if waiting and num_idle * 8 >= len(idle):
                free = idle.nonzero()[:, 0][: len(waiting)]
                slots.refill(free, [waiting.popleft() for _ in range(len(free))])
                continue
            if not waiting and num_idle == len(idle):
                break
            if not waiting and num_idle * 4 >= len(idle):
                slots.close_up(idle)
        slots.step()
    policy.train(was_training)
    lengths, tokens = slots.lengths[:-1].tolist(), slots.tokens.tolist()
    responses = [row[:length] for row, length in zip(tokens, lengths)]
    stops = set(eos_ids)
    return Completions(responses, [row[-1] not in stops for row in responses], float(slots.removed) / sum(lengths))


def sample(logits: Tensor, uniforms: Tensor, args: GenerationArgs) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF: (S, V), (S,) -> ids (S,), probability taken out by top-k and top-p (S,).

    Temperature, then top-k, then top-p, each on what the one before left, as Hugging Face's processors do.
    """
    if not args.do_sample:
        return logits.argmax(-1), logits.new_zeros(len(logits), dtype=torch.float32)
    probs = (logits.float() / args.temperature).softmax(-1)  # (S, V)
    kept = probs
    if 0 < args.top_k < probs.shape[-1]:
        least = kept.topk(args.top_k, -1).values[:, -1:]
        kept = torch.where(kept < least, 0.0, kept)
    if args.top_p < 1.0:
        ordered, index = kept.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens
        ordered = torch.where(before >= args.top_p * ordered.sum(-1, keepdim=True), 0.0, ordered)
        kept = torch.zeros_like(kept).scatter(-1, index, ordered)
    cumulative = kept.cumsum(-1)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, uniforms[:, None].to(total) * total, right=True)[:, 0]
    last_kept = (kept > 0).long().mul(torch.arange(kept.shape[-1], device=kept.device)).amax(-1)  # rounding at u near 1
    return torch.minimum(token, last_kept), 1 - total[:, 0] / probs.sum(-1)


@torch.no_grad()
def score_logprobs(module: nn.Module, batch: Batch, temperature: float, micro_batch_size: int) -> Tensor:
    """Log-probabilities of a batch's actions, dropout off, in passes of rows of like length: -> (B, T-1)."""
    was_training = module.training
    module.eval()
    out = torch.zeros(batch.action_mask.shape, device=batch.input_ids.device)
    for rows in batch.attention_mask.sum(1).argsort(stable=True).split(micro_batch_size):
        part = batch.select(rows)
        out[rows, : part.action_mask.shape[1]] = module(**policy_inputs(part), temperature=temperature).logprobs
    module.train(was_training)
    return out


def generate_rollout(
    policy: nn.Module,
    reference: nn.Module,
    rows: Sequence[Row],
    args: GenerationArgs,
    tokenizer: Any,
    uniforms: Tensor,
    num_slots: int,
) -> Rollout:
    """Sample a response to each prompt row and score it under the policy and the reference, at the same temperature."""
    prompts = [[int(i) for i in row["input_ids"]] for row in rows]
    module = getattr(policy, "module", policy)
    with whole(module):
        sampled = generate(module, prompts, args, [tokenizer.eos_token_id], uniforms, num_slots)
        batch = response_batch(prompts, sampled.responses, tokenizer.pad_token_id).to(next(policy.parameters()).device)
        logprobs = score_logprobs(policy, batch, args.temperature, num_slots)
    return Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        prompt_len=torch.tensor([len(prompt) for prompt in prompts], device=batch.input_ids.device),
        truncated=torch.tensor(sampled.truncated, device=batch.input_ids.device),
        logprobs=logprobs,
        ref_logprobs=score_logprobs(reference, batch, args.temperature, num_slots),
        columns=[row.get("columns", {}) for row in rows],
        removed_mass=sampled.removed_mass,
    )


def check_room(model: nn.Module, prompts: Sequence[Sequence[int]], args: GenerationArgs) -> None:
    """Raises: UsageError when a prompt with its response does not fit into the model's positions."""
    room = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if room and longest + args.max_new_tokens > room:
        raise UsageError(
            f"--max_new_tokens {args.max_new_tokens} behind a prompt of {longest} tokens does not fit into the "
            f"model's {room} positions; use at most {max(room - longest, 0)}"
        )
