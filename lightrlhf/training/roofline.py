"""Roofline model (Williams et al. 2009): the least time of a phase on a machine.

Work takes at least max(operations / operations per second, bytes / bytes per second). `--profile` compares a run's own
times with it, `benchmarks/roofline.py` the phases of an iteration.

A floor counts what the algorithm needs: tokens without padding, the head only where its output is read, each frozen
model once. Norms, activations, sampling, embedding lookups and Python are left out, so a ratio of 1 is out of reach.
Weights that stay in a processor's cache move faster than the measured bandwidth, so very small models may be below 1.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.batch import Batch
from lightrlhf.data.splits import Row
from lightrlhf.models.quantisation import compute_dtype
from lightrlhf.storage.jsonl import to_json
from lightrlhf.storage.writing import write_text

OPTIMIZER_BYTES = 7 * 4  # per weight: AdamW reads weight, gradient and two moments, writes weight and moments


class Work(NamedTuple):
    """Operations (an addition and a multiplication are two) and bytes to and from memory."""

    flops: float
    bytes: float = 0.0


class Ceilings(NamedTuple):
    """Best measured rates of a device."""

    flops: float  # per second, in the precision of the passes
    bandwidth: float  # bytes per second

    def seconds(self, *pieces: Work) -> float:
        """Least time for pieces of work in sequence."""
        return sum(max(piece.flops / self.flops, piece.bytes / self.bandwidth) for piece in pieces)


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer that determine the cost of a forward pass."""

    layers: int
    matrices: int  # weights that each token is multiplied with: all layers, without embedding and head
    head: int  # weights of the head
    query_width: int  # attention heads x their size
    key_value_width: int
    trainable: int  # weights that the optimiser updates
    trainable_share: float = 1.0  # share of the matrices that is trainable
    passed_share: float = 1.0  # share of the matrices that a gradient passes, from the lowest trainable one upwards

    @classmethod
    def of(cls, model: Any, role: Any = None) -> Shape:
        """The shape of a Hugging Face model with a language-model or a scalar head.

        role: the role that has the head and the trainable weights, where the model is a shared backbone.
        """
        config, role = model.config, role or model
        matrices = [found for name, module in model.base_model.named_modules() for found in _matrix(name, module)]
        total = sum(size for size, _ in matrices)
        lowest = next((i for i, (_, trainable) in enumerate(matrices) if trainable), len(matrices))
        head = getattr(role, "score", None) or getattr(model, "score", None) or model.get_output_embeddings()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            matrices=total,
            head=head.weight.numel(),
            query_width=heads * size,
            key_value_width=(getattr(config, "num_key_value_heads", None) or heads) * size,
            trainable=sum(p.numel() for p in role.parameters() if p.requires_grad),
            trainable_share=sum(size for size, trainable in matrices if trainable) / total,
            passed_share=sum(size for size, _ in matrices[lowest:]) / total,
        )


def _matrix(name: str, module: Any) -> list[tuple[int, bool]]:
    """(weights, whether they are trainable) of a linear layer; quantised ones unpacked, adapters as 0."""
    if isinstance(module, nn.Linear):
        return [(0 if ".lora_" in name else module.in_features * module.out_features, module.weight.requires_grad)]
    if type(module).__name__ == "Conv1D":  # GPT-2's
        return [(module.weight.numel(), module.weight.requires_grad)]
    return []


# ------------------------------------------------------------------------------------------------ counting the work
def forward(shape: Shape, lengths: Sequence[float], num_logits: float) -> Work:
    """Forward pass over texts of these lengths with the head at `num_logits` positions.

    Two operations per weight and token; attention at position t, over t keys, twice 2 * query_width * t per layer
    (scores and values), which sums to 2 * query_width * T * (T+1) over a text. Bytes are left out: a pass over a batch
    is compute-bound.
    """
    attention = sum(2 * shape.query_width * length * (length + 1) for length in lengths)
    return Work(2 * shape.matrices * sum(lengths) + shape.layers * attention + 2 * shape.head * num_logits)


def backward(shape: Shape, lengths: Sequence[float], num_logits: float) -> Work:
    """Backward pass: once the forward pass for gradients of activations, once for gradients of trainable weights."""
    return Work((shape.passed_share + shape.trainable_share) * forward(shape, lengths, num_logits).flops)


def optimizer_step(shape: Shape) -> Work:
    """AdamW on the trainable weights: negligible operations, 28 bytes per weight."""
    return Work(0, OPTIMIZER_BYTES * shape.trainable)


