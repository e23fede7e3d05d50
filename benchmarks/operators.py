"""Time of each operator in a decoding step and in a training step, beside its floor on this machine.

    python -m benchmarks.operators --sizes 4M 30M

Operators are those of ATen as torch's dispatcher sees them, timed one by one: a few microseconds each are the timing's
own. An operator's floor is the larger of its operations over the machine's best rate and the bytes of its inputs and
outputs, each once, over its bandwidth; views cost nothing. Of attention's weighted sums (`embedding_bag`) the rows of
keys and values that are listed count, as often as they are. Operations are those of linear layers, packed ones too, and
those that torch counts (`mm`, `addmm`, `bmm`, most attention); of attention on CPUs bytes alone: its floor is too low.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inputs import SIZES
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.cpu import enable
from lightrlhf.generation.slots import Slots
from lightrlhf.models.roles import Policy
from lightrlhf.training.roofline import Ceilings, measure_ceilings

SHOWN = 16  # operators of a table
LINEAR = "linear", "_linear_pointwise"


class Operators(TorchDispatchMode):
    """Seconds, floor and calls by operator."""

    def __init__(self, ceilings: Ceilings) -> None:
        super().__init__()
        self.ceilings = ceilings
        self.seconds: dict[str, float] = defaultdict(float)
        self.floors: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - started
        name = func.overloadpacket.__name__
        self.seconds[name] += seconds
        self.calls[name] += 1
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            tensors = [leaf for leaf in (*tree_leaves(args), *tree_leaves(out)) if isinstance(leaf, torch.Tensor)]
            moved = sum(map(bytes_of, {id(tensor): tensor for tensor in tensors}.values()))
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            if name == "embedding_bag":
                table, rows = args[:2]
                moved += bytes_of(table[0]) * len(rows) - bytes_of(table)
            elif name in LINEAR:
                flops = 2 * out.numel() * args[0].shape[-1]
            self.floors[name] += max(flops / self.ceilings.flops, moved / self.ceilings.bandwidth)
        return out


def bytes_of(tensor: torch.Tensor) -> int:
    """The size of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def model_of(size: str) -> LlamaForCausalLM:
    """A random model of a size."""
    shape = {n: v for n, v in dataclasses.asdict(SIZES[size]).items() if v is not None}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))


def decoding(model: LlamaForCausalLM, rows: int = 64, columns: int = 96) -> Callable[[], None]:
    """A step of the engine in so many rows after prompts of so many tokens."""
    model.eval()
    prompts = [[2 + row] * columns for row in range(rows)]
    with torch.inference_mode():
        slots = Slots(model, prompts, SamplingArgs(max_new_tokens=512), [], torch.rand(rows, 512), rows)
        slots.admit(torch.arange(rows))

    def step() -> None:
        with torch.inference_mode():
            slots.step()

    return step


def training(model: LlamaForCausalLM, rows: int = 4, tokens: int = 256) -> Callable[[], None]:
    """Forward, backward and AdamW on so many texts; every token counts."""
    policy = Policy(model).train()
    ids = torch.randint(2, model.config.vocab_size, (rows, tokens))
    actions = torch.ones(rows, tokens - 1, dtype=torch.bool)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        policy(input_ids=ids, attention_mask=torch.ones_like(ids), action_mask=actions).logprobs.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


WORK: dict[str, Callable[[LlamaForCausalLM], Callable[[], None]]] = {"decoding": decoding, "training": training}


def main() -> None:
    """Measure and print a table for each size and kind of step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["4M", "30M"])
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    enable()
    ceilings = measure_ceilings(torch.device("cpu"), torch.bfloat16 if args.bf16 else torch.float32)
    rates = f"{ceilings.flops / 1e9:.0f} GFLOP/s, {ceilings.bandwidth / 1e9:.1f} GB/s"
    print(f"{rates}, {args.threads} threads; milliseconds a step")
    for size in args.sizes:
        for kind in args.work:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                show(f"{size}, {kind}", WORK[kind](model_of(size)), args.steps, ceilings)


def show(title: str, step: Callable[[], None], count: int, ceilings: Ceilings) -> None:
    """Print the operators that take most of a step; the whole step is timed without looking at them."""
    alone = []
    for turn in range(3 + count):
        started = time.perf_counter()
        step()
        alone.append((time.perf_counter() - started) * 1e3)
        del alone[: turn < 3]  # warm-up
    with Operators(ceilings) as found:
        for _ in range(count):
            step()
    per_step = 1e3 / count
    seconds, floor = sum(found.seconds.values()) * per_step, sum(found.floors.values()) * per_step
    print(f"\n{title}: {statistics.median(alone):.1f} ms; operators {seconds:.1f} ms, their floor {floor:.1f} ms")
    for name, taken in sorted(found.seconds.items(), key=lambda item: -item[1])[:SHOWN]:
        numbers = f"{taken * per_step:8.2f} {found.floors[name] * per_step:8.2f}"
        print(f"  {name:40s} {found.calls[name] // count:5d} calls {numbers}")


if __name__ == "__main__":
    main()
