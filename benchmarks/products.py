"""Float32 products by oneDNN beside torch's own (lightrlhf/cpu/products.py), interleaved in one process.

    python -m benchmarks.products --sizes 4M 30M

A turn is a pass forward and backward over 8 texts of 256 tokens, and 64 responses of 32 tokens to prompts of 32.
Seconds are those of the processor in this process, which other work on the machine changes less than those of the
clock; the ratio is that of the medians, in brackets the smallest and the largest of a pair of turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inputs import SIZES
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.cpu import products
from lightrlhf.generation.engine import generate
from lightrlhf.models.roles import Policy


def work_of(size: str) -> dict[str, Callable[[], None]]:
    """Training and sampling with a random model of a size."""
    shape = {name: value for name, value in dataclasses.asdict(SIZES[size]).items() if value is not None}
    policy = Policy(LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)))
    ids = torch.randint(2, shape["vocab_size"], (8, 256))  # (B, T)
    actions = torch.ones(8, 255, dtype=torch.bool)
    prompts, uniforms = [[2 + row] * 32 for row in range(64)], torch.rand(64, 32)

    def train() -> None:
        policy.train()
        policy.zero_grad()
        policy(input_ids=ids, attention_mask=torch.ones_like(ids), action_mask=actions).logprobs.sum().backward()

    def sample() -> None:
        policy.eval()
        generate(policy, prompts, SamplingArgs(max_new_tokens=32), [], uniforms, 64)

    return {"forward and backward": train, "sampling": sample}


def seconds_of(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    """Measure and print a line for each size and work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["4M", "30M"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"MKL slow on this processor: {products.mkl_is_slow()}; {args.threads} threads")
    for size in args.sizes:
        for name, work in work_of(size).items():
            turns: dict[str, list[float]] = {"torch": [], "oneDNN": []}
            work()
            for _ in range(args.turns):
                turns["torch"].append(seconds_of(work))
                products.replace_products()
                turns["oneDNN"].append(seconds_of(work))
                products.restore_products()
            before, after = (statistics.median(turns[side]) for side in turns)
            pairs = [one / other for one, other in zip(*turns.values(), strict=True)]
            ratio = f"{before / after:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            print(f"{size}, {name}: torch {before:.3f} s, oneDNN {after:.3f} s, ratio {ratio}", flush=True)


if __name__ == "__main__":
    main()