def generate(
    shape: Shape, prompts: Sequence[float], responses: Sequence[float], slots: int, bytes_per_number: int
) -> Work:
    """Sampling a response to each prompt with a KV cache, `slots` rows at a time.

    Operations: one pass over all but the last token, the head once per sampled token. Bytes: all weights at each of at
    least max(longest response, all tokens / slots) steps, and for the token at position t the keys and values of the t
    positions before it.
    """
    texts = [prompt + response - 1 for prompt, response in zip(prompts, responses)]
    steps = max(max(responses), sum(responses) / slots)
    cached = sum(prompt * (n - 1) + n * (n - 1) / 2 for prompt, n in zip(prompts, responses))
    keys_and_values = 2 * shape.layers * shape.key_value_width * cached
    moved = (shape.matrices + shape.head) * steps + keys_and_values
    return Work(forward(shape, texts, sum(responses)).flops, bytes_per_number * moved)


def update_work(
    shape: Shape,
    lengths: Sequence[float],
    num_logits: float,
    shared: Sequence[float] = (),
    epochs: int = 1,
    optimizer_steps: int = 1,
) -> list[Work]:
    """Forward and backward passes over texts of these lengths in each epoch, and the optimiser steps.

    shared: lengths of the common prefixes of pairs, which need to be computed once only.
    """
    passes = [
        Work(work(shape, lengths, num_logits).flops - work(shape, shared, 0).flops) for work in (forward, backward)
    ]
    return passes * epochs + [optimizer_step(shape)] * optimizer_steps


def shared_lengths(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Length of the common prefix of each pair; empty where rows are not pairs."""
    if "chosen_input_ids" not in rows[0]:
        return []
    pairs = [[torch.as_tensor(row[f"{side}_input_ids"]) for side in ("chosen", "rejected")] for row in rows]
    cut = [[ids[: min(map(len, pair))] for ids in pair] for pair in pairs]
    return [int((one == other).long().cumprod(0).sum()) for one, other in cut]


def ppo_floors(
    policy: Shape,
    critic: Shape,
    prompts: Sequence[float],
    responses: Sequence[float],
    ceilings: Ceilings,
    slots: int = 64,
    bytes_per_number: int = 4,
    ppo_epochs: int = 1,
    optimizer_steps: int = 1,
    reward_model: bool = True,
) -> dict[str, float]:
    """Least seconds of the phases of a PPO iteration.

    `rollout`: generation, and the reference's log-probabilities (the policy's own come with sampling). `score`: a pass
    of the critic and of the reward model, if any, assumed to have the critic's shape. `update`: of actor and critic.
    """
    texts = [prompt + response for prompt, response in zip(prompts, responses)]
    sampled = sum(responses)
    updates = [update_work(shape, texts, sampled, (), ppo_epochs, optimizer_steps) for shape in (policy, critic)]
    return {
        "rollout": ceilings.seconds(
            generate(policy, prompts, responses, slots, bytes_per_number), forward(policy, texts, sampled)
        ),
        "score": ceilings.seconds(*[forward(critic, texts, sampled)] * (2 if reward_model else 1)),
        "update": ceilings.seconds(*updates[0], *updates[1]),
    }


# ------------------------------------------------------------------------------------------ measuring the ceilings
MATRIX_SIZES = ((64, 64, 64), (512, 256, 1024), (1024, 1024, 1024), (2048, 512, 2048))  # rows, inner, columns
GPU_MATRIX_SIZES = ((256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
PRODUCT_SECONDS = 1.0  # of all products but the first: some processors make bfloat16's a thousand times more slowly


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]] = (), megabytes: int = 256
) -> Ceilings:
    """Measure the best rate of matrix products, and of reading or copying a large block; about 1 s each."""
    flops = best_product_rate(device, dtype, sizes)
    block = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(block)
    size = block.numel() * 4
    copy = 2 * size / best_time(lambda: target.copy_(block), device)
    read = size / best_time(lambda: block.sum(), device)
    return Ceilings(flops, max(copy, read))


def best_product_rate(device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]] = ()) -> float:
    """Best operations per second of products from small to large, without those that would exceed the time."""
    best, end = 0.0, math.inf
    usual = MATRIX_SIZES if device.type == "cpu" else GPU_MATRIX_SIZES
    for rows, inner, columns in sorted({*sizes, *usual}, key=math.prod):
        flops = 2 * rows * inner * columns
        if best and time.perf_counter() + 2 * flops / best > end:  # a warm-up call and a timed one
            break
        one, other = (torch.randn(*size, device=device).to(dtype) for size in ((rows, inner), (inner, columns)))
        repetitions = 5 if best else 100  # the first is so short that beside other work most of its calls wait
        best = max(best, flops / best_time(partial(torch.matmul, one, other), device, repetitions))
        end = min(end, time.perf_counter() + PRODUCT_SECONDS)
    return best


def best_time(work: Callable[[], Any], device: torch.device, repetitions: int = 5) -> float:
    """Seconds of the fastest of a few calls, after a warm-up call; of a single call if it takes a second or more."""
    seconds = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
        if len(seconds) > 1 and sum(seconds) > 1.0:
            break
    return min(seconds[1:])


# ---------------------------------------------------------------------------------------------- the table of a run
Phase = dict[str, float | None]  # seconds, floor and their ratio; None where a program's floor is not known here


@runtime_checkable
class RoundsArgs(Protocol):
    """Flags of a program that makes several passes over each rollout."""

    ppo_epochs: int
    rollout_mini_batch_size: int
    rm_experiment_dir: str | None


class Step(NamedTuple):
    """Seconds of a step's phases, and what it read: rows, tokens of each text, how many of them the loss counts."""

    seconds: dict[str, float]
    rows: int = 0
    lengths: Sequence[int] = ()
    counted: Sequence[int] = ()
    shared: Sequence[int] | None = None  # lengths of the common prefixes of pairs; None of samples

    @classmethod
    def of(cls, seconds: dict[str, float], work: Batch | Sequence[Row] | int) -> Step:
        """A step on samples or on prepared rows; a number of decisions says nothing of texts."""
        if isinstance(work, int) or not len(work):
            return cls(seconds)
        if isinstance(work, Batch):
            return cls(seconds, len(work), work.attention_mask.sum(1).tolist(), work.action_mask.sum(1).tolist())
        texts = [(row, key) for row in work for key in row if key.endswith("input_ids")]
        counted = [
            int(torch.as_tensor(row[mask]).sum())
            if (mask := key.replace("input_ids", "action_mask")) in row
            else len(row[key]) - row["prompt_len"]
            for row, key in texts
        ]
        return cls(seconds, len(work), [len(row[key]) for row, key in texts], counted, shared_lengths(work))

    def floors(self, shapes: Mapping[str, Shape], args: TrainArgs, ceilings: Ceilings) -> dict[str, float]:
        """Least seconds of the phases of PPO, and of the update on prepared rows; GRPO may leave samples out."""
        rounds = args if isinstance(args, RoundsArgs) else None
        epochs = rounds.ppo_epochs if rounds else 1
        updates = epochs, epochs * math.ceil(self.rows / args.mini_batch_size)
        if self.shared is not None:
            (shape,) = shapes.values()
            pieces = update_work(shape, self.lengths, sum(self.counted), self.shared, *updates)
            return {"update": ceilings.seconds(*pieces)}
        if not (rounds and "critic" in shapes and self.lengths):
            return {}
        prompts = [length - response for length, response in zip(self.lengths, self.counted)]
        sampling = rounds.rollout_mini_batch_size, compute_dtype(args).itemsize
        models = shapes["policy"], shapes["critic"]
        has_reward_model = rounds.rm_experiment_dir is not None
        return ppo_floors(*models, prompts, self.counted, ceilings, *sampling, *updates, has_reward_model)


