"""Scorers: a score for each response, from a reward model, a model that compares two responses, or a function.

Responses come in groups, one group a prompt, because a comparing model scores a response by how often it beats the
others of its group. A score that is not a finite number is None: it is for the caller to count. A scorer may have
another tokenizer and chat template than the policy; sampled ids that decode to the same text in the scorer's tokenizer
are scored as they are, never tokenised again.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import Rollout, inference_batches, response_batch
from lightrlhf.data.responses import ROW
from lightrlhf.data.tokens import decode, encode_pair, encode_prompt, encode_response, pair_prompt
from lightrlhf.data.turn_ends import turn_ends, without_end
from lightrlhf.models.roles import ScalarModel, last_token
from lightrlhf.rewards.functions import Failure, Response, RewardFunction, as_text, call_function, failure_of
from lightrlhf.rewards.workers import Workers


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers map text to the same ids."""
    return one is other or (one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id)


Messages = list[dict[str, str]]


class Sample(NamedTuple):
    """A response to be scored."""

    prompt: str | Messages
    response: str
    truncated: bool = False  # stopped by its length: no end token is appended
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    columns: dict[str, Any] = {}
    tokenizer: Any = None  # of the ids; where it is not known they are checked against the text


Groups = Sequence[Sequence[Sample]]


GroupScorer = Callable[[Groups], list[list[float | None]]]
Once = Callable[[Callable[[], Any]], Any]  # what the given function returns, called here or on another rank


