"""Scorers: a score for each response, from a reward model, a model that compares two responses, or a function.

Responses come in groups, one group a prompt, because a comparing model scores a response by how often it beats the
others of its group. A score that is not a finite number is None: it is for the caller to count.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import Rollout, inference_batches, response_batch, to_device
from lightrlhf.data.tokens import encode_pair, pair_prompt
from lightrlhf.models.forward import device_of
from lightrlhf.models.offload import on_device
from lightrlhf.models.roles import ScalarModel, last_token
from lightrlhf.rewards.encoding import Encoding, Sample, samples_of, samples_of_row
from lightrlhf.rewards.functions import Failure, Response, RewardFunction, as_text, call_function, failure_of
from lightrlhf.rewards.workers import Workers
from lightrlhf.storage.jsonl import Row
from lightrlhf.training.ranks import LocalRanks, Ranks

Groups = Sequence[Sequence[Sample]]
GroupScorer = Callable[[Groups], list[list[float | None]]]


@dataclass
class ModelScorer:
    """A reward model: one of ours, a sequence classifier with one label, or one whose own code returns a `score`."""

    model: Any
    encoding: Encoding
    batch_size: int
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Standardised scores; None for a text with more tokens than the model has positions."""
        samples = [sample for group in groups for sample in group]
        with on_device(self.model):
            if is_encoder(self.model):
                scores = self._score_texts(samples)
            else:
                scores = self._score_ids([self.encoding.prompt_and_response(sample) for sample in samples])
        values = iter(((torch.tensor(scores) - self.mean) / self.std).tolist())
        return [[finite(next(values)) for _ in group] for group in groups]

    def _score_ids(self, rows: list[tuple[list[int], list[int]]]) -> list[float]:
        def score(batch: list[tuple[list[int], list[int]]]) -> Tensor:
            pad = self.encoding.tokenizer.pad_token_id
            batched = response_batch([p for p, _ in batch], [r for _, r in batch], pad)
            return score_batch(self.model, batched.input_ids, batched.attention_mask)

        lengths = [len(prompt) + len(response) for prompt, response in rows]
        return in_batches(rows, lengths, self.encoding, device_of(self.model), self.batch_size, score)

    def _score_texts(self, samples: list[Sample]) -> list[float]:
        """Encoders read prompt and response as the two texts of a pair."""
        tokenizer = self.encoding.tokenizer
        rows = [encode_pair(tokenizer, as_text(sample.prompt), sample.response) for sample in samples]

        @torch.no_grad()
        def score(batch: list[dict[str, list[int]]]) -> Tensor:
            inputs = tokenizer.pad(batch, return_tensors="pt")
            return self.model(**inputs.to(device_of(self.model))).logits[:, 0].float()

        lengths = [len(row["input_ids"]) for row in rows]
        return in_batches(rows, lengths, self.encoding, device_of(self.model), self.batch_size, score)


