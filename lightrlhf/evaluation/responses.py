"""Rewards of responses, sampled or read from a file, and what follows from them: pass@k and win rates.

A record is a response with the `index` of its prompt, one of several where a prompt has several. A response without a
reward is in no mean and no win rate, as in training; for pass@k it has not passed.

Left out: rewards given from Python, and responses scored by how often they beat the others of their prompt
(`lightrlhf.annotate` has both).
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag
from lightrlhf.cli.groups import RewardArgs
from lightrlhf.data.batch import Rollout
from lightrlhf.data.responses import ROW, read_responses
from lightrlhf.data.splits import hash64
from lightrlhf.evaluation.matching import prompt_hash
from lightrlhf.maths.length_control import length_controlled_win_rate
from lightrlhf.maths.ops import number_groups, share_interval
from lightrlhf.maths.passes import pass_at_k
from lightrlhf.rewards.encoding import Sample, samples_of_row
from lightrlhf.rewards.functions import as_text
from lightrlhf.rewards.rewards import Rewards

Record = dict[str, Any]
OPTIONAL = ("index", "responses", "response", "truncated", "prompt_ids", "response_ids", "rewards", "reward")


@dataclass(frozen=True, kw_only=True)
class ResponseArgs(RewardArgs):
    """Rewards of responses."""

    rm_experiment_dir: str | None = flag(None, required=None)
    """Reward model that scores the responses."""
    reward_function: list[str] = flag([], required=None)
    """Python functions `package.module:name` that score them, one or several, instead of a model or beside it."""
    rm_chat_template: bool = False
    """Show a prompt that is plain text to the reward model as a user message of its chat template."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a reward model to run code from its folder."""
    num_generations: int = at_least(1, 1)
    """Responses per prompt."""
    pass_k: list[int] = at_least(1, [])
    """Estimate pass@k, the chance that one of k responses passes, for each of these k."""
    pass_threshold: float = flag(1.0, needs="pass_k")
    """Lowest reward of a response that passes."""

    def check_pass_k(self, may_have_rewards: bool) -> None:
        """Raises: ValueError when nothing says what passes. may_have_rewards: responses may bring theirs."""
        if self.pass_k and not (self.has_rewards or may_have_rewards):
            raise ValueError(
                f"--pass_k {self.pass_k[0]} needs --reward_function or --rm_experiment_dir to say what passes"
            )


# ---------------------------------------------------------------------------------------------------------- a response
@dataclass
class Mean:
    """Running mean of scores, with the number of missing ones."""

    total: float = 0.0
    count: int = 0
    missing: int = 0

    def add(self, score: float | None) -> None:
        """Add a score, None for a missing one."""
        if score is None:
            self.missing += 1
        else:
            self.total, self.count = self.total + score, self.count + 1

    def results(self, name: str) -> dict[str, Any]:
        """The mean of the scores that there are, and the number of responses without one where there are some."""
        found = {name: self.total / self.count} if self.count else {}
        return found | ({f"{name}_missing": self.missing} if self.missing else {})


