"""Estimators of distillation against the exact gradients of both objectives: cosines, and variance at equal samples.

    python -m benchmarks.distillation --output_file benchmarks/results/distillation.json

Student and teacher are random tables of the next of 32 symbols by the one before, over 8 symbols a text, near each
other and far; the exact gradients sum over all texts, symbol by symbol. A draw is the mean over 64 texts of the
student; of 500 draws this prints the cosine of a draw and of the mean of all with the exact gradient, and the trace
of the covariance over that of the whole vocabulary.

For another tokenizer: texts of five letters a, b, c by a table of three, and a teacher that gives every text the chance
of a near table but writes ab as one token. The chain rule for merged tokens compares, of each span, the chances of the
texts that both sides can write; its expected gradient stands beside the one of the letters' distributions, both by the
Jensen-Shannon divergence (the reverse KL of a span is infinite where the teacher's token a excludes a b behind it).
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from lightrlhf.maths.distillation import divergence, in_buckets, kl, later_sum, span_logprobs, with_tail

SYMBOLS, LENGTH, TEXTS, DRAWS = 32, 8, 64, 500
TOP = 4
LETTERS, LENGTH_OF_LETTERS, TABLES = 3, 5, 10


def exact_gradient(logits: Tensor, teacher: Tensor, objective: str, buckets: bool = False) -> Tensor:
    """The gradient by the student's logits (V, V) of the mean over texts of the sum of KLs; row: the symbol before."""
    logits = logits.clone().requires_grad_()
    p = logits.log_softmax(-1)
    at = teacher.topk(TOP)
    of_row = kl(in_buckets(p, at.indices), with_tail(at.values)) if buckets else kl(p, teacher)  # (V,)
    reached, total = torch.zeros(SYMBOLS).double(), torch.zeros(()).double()
    reached[0] = 1.0
    for _ in range(LENGTH):
        total = total + (reached * of_row).sum()
        moved = reached @ p.exp()
        reached = moved if objective == "sequence" else moved.detach()
    return torch.autograd.grad(total, logits)[0]