@dataclass
class PairScorer:
    """A model that compares two responses (`rm --loss_type pair`).

    A response's score, in [0, 1], is its mean probability of beating each other response of its group, in both orders:
    K (K - 1) comparisons of K responses. A response without another one has no score. Nor has one that could not be
    read beside another (too long together, or the model's answer is not a number), see `find_complete_group`.
    """

    model: nn.Module
    encoding: Encoding
    batch_size: int

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Mean winning probabilities."""
        rows, places, sizes = [], [], []
        for g, group in enumerate(groups):
            encoded = [self.encoding.prompt_and_response(sample) for sample in group]
            sizes.append([len(response) for _, response in encoded])
            for a, (prompt, first) in enumerate(encoded):
                for b, (_, second) in enumerate(encoded):
                    if a != b:
                        rows.append(pair_prompt(self.encoding.tokenizer, prompt, first, second))
                        places.append((g, a, b))

        def score(batch: list[list[int]]) -> Tensor:
            batched = response_batch(batch, [[] for _ in batch], self.encoding.tokenizer.pad_token_id)
            return score_batch(self.model, batched.input_ids, batched.attention_mask)

        lengths = [len(row) for row in rows]
        with on_device(self.model):
            logits = in_batches(rows, lengths, self.encoding, device_of(self.model), self.batch_size, score)
        first_wins: list[dict[tuple[int, int], float]] = [{} for _ in groups]
        for (g, a, b), logit in zip(places, logits):
            if math.isfinite(logit):
                first_wins[g][a, b] = 1 / (1 + math.exp(-logit)) if abs(logit) < 500 else float(logit > 0)
        scores: list[list[float | None]] = []
        for chances, lengths in zip(first_wins, sizes):
            kept = find_complete_group(chances, lengths)
            rivals = {k: [other for other in kept if other != k] for k in kept}
            totals = {k: sum(chances[k, other] + 1 - chances[other, k] for other in rivals[k]) for k in kept}
            scores.append([totals[k] / (2 * len(rivals[k])) if k in kept else None for k in range(len(lengths))])
        return scores


def find_complete_group(chances: Container[tuple[int, int]], lengths: Sequence[int]) -> list[int]:
    """Indices of the responses of a group that were all compared with each other, in both orders; [] if fewer than 2.

    Scores are comparable only where all had the same rivals, so the response with the most missing comparisons is left
    out, of equals the longest, until all are there. chances: what was compared, (first, second).
    """
    kept = list(range(len(lengths)))
    while len(kept) > 1:
        missing = [sum((a, b) not in chances or (b, a) not in chances for b in kept if b != a) for a in kept]
        if not any(missing):
            return kept
        kept.pop(max(range(len(kept)), key=lambda k: (missing[k], lengths[kept[k]])))
    return []


def has_failed(sample: Sample) -> bool:
    """Whether it is an episode whose environment failed, which no scorer is to see: it may have no answer."""
    facts = sample.columns.get("episode")
    return isinstance(facts, dict) and bool(facts.get("fault"))


class EnvScorer:
    """What the environment of an episode gave it: the column `episode` of `generation.episodes`."""

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        return [self.score(group) for group in groups]

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Its numbers; None where it gives no reward."""
        return [sample.columns["episode"]["score"] for sample in samples]


@dataclass
class FunctionScorer:
    """A Python function, called as in `rewards.functions`; with `timeout`, in processes that can be killed."""

    function: RewardFunction
    name: str = "the reward function"
    keeps_infinite: bool = False  # for a caller that clips scores
    timeout: float = 0.0  # seconds for one response; 0: one call for all, in this process, without limit
    path: str = ""  # where another process imports it from; needed with a timeout
    takes_messages: bool = False  # whether a prompt of messages is given as such
    ranks: Ranks = field(default_factory=LocalRanks, repr=False)  # of those that share rows, one calls the function
    failures: Counter[str] = field(default_factory=Counter)  # of the last call, by kind
    told: set[str] = field(default_factory=set, repr=False)  # kinds of failures that were printed
    works: bool = False  # whether any response got through
    workers: Workers | None = field(default=None, repr=False)

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Its numbers, None for missing or not finite ones. Raises: as `score`."""
        scores = self.score([sample for group in groups for sample in group])
        values = (None if score is None or math.isnan(score) else score for score in scores)
        return [[next(values) for _ in group] for group in groups]

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """A number for each response, None where the function returned that, NaN where it failed, and is counted.

        Raises: RunFailure when one call for all fails, or its first call of each does: it works for none.
        """
        values, self.failures = self.ranks.once(lambda: (self._score(samples), self.failures))
        return values

    def close(self) -> None:
        """End the processes in which the function is called, if there are any."""
        if self.workers:
            self.workers.close()
            self.workers = None

    def _score(self, samples: Sequence[Sample]) -> list[float | None]:
        responses = [as_seen(sample, self.takes_messages) for sample in samples]
        self.failures = Counter()
        if not responses:  # of a rank without rows; functions expect some
            return []
        if self.timeout:
            self.workers = self.workers or Workers(self.path, self.timeout)
            results = self.workers.run(responses)
        else:
            try:
                results = call_function(self.function, responses)
            except Exception as problem:  # whatever a user's function raises
                raise RunFailure(f"{self.name} failed: {failure_of(problem)}") from problem
        raised = [result for result in results if isinstance(result, Failure) and result.kind == "errors"]
        self.works = self.works or len(raised) < len(results)
        if raised and not self.works:
            raise RunFailure(f"{self.name} failed: {raised[0]}, and so for each of {len(results)} responses")
        return [self._check(result) for result in results]

    def _check(self, result: float | None | Failure) -> float | None:
        if isinstance(result, Failure):
            return self._count_failure(result)
        if result is None or math.isfinite(result) or (self.keeps_infinite and math.isinf(result)):
            return result
        return self._count_failure(Failure("errors", f"it returned {result}"))

    def _count_failure(self, failure: Failure) -> float:
        """Count a response that is not scored; the first of a kind is printed, too."""
        self.failures[failure.kind] += 1
        if failure.kind not in self.told:
            self.told.add(failure.kind)
            print(f"{self.name}: no score for a response, {failure}; others are counted", file=sys.stderr)
        return math.nan


def as_seen(sample: Sample, takes_messages: bool) -> Response:
    """A sample as a function sees it: as texts, or as messages where its prompt is messages, but no dialogue.

    A dialogue, which has all of its messages as the column `messages`, is seen as the text of the earlier ones and of
    its last.
    """
    if isinstance(sample.prompt, str) or sample.columns.get("messages") or not takes_messages:
        return Response(as_text(sample.prompt), sample.response, sample.response_ids, sample.columns)
    message = {"role": "assistant", "content": sample.response}
    return Response(sample.prompt, [message], sample.response_ids, sample.columns)


def score_rollout(scorer: GroupScorer, rollout: Rollout) -> Tensor:
    """Scores (B,) of a rollout's responses by one scorer, NaN where missing."""
    samples = samples_of(rollout)
    scores = iter(scorer([[one] for one in samples if not has_failed(one)]))
    known = [None if has_failed(one) else next(scores)[0] for one in samples]
    return torch.tensor([math.nan if score is None else score for score in known])