@dataclass
class Encoding:
    """How samples become token ids of a scorer."""

    tokenizer: Any
    wrap_prompts: bool = False  # whether a text prompt becomes a user message
    longest: int | None = None  # positions of the model
    same: dict[int, bool] = field(default_factory=dict, repr=False)  # other tokenizers, by identity

    def prompt_and_response(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Ids of both, the response ending with one end token unless it was truncated."""
        if ids := self.sampled_ids(sample):
            return ids
        prompt = sample.prompt
        if self.wrap_prompts and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        start = self.known_prompt(sample) or encode_prompt(self.tokenizer, prompt)
        response = encode_response(self.tokenizer, sample.response, prompt)
        return start, without_end(self.tokenizer, response) if sample.truncated else response

    def sampled_ids(self, sample: Sample) -> tuple[list[int], list[int]] | None:
        """The ids a sample came with, when in this tokenizer they are the same prompt and response."""
        response = sample.response_ids
        if response is None:
            return None
        if not self.is_same(sample.tokenizer):
            if not response or not self.knows(response, sample.tokenizer):
                return None
            if not self.may_end(response[-1], sample.truncated) or decode(self.tokenizer, response) != sample.response:
                return None
        prompt = self.known_prompt(sample)
        return None if prompt is None else (prompt, list(response))

    def known_prompt(self, sample: Sample) -> list[int] | None:
        """The prompt's ids a sample came with, when in this tokenizer they are the same prompt.

        Its text alone may have lost the control tokens of a chat template.
        """
        prompt = sample.prompt_ids
        if prompt is None or (self.wrap_prompts and isinstance(sample.prompt, str)):
            return None
        if self.is_same(sample.tokenizer):
            return list(prompt)
        if not prompt or not self.knows(prompt, sample.tokenizer):
            return None
        if isinstance(sample.prompt, str):
            equal = decode(self.tokenizer, prompt) == sample.prompt
        else:
            equal = encode_prompt(self.tokenizer, sample.prompt) == list(prompt)
        return list(prompt) if equal else None

    def is_same(self, tokenizer: Any) -> bool:
        """Whether another tokenizer gives the ids of this one; False when it is not known."""
        if tokenizer is None:
            return False
        if id(tokenizer) not in self.same:
            self.same[id(tokenizer)] = same_tokenizer(self.tokenizer, tokenizer)
        return self.same[id(tokenizer)]

    def knows(self, ids: Sequence[int], tokenizer: Any) -> bool:
        """Whether the tokenizer has these ids, and another one, where it is known, the same tokens for them."""
        if max(ids) >= len(self.tokenizer):
            return False
        ids = list(ids)
        return tokenizer is None or self.tokenizer.convert_ids_to_tokens(ids) == tokenizer.convert_ids_to_tokens(ids)

    def may_end(self, last: int, truncated: bool) -> bool:
        """Whether a response can end with this id; the end token of another tokenizer may be any token of this one."""
        if last in (self.tokenizer.eos_token_id, *turn_ends(self.tokenizer)):
            return not truncated
        return truncated or last not in self.tokenizer.all_special_ids  # ended by a stop string

    def fits(self, length: int) -> bool:
        return 0 < length <= (self.longest or math.inf)


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
        if is_encoder(self.model):
            scores = self._score_texts(samples)
        else:
            scores = self._score_ids([self.encoding.prompt_and_response(sample) for sample in samples])
        values = iter(((torch.tensor(scores) - self.mean) / self.std).tolist())
        return [[finite(next(values)) for _ in group] for group in groups]

    def _score_ids(self, rows: list[tuple[list[int], list[int]]]) -> list[float]:
        def score(batch: list[tuple[list[int], list[int]]]) -> Tensor:
            pad = self.encoding.tokenizer.pad_token_id
            batched = response_batch([p for p, _ in batch], [r for _, r in batch], pad).to(device_of(self.model))
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
    read beside another (too long together, or the model's answer is no number), see `read_together`.
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
            batched = batched.to(device_of(self.model))
            return score_batch(self.model, batched.input_ids, batched.attention_mask)

        lengths = [len(row) for row in rows]
        logits = in_batches(rows, lengths, self.encoding, device_of(self.model), self.batch_size, score)
        first_wins: list[dict[tuple[int, int], float]] = [{} for _ in groups]
        for (g, a, b), logit in zip(places, logits):
            if math.isfinite(logit):
                first_wins[g][a, b] = 1 / (1 + math.exp(-logit)) if abs(logit) < 500 else float(logit > 0)
        scores: list[list[float | None]] = []
        for chances, lengths in zip(first_wins, sizes):
            kept = read_together(chances, lengths)
            rivals = {k: [other for other in kept if other != k] for k in kept}
            totals = {k: sum(chances[k, other] + 1 - chances[other, k] for other in rivals[k]) for k in kept}
            scores.append([totals[k] / (2 * len(rivals[k])) if k in kept else None for k in range(len(lengths))])
        return scores


def read_together(chances: Container[tuple[int, int]], lengths: Sequence[int]) -> list[int]:
    """Indices of the responses of a group that were all compared with each other, in both orders; none of fewer than 2.

    Scores are comparable only where all had the same rivals, so the response with the most missing comparisons is left
    out, of equals the longest, until none is missing. chances: what was compared, (first, second).
    """
    kept = list(range(len(lengths)))
    while len(kept) > 1:
        missing = [sum((a, b) not in chances or (b, a) not in chances for b in kept if b != a) for a in kept]
        if not any(missing):
            return kept
        kept.pop(max(range(len(kept)), key=lambda k: (missing[k], lengths[kept[k]])))
    return []


def alone(work: Callable[[], Any]) -> Any:
    """`Once` of a process that shares its rows with no other."""
    return work()


@dataclass
class FunctionScorer:
    """A Python function, called as in `rewards.functions`; with `timeout`, in processes that can be killed."""

    function: RewardFunction
    name: str = "the reward function"
    keeps_infinite: bool = False  # for a caller that clips scores
    timeout: float = 0.0  # seconds for one response; 0: one call for all, in this process, without limit
    path: str = ""  # where another process imports it from; needed with a timeout
    takes_messages: bool = False  # whether a prompt of messages is given as such
    once: Once = alone  # where ranks share rows, one of them calls the function
    failures: Counter[str] = field(default_factory=Counter)  # of the last call, by kind
    told: set[str] = field(default_factory=set, repr=False)  # kinds of failures that were printed
    works: bool = False  # whether any response got through
    workers: Workers | None = field(default=None, repr=False)

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Its numbers, None for missing or not finite ones. Raises: as `score`."""
        values = iter(self.score([sample for group in groups for sample in group]))
        return [[self._known(next(values)) for _ in group] for group in groups]

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """A number for each response, None where the function returned that, NaN where it failed, and is counted.

        Raises: RunFailure when one call for all fails, or its first call of each does: it works for none.
        """
        values, self.failures = self.once(lambda: (self._scored(samples), self.failures))
        return values

    def _scored(self, samples: Sequence[Sample]) -> list[float | None]:
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
        return [self._checked(result) for result in results]

    def _checked(self, result: float | None | Failure) -> float | None:
        if isinstance(result, Failure):
            return self._failed(result)
        if result is None or math.isfinite(result) or (self.keeps_infinite and math.isinf(result)):
            return result
        return self._failed(Failure("errors", f"it returned {result}"))

    def _failed(self, failure: Failure) -> float:
        """Count a response that is not scored; the first of a kind is printed, too."""
        self.failures[failure.kind] += 1
        if failure.kind not in self.told:
            self.told.add(failure.kind)
            print(f"{self.name}: no score for a response, {failure}; others are counted", file=sys.stderr)
        return math.nan

    def _known(self, score: float | None) -> float | None:
        return None if score is None or math.isnan(score) else score


def as_seen(sample: Sample, takes_messages: bool) -> Response:
    """A sample as a function sees it: as texts, or as messages where its prompt is messages, but no dialogue.

    A dialogue, which has all of its messages as the column `messages`, is seen as the text of the earlier ones and of
    its last.
    """
    if isinstance(sample.prompt, str) or sample.columns.get("messages") or not takes_messages:
        return Response(as_text(sample.prompt), sample.response, sample.response_ids, sample.columns)
    message = {"role": "assistant", "content": sample.response}
    return Response(sample.prompt, [message], sample.response_ids, sample.columns)


FAILURES = ("timeouts", "crashes", "errors")  # why a function gave no score though it was meant to


class Scores(NamedTuple):
    """Scores of B responses by R rewards."""

    total: Tensor  # (B,) weighted sum, NaN where a response is not scored
    parts: Tensor  # (B, R), NaN where a reward gave none
    names: tuple[str, ...]  # of the R rewards
    failures: dict[str, int] = {}  # responses that a function failed for, by kind

    def by_name(self) -> dict[str, Tensor]:
        """Scores (B,) of each reward."""
        return dict(zip(self.names, self.parts.unbind(1)))

    def replaced(self, keep: Tensor, fresh: Scores) -> Scores:
        """Scores of the rows `keep` and of fresh ones after them; the failures are those of both."""
        total, parts = torch.cat([self.total[keep], fresh.total]), torch.cat([self.parts[keep], fresh.parts])
        failures = {kind: count + fresh.failures[kind] for kind, count in self.failures.items()}
        return Scores(total, parts, self.names, failures)


@dataclass
class Rewards:
    """One or several scorers, weighted.

    None of a function says that its reward does not apply: the others count (as in TRL). A response is not scored where
    no reward applies, or where one failed: killed, crashed, raised, returned no finite number, or a reward model that
    could not read it. A reward of weight 0 is only logged and its failures cost nothing.
    """

    scorers: list[GroupScorer]
    names: tuple[str, ...]
    weights: Tensor  # (R,) float64

    def __call__(self, rollout: Rollout, tokenizer: Any) -> Scores:
        """Scores of a rollout's responses, each by itself; tokenizer: the policy's."""
        parts = self.parts([[sample] for sample in samples_of(rollout, tokenizer)])
        device = rollout.input_ids.device
        known = [[math.nan if value is None else value for value in row] for row in parts]
        total = [math.nan if (value := self.total(row)) is None else value for row in parts]
        table = torch.tensor(known, device=device).reshape(len(parts), len(self.names))  # (B, R)
        return Scores(torch.tensor(total, device=device), table, self.names, self.failures)

    @property
    def failures(self) -> dict[str, int]:
        """Responses of the last call that a function failed for, by kind."""
        counted: Counter[str] = Counter()
        for scorer in self.scorers:
            counted.update(scorer.failures if isinstance(scorer, FunctionScorer) else {})
        return {kind: counted[kind] for kind in FAILURES}

    def of_groups(self, groups: Groups) -> list[list[float | None]]:
        """Weighted sums for the responses of each group, None where a response is not scored."""
        totals = iter([self.total(row) for row in self.parts(groups)])
        return [[next(totals) for _ in group] for group in groups]

    def parts(self, groups: Groups) -> list[list[float | None]]:
        """A row of R values for each response: a number, None where a reward does not apply, NaN where it failed."""
        columns = []
        for scorer in self.scorers:
            if isinstance(scorer, FunctionScorer):
                columns.append(scorer.score([sample for group in groups for sample in group]))
            else:
                values = [value for group in scorer(groups) for value in group]
                columns.append([math.nan if value is None else value for value in values])
        return [list(row) for row in zip(*columns)]

    def total(self, row: Sequence[float | None]) -> float | None:
        """Weighted sum of the R values of a response, see `parts`; None where it is not scored."""
        weights = self.weights.tolist()
        terms = [weight * value for weight, value in zip(weights, row) if weight and value is not None]
        total = sum(terms) if terms else math.nan
        return None if math.isnan(total) else total


def samples_of(rollout: Rollout, tokenizer: Any) -> list[Sample]:
    """A rollout's responses as samples; tokenizer: the policy's."""
    prompts, responses, truncated = rollout.prompt_ids(), rollout.response_ids(), rollout.truncated.tolist()
    return [
        Sample(decode(tokenizer, prompt), decode(tokenizer, response), cut, prompt, response, columns, tokenizer)
        for prompt, response, cut, columns in zip(prompts, responses, truncated, rollout.columns)
    ]


def score_rollout(scorer: GroupScorer, rollout: Rollout, tokenizer: Any) -> Tensor:
    """Scores (B,) of a rollout's responses by one scorer, NaN where there is none; tokenizer: the policy's."""
    groups = [[sample] for sample in samples_of(rollout, tokenizer)]
    scores = [math.nan if score is None else score for (score,) in scorer(groups)]
    return torch.tensor(scores, device=rollout.input_ids.device)


def samples_of_row(row: dict[str, Any]) -> list[Sample | None]:
    """The responses of a row as `lightrlhf.generate` writes it; None for a missing one."""
    ids = row.get("response_ids") or [None] * len(row["responses"])
    truncated = row.get("truncated") or [False] * len(row["responses"])
    columns = {name: value for name, value in row.items() if name not in ROW}
    return [
        None if text is None else Sample(row["prompt"], text, bool(cut), row.get("prompt_ids"), own, columns)
        for text, cut, own in zip(row["responses"], truncated, ids)
    ]


def score_rows(scorer: GroupScorer, rows: Sequence[dict[str, Any]]) -> list[list[float | None]]:
    """Scores of the responses of rows as `lightrlhf.generate` writes them; None for a missing response."""
    samples = [samples_of_row(row) for row in rows]
    scored = scorer([[sample for sample in group if sample is not None] for group in samples])
    values = [iter(scores) for scores in scored]
    return [[None if sample is None else next(own) for sample in group] for group, own in zip(samples, values)]


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
    for part in inference_batches(torch.tensor([lengths[i] for i in fitting], device=device), batch_size):
        index = [fitting[i] for i in part.tolist()]
        for i, value in zip(index, score([rows[i] for i in index]).tolist()):
            values[i] = value
    return values


@torch.no_grad()
def score_batch(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, T) right-padded rows -> (B,): the head at the last token, or what the model's own code calls `score`."""
    if isinstance(model, ScalarModel):
        return last_token(model(input_ids, attention_mask), attention_mask)
    out = model(input_ids=input_ids, attention_mask=attention_mask.long())
    score = getattr(out, "score", None)
    return (out.logits if score is None else score).reshape(len(input_ids), -1)[:, 0].float()


def is_encoder(model: Any) -> bool:
    """Whether a classifier reads a pair of texts, as BERT does: no head `score`, no code of its own."""
    return not isinstance(model, ScalarModel) and not hasattr(model.config, "auto_map")


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's parameters, a shared backbone's too."""
    return next((getattr(module, "model", module)).parameters()).device


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
