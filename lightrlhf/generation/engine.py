"""The generation engine: continuous batching over a fixed number of slots (`slots`) and one preallocated KV cache.

A row that has ended leaves its slot to a waiting one; when no row waits, the remaining slots are compacted. Sampling is
by inverse CDF with one given uniform number per row and token, so a sample does not depend on batch size, slot or rank.
On CPUs prompts and steps of a common architecture run over packed weights (`cpu`), else through the model;
on CUDA steps are captured (`graphs`), and the host looks only at times which rows have ended.

Left out: beam search, speculative decoding, servers (see `server_pool`), architectures without a KV cache, compiled
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.generation.graphs import DEVICES, note, slots_type
from lightrlhf.generation.prefix_cache import CachedPrefix, make_cache, unsupported_error
from lightrlhf.generation.sampling import check_sampled, first_stop
from lightrlhf.generation.slots import LATE_STEPS, SPARE_COLUMNS, Slots
from lightrlhf.models.architecture import is_close, trial_ids
from lightrlhf.models.forward import inference
from lightrlhf.models.frozen import activation_dtype
from lightrlhf.models.probes import check_room
from lightrlhf.models.roles import Policy

FLASH = "flash_attention_2"
STEPS_BETWEEN_CHECKS = {"cpu": 1}  # of ended rows; elsewhere LATE_STEPS, since a check synchronises


class Completions(NamedTuple):
    """Sampled responses, in the order of the prompts."""

    responses: list[list[int]]  # sampled ids, including the end token or the last token of a stop string
    logprobs: list[list[float]]  # log-probability of each id at the temperature, over the whole vocabulary
    truncated: list[bool]  # stopped by length
    removed_mass: float  # mean probability removed from the sampling distribution by top-k, top-p and min-p


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    args: SamplingArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    num_slots: int = 64,
    tokenizer: Tokenizer | None = None,
    prefixes: list[CachedPrefix | None] | None = None,
    allowed: Sequence[int] | None = None,
    before_step: Callable[[], None] | None = None,
    pack: Callable[..., Any] = cpu.pack_decoder,
) -> Completions:
    """Sample one response for each prompt; a prompt that occurs K times is prefilled once.

    prompts: N id lists; uniforms: (N, max_new_tokens) in [0, 1), the only source of randomness; tokenizer: required for
    stop strings only; prefixes: per-prompt KV caches of the previous call, reused, then updated in place; allowed: the
    only tokens that may be sampled, log-probabilities are then over them; before_step: called before each step, may
    raise to end the call; pack: makes or keeps the packed weights. A row ends at the first token at which its decoded
    text contains a stop string.
    Raises: UsageError when a prompt has no tokens, or does not fit with its response into the model's positions.
    """
    if args.stop_strings and tokenizer is None:
        raise ValueError("stop_strings requires a tokenizer")
    if not prompts:  # of a rank without rows
        return Completions([], [], [], 0.0)
    model = policy.model
    check_room(model, torch.tensor([*map(len, prompts)]), args)
    with inference(policy), decoding(policy):
        check_architecture(policy)
        slots = slots_type(model)(model, prompts, args, eos_ids, uniforms, num_slots, prefixes, allowed, pack)
        decode_all(slots, tokenizer, before_step)
    return completions_of(slots, eos_ids, tokenizer)


def generate_turns(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    args: SamplingArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    num_slots: int,
    tokenizer: Tokenizer,
    allowed: Sequence[int] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    pack: Callable[..., Any] = cpu.pack_decoder,
) -> Generator[None, None, Completions]:
    """`generate` by steps, between which other work may use the model: yields before each, returns the same.

    context: made around each step, such as autocast; pack: makes or keeps the packed weights.
    """
    check_room(policy.model, torch.tensor([*map(len, prompts)]), args)
    with context(), inference(policy), decoding(policy):
        check_architecture(policy)
        kind = slots_type(policy.model)
        slots = kind(policy.model, prompts, args, eos_ids, uniforms, num_slots, None, allowed, pack)
        turns = decode_turns(slots, tokenizer)
    while True:
        with context(), inference(policy), decoding(policy):
            if next(turns, slots) is slots:
                break
        yield
    return completions_of(slots, eos_ids, tokenizer)


def cache_bytes(config: Any, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of rows with as many tokens of prompt and response, about."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rows * (columns + SPARE_COLUMNS) * config.num_hidden_layers * heads * size * 2 * dtype.itemsize


def generate_steps(
    policy: Policy,
    prompt: Sequence[int],
    args: SamplingArgs,
    eos_ids: Sequence[int],
    uniforms: Tensor,
    tokenizer: Tokenizer | None = None,
    allowed: Sequence[int] | None = None,
) -> Iterator[Completions]:
    """Streaming `generate` for one prompt: yields after each token; the last item equals `generate`.

    The policy must be in eval mode. Between two steps adapters and gradient mode are restored, so several iterators may
    alternate on one model, and the caller may continue in another thread.
    """
    check_room(policy.model, torch.tensor([len(prompt)]), args)
    slots: Slots | None = None
    while slots is None or slots.row[0] != slots.idle_row:
        with decoding(policy):
            if slots is None:
                check_architecture(policy)
                slots = Slots(policy.model, [prompt], args, eos_ids, uniforms, num_slots=1, allowed=allowed)
                slots.admit(torch.arange(1, device=slots.device))
            else:
                slots.step()
            if args.stop_strings:
                slots.stop_at_strings(tokenizer)
        yield completions_of(slots, eos_ids, tokenizer)


def completions_of(slots: Slots, eos_ids: Sequence[int], tokenizer: Tokenizer | None) -> Completions:
    """The responses sampled so far, cut after a stop string.

    Raises: NotFinite naming the model and the prompts, when it gave logits that are not finite.
    """
    check_sampled(slots.logprobs[:-1], slots.model)  # the last row belongs to idle slots
    args, ends = slots.args, {*eos_ids, *slots.args.eos_ids}
    responses, logprobs, truncated = [], [], []
    for tokens, values, length in zip(slots.tokens[:-1].tolist(), slots.logprobs.tolist(), slots.lengths.tolist()):
        end = first_stop(tokenizer, tokens[:length], args.stop_strings)
        responses.append(tokens[: end or length])
        logprobs.append(values[: end or length])
        truncated.append(end is None and tokens[length - 1] not in ends)
    removed = sum(float(row[: len(response)].sum()) for row, response in zip(slots.removed.cpu(), responses))
    return Completions(responses, logprobs, truncated, removed / sum(map(len, responses)))


def decode_all(slots: Slots, tokenizer: Tokenizer | None, before_step: Callable[[], None] | None = None) -> Slots:
    """Step until every row has ended, refilling idle slots with waiting rows; before_step: see `generate`."""
    for _ in decode_turns(slots, tokenizer):
        if before_step is not None:
            before_step()
    return slots


def decode_turns(slots: Slots, tokenizer: Tokenizer | None) -> Iterator[None]:
    """`decode_all` by steps: yields before each."""
    slots.admit(torch.arange(len(slots.row), device=slots.device))
    check_every = min(STEPS_BETWEEN_CHECKS.get(slots.device.type, LATE_STEPS), slots.args.max_new_tokens)
    step = 0
    while True:
        step += 1
        if step % check_every == 0:
            if slots.args.stop_strings:
                slots.stop_at_strings(tokenizer)
            idle = slots.row == slots.idle_row
            while slots.waiting() and int(idle.sum()) * 16 >= len(idle):
                slots.admit(idle.nonzero()[:, 0])
                idle = slots.row == slots.idle_row  # a row may end with its first token
            if idle.all():
                return
            slots.set_window(idle)
            if not slots.waiting() and int(idle.sum()) * 8 >= len(idle):
                slots.compact(idle)
        yield
        slots.step()


@contextmanager
def decoding(policy: Policy) -> Iterator[None]:
    """Context manager: the policy's adapters, no gradients, and sdpa for flash attention, which takes no such cache."""
    model = policy.model
    name = model.config._attn_implementation
    with policy.active(), no_gradients(model):
        if name != FLASH:
            yield
            return
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(name)