def profile(
    steps: Sequence[Step], shapes: Mapping[str, Shape], args: TrainArgs, ceilings: Ceilings
) -> dict[str, Phase]:
    """Medians over a run's steps, per device: phase -> seconds, floor and seconds / floor.

    shapes: the trained models by the name that `run.setup` was given.
    """
    floors = [step.floors(shapes, args, ceilings) for step in steps]
    found: dict[str, Phase] = {}
    for phase in dict.fromkeys(phase for step in steps for phase in step.seconds):
        seconds = statistics.median(step.seconds[phase] for step in steps if phase in step.seconds)
        known = [step[phase] for step in floors if phase in step]
        floor = statistics.median(known) if known else None
        found[phase] = {"seconds": seconds, "floor": floor, "ratio": seconds / floor if floor else None}
    return found


def table(phases: dict[str, Phase], ceilings: Ceilings) -> str:
    """The phases as a Markdown table; the last row of several is their sum."""
    rows = dict(phases)
    floors = [phase["floor"] or 0.0 for phase in phases.values()]
    if len(phases) > 1 and all(floors):
        seconds, floor = sum(phase["seconds"] or 0.0 for phase in phases.values()), sum(floors)
        rows["all"] = {"seconds": seconds, "floor": floor, "ratio": seconds / floor}
    lines = [
        "Median seconds of a step, and the least this machine needs for its work at the best measured "
        f"{ceilings.flops / 1e9:,.0f} GFLOP/s and {ceilings.bandwidth / 1e9:,.1f} GB/s.",
        "",
        "| phase | seconds | floor | seconds / floor |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        shown = (f"{row['floor']:.4f}", f"{row['ratio']:.1f}") if row["floor"] else ("", "")
        lines.append(f"| {name} | {row['seconds']:.4f} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines) + "\n"


def write_profile(
    directory: Path, steps: Sequence[Step], roles: Mapping[str, Any], args: TrainArgs, device: torch.device
) -> None:
    """Write `profile.json` and `profile.md` of a run; roles: its learning models by name."""
    ceilings = measure_ceilings(device, compute_dtype(args))
    shapes = {name: Shape.of(role.model, role) for name, role in roles.items()}
    phases = profile(steps, shapes, args, ceilings)
    write_text(directory / "profile.json", to_json({"phases": phases, **ceilings._asdict()}, indent=1))
    write_text(directory / "profile.md", table(phases, ceilings))
