"""Log-probabilities from hidden states and back: all logits at once, checkpointed chunks, and as `maths/head.py` does.

    python -m benchmarks.head

2,048 tokens through a head alone, forwards and backwards, the ways interleaved; clock seconds, median of the turns with
the smallest and the largest. Checkpointed chunks have 256 MiB of logits each at most, and ours what `logit_rows` says.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightrlhf.cpu import enable
from lightrlhf.maths.head import CHECKPOINTED, head_logprobs, logit_rows

TOKENS = 2048
SIZES = {(256, 131072), (576, 49152)}  # width and vocabulary


def ways(head: nn.Module, vocabulary: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Log-probabilities by each way; a head that is not a module is left to autograd."""

    def plain(states: Tensor) -> Tensor:
        return head(states)

    rows = 2**26 // vocabulary // CHECKPOINTED * CHECKPOINTED
    return {
        "at once": lambda hidden, targets: head_logprobs(hidden, plain, targets, chunk_size=TOKENS)[0],
        f"{rows} rows, checkpointed": lambda hidden, targets: head_logprobs(
            hidden, plain, targets, chunk_size=rows // CHECKPOINTED
        )[0],
        f"{logit_rows(vocabulary)} rows, as it is": lambda hidden, targets: head_logprobs(
            hidden, head, targets, chunk_size=logit_rows(vocabulary)
        )[0],
    }


def main() -> None:
    """Measure and print a line for each head and way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    enable()
    for width, vocabulary in sorted(SIZES):
        for trained in (True, False):
            torch.manual_seed(0)
            head = nn.Linear(width, vocabulary, bias=False).requires_grad_(trained)
            hidden = torch.randn(TOKENS, width, requires_grad=True)
            targets = torch.randint(vocabulary, (TOKENS,))
            seconds: dict[str, list[float]] = {}
            for turn in range(1 + args.turns):
                for name, way in ways(head, vocabulary).items():
                    hidden.grad = head.weight.grad = None
                    started = time.perf_counter()
                    way(hidden, targets).sum().backward()
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                    del seconds[name][: turn == 0]  # warm-up
            for name, turns in seconds.items():
                spread = f"{statistics.median(turns):.2f} s ({min(turns):.2f} to {max(turns):.2f})"
                print(f"{width}, {vocabulary:,}, {'trained' if trained else 'frozen'}, {name}: {spread}", flush=True)


if __name__ == "__main__":
    main()