@contextmanager
def no_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: torch's inference mode; under autocast no_grad, so that each weight is cast once.

    Autocast caches casts outside of inference mode only, and only of parameters that require gradients.
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


def check_architecture(policy: Policy) -> None:
    """Check once, in float32, that the engine gives this architecture's own log-probabilities.

    Raises: UsageError. Where steps that are captured give others, or packed weights do, they are not used from now on.
    """
    if policy.sampled:
        return
    model = policy.model
    make_cache(model)
    with torch.autocast(model.device.type, enabled=False):
        try:
            check_decoding(model, 3)
        except UsageError as problem:
            if slots_type(model) is Slots:
                raise
            DEVICES.discard(model.device.type)
            note(f"decoding steps are not captured, and slower for it: {problem}")
            check_decoding(model, 3)
        if cpu.packed_dtype(model, cpu.LEAST_STEPS, activation_dtype(model)) is not None:
            try:
                check_decoding(model, cpu.LEAST_STEPS)
            except UsageError as problem:
                cpu.exclude(model)
                note(f"rollouts decode without packed weights, and slower for it: {problem}")
    policy.sampled = True


def check_decoding(model: PreTrainedModel, steps: int) -> None:
    """Compare so many sampled tokens of two prompts with a pass of the model over each text. Raises: UsageError.

    The prompts have different lengths, so one is padded on the left: some architectures ignore the positions, or keep
    more in their cache than keys and values.
    """
    tokens = trial_ids(model, 6)[0].tolist()
    prompts, args = [tokens, tokens[2:4]], SamplingArgs(max_new_tokens=steps)
    try:
        uniforms = torch.full((2, steps), 0.5)
        slots = decode_all(slots_type(model)(model, prompts, args, [], uniforms, num_slots=2), None)
        found, expected = slots.logprobs[:-1], torch.empty_like(slots.logprobs[:-1])
        for row, (prompt, response) in enumerate(zip(prompts, slots.tokens.tolist())):
            ids = torch.tensor([prompt + response], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # (steps, V)
            expected[row] = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise unsupported_error(model, f"{type(problem).__name__}: {first_line(problem)[:200]}") from None
    if not is_close(found, expected, model):
        raise unsupported_error(model, f"log-probabilities differ by {float((found - expected).abs().max()):.2g}")