class Tally:
    """What results need of the responses: 40 bytes of each, in their order. by: the key of `win_rates`."""

    def __init__(self, by: str | None) -> None:
        self.by = by
        self.scores = array("d")  # which decide who wins, NaN for missing ones
        self.rewards = array("d")
        self.words, self.indices = array("q"), array("q")
        self.prompts = array("Q")  # hashes

    def add(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records of responses, each added."""
        for record in records:
            reward = _number(record.get("reward"))
            self.rewards.append(reward)
            self.scores.append(_number(record["gold"]["score"]) if self.by == "gold" else reward)
            self.words.append(len((record["response"] or "").split()))
            self.indices.append(record["index"])
            self.prompts.append(prompt_hash(record))
            yield record


class RolloutMeans:
    """Means over responses that were sampled: 9 bytes of each."""

    def __init__(self) -> None:
        self.kl, self.length, self.truncated = list[Tensor](), list[Tensor](), list[Tensor]()

    def add(self, rollout: Rollout) -> None:
        """Add the responses of a rollout."""
        self.kl.append(((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1))  # (B,) nats
        self.length.append(rollout.lengths())
        self.truncated.append(rollout.truncated)

    def results(self, with_kl: bool) -> dict[str, float]:
        """Their KL to the reference, length in tokens, and the shares that were truncated or ended."""
        found = {"kl": float(torch.cat(self.kl).mean())} if with_kl else {}
        truncated = float(torch.cat(self.truncated).float().mean())
        found["mean_length"] = float(torch.cat(self.length).mean())
        return found | {"truncated_ratio": truncated, "eos_ratio": 1 - truncated}


def _number(score: float | None) -> float:
    return math.nan if score is None else score


# ------------------------------------------------------------------------------------------------------------ a file
@dataclass
class Given:
    """A file of responses, read row by row: 8 bytes a row and 8 a response.

    A row has a `prompt` and a list `responses`, or one `response`; `rewards` or `reward` are kept. Rows with the same
    `index` and prompt are of one prompt, any other row is another prompt.
    Raises: UsageError naming file, row and column.
    """

    path: str
    num_rows: int | None = None

    def __post_init__(self) -> None:
        self.rows = read_responses(self.path, ["prompt"], OPTIONAL)[: self.num_rows]
        self.prompts, self.has_rewards = array("Q"), True  # hashes of the prompt of each response
        keys, counts = array("Q"), array("q")
        for number, row in enumerate(self.rows, start=1):
            if row.get("responses") is None and "response" not in row:
                raise UsageError(f"{self.path}: row {number} has neither 'responses' nor 'response'")
            row, own = as_list(row), row.get("index")
            key = f"row {number}" if own is None else json.dumps([own, row["prompt"]])
            keys.append(hash64(key.encode("utf-8", "surrogatepass")))
            counts.append(len(row["responses"]))
            self.prompts.extend([prompt_hash(row)] * counts[-1])
            self.has_rewards &= row.get("rewards") is not None or not counts[-1]
        self.indices = number_groups(np.frombuffer(keys, np.uint64))  # (rows,) of the prompts
        self.counts = np.bincount(self.indices, np.frombuffer(counts, np.int64))  # responses of each prompt

    def check_counts(self, ks: Sequence[int]) -> None:
        """Raises: UsageError when a prompt has fewer than k responses."""
        for k in ks:
            too_few = (0 < self.counts) & (self.counts < k)
            if too_few.any():
                few = int(too_few.argmax())
                start = as_text(self.rows[int((self.indices == few).argmax())]["prompt"])[:40]
                has = int(self.counts[few])
                raise UsageError(f"--pass_k {k} needs {k} responses to each prompt; {start!r} has {has}")

    def check_same_prompts(self, other: Given) -> None:
        """Raises: UsageError unless two files have responses to the same prompts, as many, in the same order."""
        ours, theirs = self.prompts, other.prompts
        if len(ours) != len(theirs):
            raise UsageError(
                f"--responses_file {self.path} has {len(ours)} responses, {other.path} {len(theirs)}: give as many"
            )
        differ = np.frombuffer(ours, np.uint64) != np.frombuffer(theirs, np.uint64)
        if differ.any():
            number = int(differ.argmax())
            prompt = next(itertools.islice((record["prompt"] for record, _ in self), number, None))
            raise UsageError(
                f"--responses_file {self.path}: response {number + 1} has another prompt than in {other.path}, "
                f"{as_text(prompt)[:40]!r}; sort both alike, or compare them by lightrlhf.judge"
            )

    def parts(self, size: int) -> Iterator[tuple[list[Record], list[Sample | None]]]:
        """Yields records and samples of `size` responses."""
        every = iter(self)
        while part := list(itertools.islice(every, size)):
            yield [record for record, _ in part], [sample for _, sample in part]

    def __iter__(self) -> Iterator[tuple[Record, Sample | None]]:
        """Yields the record and the sample of each response; the sample of a missing response is None."""
        for row, index in zip(map(as_list, self.rows), self.indices.tolist()):
            columns = {name: value for name, value in row.items() if name not in ROW}
            given = row.get("rewards")
            for k, (text, sample) in enumerate(zip(row["responses"], samples_of_row(row))):
                reward = {} if given is None else {"reward": None if text is None else given[k]}
                yield {**columns, "prompt": row["prompt"], "index": index, "response": text, **reward}, sample


def as_list(row: Record) -> Record:
    """The row of a file with its responses and rewards as lists."""
    if row.get("responses") is not None:
        return row
    return {**row, "responses": [row["response"]], "rewards": [row["reward"]] if "reward" in row else None}


class Lengths:
    """Lengths in words and truncation of the responses that there are."""

    def __init__(self) -> None:
        self.words, self.truncated = Mean(), 0

    def add(self, sample: Sample | None) -> None:
        """Add a response."""
        if sample is not None:
            self.words.add(len(sample.response.split()))
            self.truncated += sample.truncated

    def results(self) -> dict[str, float]:
        """Mean length, and the share of truncated responses where the file says it."""
        count = self.words.count
        means = {"mean_words": self.words.total / max(count, 1), "truncated_ratio": self.truncated / max(count, 1)}
        return {"responses": count, **means}


# ----------------------------------------------------------------------------------------------------------- rewards
class Scoring:
    """Rewards of records, part by part; without `rewards` those that the records have."""

    def __init__(self, rewards: Rewards | None) -> None:
        self.rewards, self.mean = rewards, Mean()
        self.parts = [Mean() for _ in rewards.names] if rewards else []
        self.failures: Counter[str] = Counter()

    def __call__(self, samples: Sequence[Sample | None], records: Sequence[Record]) -> list[Record]:
        """The records with `reward`. samples: None where a response is missing, which has no reward."""
        if self.rewards:
            scored = iter(self.rewards.parts([[sample] for sample in samples if sample is not None]))
            parts = [[math.nan] * len(self.parts) if sample is None else next(scored) for sample in samples]
            records = [{**record, "reward": self.rewards.total(row)} for record, row in zip(records, parts)]
            self.failures.update(self.rewards.failures)
            for row in parts:
                for mean, value in zip(self.parts, row):
                    mean.add(None if value is None or math.isnan(value) else value)
        for record in records:
            self.mean.add(record["reward"])
        return list(records)

    def results(self) -> dict[str, Any]:
        """Mean rewards, of each too where there are several, and the responses that one failed for."""
        found = self.mean.results("reward")
        if self.rewards and len(self.parts) > 1:
            for name, mean in zip(self.rewards.names, self.parts):
                found |= mean.results(f"reward/{name}")
        return found | {f"reward_{kind}": count for kind, count in self.failures.items() if count}


def mark_passed(records: Sequence[Record], ks: Sequence[int], threshold: float) -> list[Record]:
    """The records with `passed`; unchanged without ks."""
    if not ks:
        return list(records)
    return [{**r, "passed": r["reward"] is not None and r["reward"] >= threshold} for r in records]


def pass_rates(tally: Tally, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """pass@k over the prompts with a 95% interval for each k; each prompt has k responses."""
    results: dict[str, Any] = {}
    indices, passed = np.frombuffer(tally.indices, np.int64), np.frombuffer(tally.rewards) >= threshold
    _, first, prompts = np.unique(indices, return_index=True, return_inverse=True)
    counts, right = np.bincount(prompts).tolist(), np.bincount(prompts, passed).astype(int).tolist()
    groups = np.frombuffer(tally.prompts, np.uint64)[first]
    for k in ks:
        chances = [pass_at_k(count, won, k) for count, won in zip(counts, right)]
        results[f"pass@{k}"] = sum(chances) / len(chances)
        results[f"pass@{k}_interval"] = share_interval(chances, groups)
    return results


# --------------------------------------------------------------------------------------------------------- win rates
def win_rates(ours: Tally, others: Tally, seed: int) -> dict[str, Any]:
    """Win rates of responses over others to the same prompts, plain and at equal lengths, with 95% intervals.

    The higher score of `Tally.by` wins, the gold score or the reward; a pair without one does not count.
    seed: of the bootstrap of the prompts.
    """
    mine, its = np.frombuffer(ours.scores), np.frombuffer(others.scores)
    known = ~(np.isnan(mine) | np.isnan(its))
    if not known.any():
        return {}
    won = array("d", ((mine > its) + 0.5 * (mine == its))[known].tobytes())
    lengths = [array("q", np.frombuffer(side.words, np.int64)[known].tobytes()) for side in (ours, others)]
    prompts = np.frombuffer(ours.prompts, np.uint64)[known]
    controlled, controlled_interval = length_controlled_win_rate(won, lengths, prompts, seed)
    return {
        "win_rate": sum(won) / len(won),
        "win_rate_interval": share_interval(won, prompts),
        "length_controlled_win_rate": controlled,
        "length_controlled_win_rate_interval": controlled_interval,
    }