def score_rows(scorer: GroupScorer, rows: Sequence[Row]) -> list[list[float | None]]:
    """Scores of the responses of rows as `lightrlhf.generate` writes them; None for a missing response."""
    samples = [samples_of_row(row) for row in rows]
    scored = scorer([[sample for sample in group if sample is not None] for group in samples])
    values = [iter(scores) for scores in scored]
    return [[None if sample is None else next(own) for sample in group] for group, own in zip(samples, values)]


def with_rewards(rows: Sequence[Row], scorer: GroupScorer) -> list[Row]:
    """Rows of responses with their scores under `rewards`."""
    rows = list(rows)
    return [{**row, "rewards": rewards} for row, rewards in zip(rows, score_rows(scorer, rows))]


# ---------------------------------------------------------------------------------------------------------- helpers
def in_batches(
    rows: Sequence[Any],
    lengths: Sequence[int],
    encoding: Encoding,
    device: torch.device,
    batch_size: int,
    score: Callable[[list[Any]], Tensor],
) -> list[float]:
    """Apply `score` to batches of similar length; NaN for rows that are longer than the model's positions."""
    values = [math.nan] * len(rows)
    fitting = [i for i, length in enumerate(lengths) if encoding.fits(length)]
    for part in inference_batches(torch.tensor([lengths[i] for i in fitting]), batch_size, device):
        index = [fitting[i] for i in part.tolist()]
        for i, value in zip(index, score([rows[i] for i in index]).tolist()):
            values[i] = value
    return values


@torch.no_grad()
def score_batch(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, T) right-padded rows -> (B,): the head at the last token, or what the model's own code calls `score`."""
    device = device_of(model)
    if isinstance(model, ScalarModel):
        return last_token(model(input_ids, attention_mask), to_device(attention_mask, device))
    out = model(input_ids=to_device(input_ids, device), attention_mask=to_device(attention_mask.long(), device))
    score = getattr(out, "score", None)
    return (out.logits if score is None else score).reshape(len(input_ids), -1)[:, 0].float()


def is_encoder(model: Any) -> bool:
    """Whether a classifier reads a pair of texts, as BERT does: no head `score`, no custom code."""
    return not isinstance(model, ScalarModel) and not hasattr(model.config, "auto_map")


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
