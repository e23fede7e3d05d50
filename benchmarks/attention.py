"""Attention in bfloat16 by batched products beside torch's kernel, alone and in a training step.

    python -m benchmarks.attention

Attention forwards and backwards with a causal mask of its own for each text, as packed rows have; then steps of SFT,
also in float32. The ways are interleaved in one process; clock milliseconds, median of the turns with the smallest and
the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.operators import model_of, training
from lightrlhf.cpu.attention import replace_attention, restore_attention
from lightrlhf.cpu.heap import keep_freed_memory
from lightrlhf.cpu.products import use_onednn

SHAPES = (16, 4, 64), (8, 8, 128), (4, 4, 256), (4, 9, 256), (4, 8, 512), (1, 4, 1024)  # texts, heads, tokens
STEPS = ("4M", 4, 256), ("4M", 16, 64), ("30M", 4, 256), ("30M", 8, 128)  # model, texts, tokens
SIZE = 64  # of a head
WAYS = {"float32": (False, False), "bf16, torch's": (True, False), "bf16, batched": (True, True)}  # bf16, batched


def attention(texts: int, heads: int, tokens: int) -> Callable[[], None]:
    """Attention to texts, forwards and backwards, under autocast in its type."""
    states = [torch.randn(texts, tokens, heads, SIZE).transpose(1, 2).requires_grad_() for _ in range(3)]
    mask = torch.ones(texts, 1, tokens, tokens, dtype=torch.bool).tril()

    def run() -> None:
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        own = [one.detach().to(dtype).requires_grad_() for one in states]
        F.scaled_dot_product_attention(*own, attn_mask=mask).sum().backward()

    return run


def milliseconds(run: Callable[[], None], turns: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each way and turn."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(1 + turns):
        for way, (bf16, batched) in WAYS.items():
            if batched:
                replace_attention()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                started = time.perf_counter()
                for _ in range(repeats):
                    run()
                found[way].append((time.perf_counter() - started) / repeats * 1e3)
            restore_attention()
            del found[way][: turn == 0]  # warm-up
    return found


def main() -> None:
    """Measure and print a line for each shape and training step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    use_onednn()
    torch.manual_seed(0)
    runs = {f"attention, {n} texts of {c}, {h} heads": (attention(n, h, c), 10) for n, h, c in SHAPES}
    for size, texts, tokens in STEPS:
        runs[f"step of {size}, {texts} texts of {tokens}"] = (training(model_of(size), texts, tokens), 2)
    for name, (run, repeats) in runs.items():
        found = milliseconds(run, args.turns, repeats)
        spread = [f"{way} {statistics.median(ms):.2f} ({min(ms):.2f} to {max(ms):.2f})" for way, ms in found.items()]
        print(f"{name}: {'; '.join(spread)}", flush=True)


if __name__ == "__main__":
    main()
