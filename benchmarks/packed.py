"""Sampling with the packed decoder beside the model's own forward pass, interleaved in one process.

    python -m benchmarks.packed --sizes 4M 30M 135M

A turn is 64 responses of 64 tokens to prompts of 32, prefilling included. Clock seconds; the ratio is that of the
medians, in brackets the smallest and the largest of a pair of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import torch

from benchmarks.operators import model_of
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.cpu import decoder, enable
from lightrlhf.generation.engine import generate
from lightrlhf.models.roles import Policy

ROWS, TOKENS = 64, 64


def seconds_of(policy: Policy, bf16: bool, least_steps: int) -> float:
    """Seconds of a turn, where calls of fewer steps than `least_steps` are left to the model."""
    prompts, uniforms = [[2 + row] * 32 for row in range(ROWS)], torch.rand(ROWS, TOKENS)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        mock.patch.object(decoder, "LEAST_STEPS", least_steps),
    ):
        started = time.perf_counter()
        generate(policy, prompts, SamplingArgs(max_new_tokens=TOKENS), [], uniforms, ROWS)
        return time.perf_counter() - started


def main() -> None:
    """Measure and print a line for each size and precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["4M", "30M", "135M"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    enable()
    for size in args.sizes:
        policy = Policy(model_of(size))
        for bf16 in (False, True):
            turns: dict[int, list[float]] = {TOKENS: [], TOKENS + 1: []}  # packed, the model's own
            for turn in range(1 + args.turns):
                for least, seconds in turns.items():
                    seconds.append(seconds_of(policy, bf16, least))
                    del seconds[: turn == 0]  # warm-up
            packed, own = (ROWS * TOKENS / statistics.median(seconds) for seconds in turns.values())
            pairs = [other / one for one, other in zip(*turns.values(), strict=True)]
            ratio = f"{packed / own:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            kind = "bfloat16" if bf16 else "float32"
            print(f"{size}, {kind}: {own:,.0f} tokens/s, packed {packed:,.0f}, ratio {ratio}", flush=True)


if __name__ == "__main__":
    main()
