"""Dry runs: what `--dry_run` prints; no files are written.

Two steps are done whole, then one batch of the evaluation. The first step is shown; the second one is measured, for in
the first the libraries warm up and the optimisers have no states yet. A hook on each trained model keeps the first
micro-batch that reaches it with gradients, so what is shown is what it was fed, decoded. Which tokens the loss counts
follows from its masks, and where the model gives scores from their gradient. Programs that sample show the first sample
that `rollouts.jsonl` would have. All ranks keep, the first one prints.

Left out: later steps, which may read longer texts, and the time of whole evaluations.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import marked_text
from lightrlhf.data.types import Tokenizer
from lightrlhf.storage.results import in_words, usual_metrics
from lightrlhf.training.summary import GroupsArgs, lines

LEGEND = (
    "⟦ and ⟧ stand around what is trained: tokens that the loss counts; of a model of scores, tokens whose scores have "
    "a gradient"
)
NUM_STEPS = 2
ENDING = "nothing was written; leave --dry_run out to start this run"


@dataclass
class Fed:
    """The first micro-batch that a model is trained on: B rows, T tokens, on the CPU."""

    input_ids: Tensor  # (B, T)
    attention_mask: Tensor  # (B, T) bool
    trained: Tensor  # (B, T) bool: the loss counts the token, or the score at it
    group: Tensor | None  # (B,)


class DryRun:
    """The record of a dry run's steps, and its printed text."""

    def __init__(self) -> None:
        self.fed: dict[str, Fed | None] = {}  # by learner
        self.sample: Row | None = None  # a row as in `rollouts.jsonl`
        self.metrics: dict[str, float] = {}
        self.scored = 0, 0  # rows scored before the steps here, and in a run
        self.checkpoint = 0  # bytes
        self.tokenizer: Tokenizer  # set when the model is saved
        self._before: dict[str, float] = {}  # seconds of the phases before the steps, and within the last step
        self._within: dict[str, float] = {}
        self._seconds: list[float] = []  # of each step
        self._started = 0.0
        self._planned = 0  # steps of the run

    # ---------------------------------------------------------------------------------------------------- the step
    def watch(self, name: str, wrapped: Any) -> None:
        """Keep the first micro-batch that a model, as Fabric wrapped it, is trained on."""
        self.fed[name] = None
        signature = inspect.signature(wrapped.module.forward)

        def keep(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            given = signature.bind(*positional, **named).arguments
            if self.fed[name] is None and torch.is_grad_enabled() and len(given["input_ids"]):
                self.fed[name] = keep_batch(given, output)

        wrapped.register_forward_hook(keep, with_kwargs=True)

    def begin(self, seconds: dict[str, float], planned: int) -> bool:
        """Begin a step of the run's `planned` ones; returns whether it is the last of the dry run.

        seconds: of the phases before it, which are forgotten.
        """
        self._end()
        if not self._seconds:
            self._before, self._planned = dict(seconds), planned
        seconds.clear()
        self._started = time.perf_counter()
        return len(self._seconds) + 1 == min(NUM_STEPS, planned)

    def log(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Keep metrics of the last step; with the first of them it is done. seconds: of its phases."""
        if self._started:
            self._end()
            self._within = dict(seconds)
        self.metrics |= metrics

    def _end(self) -> None:
        if self._started:
            self._seconds.append(time.perf_counter() - self._started)
            self._started = 0.0

    # ----------------------------------------------------------------------------------------------------- the text
    def report(self, args: TrainArgs, seconds: Mapping[str, float], memory: float) -> str:
        """The first example of each learner, and what the run would take; memory: GiB; seconds: of the last phases."""
        pairs = not isinstance(args, GroupsArgs)  # where a prompt has several, its texts are not a pair
        shown = [LEGEND, *(texts_of_sample(self.sample, self.tokenizer) if self.sample else [])]
        for name, fed in self.fed.items():
            shown += texts_of(name, fed, self.tokenizer, pairs)
        parts = ", ".join(f"{name} {spent:.2f}" for name, spent in self._within.items())
        names = usual_metrics({name for name in self.metrics if not name.startswith("time/")})
        each = ", ".join(f"{spent:.2f} s" for spent in self._seconds)
        fields = {
            "metrics": ", ".join(f"{name} {self.metrics[name]:.4g}" for name in names if isfinite(self.metrics[name])),
            "before": self._time_before(),
            "steps": f"{each}" + (f", of the last {parts}" if parts else ""),
            "run": f"{self._planned:,} steps as long as the last take {in_words(self._planned * self._seconds[-1])}, "
            "without evaluations and checkpoints",
            "evaluation": f"{seconds['evaluation']:.2f} s for one batch" if "evaluation" in seconds else "",
            "memory": f"{memory:.2f} GiB at most" if memory else "",
            "checkpoint": f"about {self.checkpoint / 2**20:,.1f} MiB each",
        }
        return "\n".join([*shown, "", lines(fields), ENDING])

    def _time_before(self) -> str:
        phases, (here, everywhere) = [], self.scored
        for name, spent in self._before.items():
            if name != "setup":
                phases.append(f"{name} {spent:.2f} s")
                if here < everywhere:
                    most = in_words(spent * everywhere / here)
                    phases[-1] += f" for {here:,} of {everywhere:,} rows; all of them {most} or less"
        return ", ".join(phases)


def texts_of_sample(row: Row, tokenizer: Tokenizer) -> list[str]:
    """A row as in `rollouts.jsonl`: its score, and the text with what the policy sampled in it."""
    shift = len(row["prompt_ids"])
    spans = [(shift + start, shift + end) for start, end in spans_of(row["mask"])]
    rewards = "".join(f", {name} {reward}" for name, reward in row["rewards"].items())
    rewards += "" if row["audit"] is None else f", audit {row['audit']}"
    sampled = f"{sum(row['mask']):,} of {shift + len(row['mask']):,} tokens were sampled, those between ⟦ and ⟧"
    sampled += ", and cut by their number" if row["truncated"] else ""
    score = "no score" if row["score"] is None else f"score {row['score']}"
    text = marked_text(tokenizer, [*row["prompt_ids"], *row["response_ids"]], spans)
    return ["", f"first sample: {score}{rewards}; {sampled}", text]


def keep_batch(given: Mapping[str, Any], output: Any) -> Fed:
    """A micro-batch by the arguments of a model's pass, and its output, whose gradient shows the scores in the loss."""
    names = ("input_ids", "attention_mask", "group")
    ids, mask, group = (None if given.get(n) is None else given[n].detach().cpu().clone() for n in names)
    assert ids is not None and mask is not None
    trained = torch.zeros_like(mask, dtype=torch.bool)
    if "action_mask" in given:
        trained[:, 1:] = given["action_mask"].cpu()
    elif output.requires_grad:

        def read(gradient: Tensor) -> None:
            trained.copy_(gradient != 0)

        output.register_hook(read)
    return Fed(ids, mask.bool(), trained, group)


def texts_of(name: str, fed: Fed | None, tokenizer: Tokenizer, pairs: bool) -> list[str]:
    """The first example of a learner's first micro-batch, of a pair both sides, with the counts of all of it.

    pairs: two rows of a group are a pair, the chosen one first.
    """
    if fed is None:
        return ["", f"{name}: the first step has nothing to learn from, such as responses of equal scores"]
    number, tokens, trained = len(fed.input_ids), int(fed.attention_mask.sum()), int(fed.trained.sum())
    texts = "1 text" if number == 1 else f"{number} texts"
    counted = f"{tokens:,} tokens, {trained:,} of them trained, and {fed.attention_mask.numel() - tokens:,} of padding"
    shown = ["", f"{name}: the first micro-batch has {texts}: {counted}"]
    sides = ["text"]
    if pairs and fed.group is not None and torch.equal(fed.group, torch.arange(number // 2).repeat(2)):
        sides = ["chosen", "rejected"]
    for side, row in zip(sides, (0, number // 2)):
        here = fed.attention_mask[row]  # (T,)
        flags = fed.trained[row][here].tolist()
        shown.append(f"{name}, {side}: {len(flags):,} tokens, {sum(flags):,} trained")
        shown.append(marked_text(tokenizer, fed.input_ids[row][here].tolist(), spans_of(flags)))
    return shown


def spans_of(flags: Sequence[bool | int]) -> list[tuple[int, int]]:
    """The longest spans [start, end) of true flags."""
    steps = [bool(after) != bool(before) for before, after in zip([0, *flags], [*flags, 0])]
    edges = [place for place, changes in enumerate(steps) if changes]
    return list(zip(edges[::2], edges[1::2]))
