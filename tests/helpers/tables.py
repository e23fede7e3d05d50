"""Students and teachers as tables over a tiny vocabulary, whose texts can be enumerated."""

import itertools

import torch

V, LENGTH = 3, 3  # the text ends after its third token, or with token 0


def texts() -> list[tuple[int, ...]]:
    """All texts: token 0 ends one."""
    found = []
    for text in itertools.product(range(V), repeat=LENGTH):
        end = text.index(0) + 1 if 0 in text else LENGTH
        found.append(text[:end])
    return sorted(set(found))


class Table:
    """Logits of the next token by prefix: a student or teacher without shared weights."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.prefixes = sorted({text[:t] for text in texts() for t in range(len(text))})
        self.logits = torch.randn(len(self.prefixes), V, generator=generator, dtype=torch.float64).requires_grad_()

    def logprobs(self, text: tuple[int, ...]) -> torch.Tensor:
        """(T, V)."""
        rows = [self.prefixes.index(text[:t]) for t in range(len(text))]
        return self.logits.log_softmax(-1)[rows]

    def logprob(self, text: tuple[int, ...]) -> torch.Tensor:
        return sum(row[token] for row, token in zip(self.logprobs(text), text))