def sample(p: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Symbols before and at each place: (B, T) each."""
    before, found = torch.zeros(TEXTS, dtype=torch.int64), []
    for _ in range(LENGTH):
        after = torch.multinomial(p[before].exp(), 1, generator=generator)[:, 0]
        found.append((before, after))
        before = after
    return tuple(torch.stack(column, 1) for column in zip(*found))  # type: ignore[return-value]


def loss_of(name: str, p: Tensor, teacher: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The mean loss of the texts by an estimator."""
    own, other = p[before], teacher[before]  # (B, T, V)
    taken = own.gather(2, after[..., None])[..., 0]  # (B, T), with a gradient
    k1 = taken - other.gather(2, after[..., None])[..., 0]
    k3 = (-k1).exp() - 1 + k1
    mask = torch.ones_like(after, dtype=torch.bool)
    objective, _, estimator = name.partition(" ")
    if estimator in ("exact", "top_k"):
        at = other.topk(TOP)
        flat = [values.flatten(0, 1) for values in (own, other, at.indices, at.values)]
        pair = flat[:2] if estimator == "exact" else (in_buckets(flat[0], flat[2]), with_tail(flat[3]))
        of_place = kl(*pair).view_as(taken)
        later = later_sum(of_place.detach(), mask) if objective == "sequence" else torch.zeros_like(taken)
        return (of_place + later * taken).sum(1).mean()
    cost = {"k1": k1, "k2_reward": k1**2 / 2, "k3_reward": k3}.get(estimator)
    if cost is None:
        return {"k1_loss": k1, "k2_loss": k1**2 / 2, "k3_loss": k3}[estimator].sum(1).mean()
    cost = cost.detach()
    later = later_sum(cost, mask) if objective == "sequence" else torch.zeros_like(cost)
    return ((cost + later) * taken).sum(1).mean()


NAMES = [f"position {one}" for one in ("exact", "top_k", "k1", "k2_loss", "k1_loss", "k3_loss", "k2_reward")]
NAMES += [f"sequence {one}" for one in ("exact", "top_k", "k1", "k2_reward", "k3_reward")]


def measure(distance: float, draws: int, seed: int = 0) -> list[dict[str, float | str]]:
    """A row for each estimator, at one distance of the student's logits from the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    teacher, noise = torch.randn(2, SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64)
    start, teacher = teacher + distance * noise, teacher.log_softmax(-1)
    moments = {name: [torch.zeros_like(start), 0.0, 0.0, 0.0] for name in NAMES}  # sum, squares, cosines, opposite
    exact = {name: exact_gradient(start, teacher, name) for name in ("position", "sequence")}
    for _ in range(draws):
        logits = start.clone().requires_grad_()
        p = logits.log_softmax(-1)
        texts = sample(p.detach(), generator)
        for name in NAMES:
            found = torch.autograd.grad(loss_of(name, p, teacher, *texts), logits, retain_graph=True)[0]
            cosine = float(torch.cosine_similarity(found.flatten(), exact[name.split()[0]].flatten(), 0))
            of = moments[name]
            of[0] += found
            of[1] += float(found.square().sum())
            of[2] += cosine
            of[3] += cosine < 0
    variance = {name: of[1] / draws - float((of[0] / draws).square().sum()) for name, of in moments.items()}
    rows: list[dict[str, float | str]] = []
    for name, of in moments.items():
        objective = name.split()[0]
        truth, mean = exact[objective].flatten(), (of[0] / draws).flatten()
        row = {"cosine_of_mean": float(torch.cosine_similarity(mean, truth, 0)), "cosine_of_draw": of[2] / draws}
        row |= {"opposite": of[3] / draws, "variance": variance[name] / variance[f"{objective} exact"]}
        rows.append({"estimator": name, "distance": distance, **{key: round(one, 4) for key, one in row.items()}})
    return rows


# --------------------------------------------------------------------------------------------------- merged tokens
def joined(letters: Tensor) -> Tensor:
    """A teacher's next token a, b, c or ab by the letter before: (3, 3) -> (3, 4), log-probabilities."""
    p = letters.exp()
    both = p[:, 0] * p[0, 1]
    rows = torch.stack([p[:, 0] - both, p[:, 1], p[:, 2], both], 1)
    rows[0] *= torch.tensor([1.0, 0.0, 1.0, 1.0]) / (1 - p[0, 1])  # an a before is the token a, which no b follows
    return rows.log()


def spans_of(text: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The letters of each of the teacher's tokens."""
    if not text:
        return []
    size = 2 if text[:2] == (0, 1) else 1
    return [text[:size], *spans_of(text[size:])]


def loss_of_spans(text: tuple[int, ...], rows: Tensor, teacher: Tensor) -> Tensor:
    """The sum over spans of the divergence of what both sides write there; rows: (T, 3), the student's by letter."""
    spans, total, before = spans_of(text), rows.new_zeros(()), LETTERS - 1
    numbers = torch.tensor([number for number, span in enumerate(spans) for _ in span])
    for span, ours in zip(spans, span_logprobs(rows, torch.tensor(text), numbers), strict=True):
        pair = (ours[1:2], teacher[before, 3:]) if len(span) == 2 else (ours, teacher[before, :3])
        total = total + divergence(*(with_tail(one[None]) for one in pair), beta=0.5)[0]
        before = span[-1]
    return total


def measure_merged(distance: float) -> dict[str, float | str]:
    """Mean cosine between each expected gradient and the exact gradient over letters, over random tables."""
    cosines = {"merged": 0.0, "merged without the shift": 0.0}
    for seed in range(TABLES):
        generator = torch.Generator().manual_seed(seed)
        teacher, noise = torch.randn(2, LETTERS, LETTERS, generator=generator, dtype=torch.float64)
        logits, teacher = (teacher + distance * noise).requires_grad_(), teacher.log_softmax(-1)
        p, totals = logits.log_softmax(-1), dict.fromkeys(["letters", *cosines], torch.zeros(()).double())
        for text in product(range(LETTERS), repeat=LENGTH_OF_LETTERS):
            ids, before = torch.tensor(text), torch.tensor([LETTERS - 1, *text[:-1]])
            chance = p[before, ids].sum().detach().exp()
            losses = [divergence(p[before], teacher[before], 0.5).sum()]
            losses += [loss_of_spans(text, p[row_of], joined(teacher)) for row_of in (before, ids)]
            totals = {name: total + chance * loss for (name, total), loss in zip(totals.items(), losses)}
        exact, *found = (torch.autograd.grad(total, logits, retain_graph=True)[0] for total in totals.values())
        for name, one in zip(cosines, found):
            cosines[name] += float(torch.cosine_similarity(one.flatten(), exact.flatten(), 0)) / TABLES
    return {"distance": distance, **{name: round(value, 4) for name, value in cosines.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--draws", type=int, default=DRAWS)
    args = parser.parse_args()
    rows = [row for distance in (0.1, 0.3, 1.0) for row in measure(distance, args.draws)]
    print(f"{'estimator':24}{'distance':>9}{'cos of mean':>13}{'cos of draw':>13}{'opposite':>10}{'variance':>10}")
    for row in rows:
        values = [row[key] for key in ("cosine_of_mean", "cosine_of_draw", "opposite")]
        print(
            f"{row['estimator']:24}{row['distance']:>9}" + "".join(f"{one:>12.3f} " for one in values), row["variance"]
        )
    merged = [measure_merged(distance) for distance in (0.1, 0.3, 1.0)]
    for one in merged:
        print(" ".join(f"{name} {value}" for name, value in one.items()))
    if args.output_file:
        settings = {"symbols": SYMBOLS, "length": LENGTH, "texts": TEXTS, "draws": args.draws, "top_k": TOP, "seed": 0}
        settings |= {"letters": LETTERS, "length_of_letters": LENGTH_OF_LETTERS, "tables": TABLES}
        found = {"settings": settings, "rows": rows, "merged": merged}
        args.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
