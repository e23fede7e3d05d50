"""Rewards of responses, sampled or read from a file, and what follows from them: pass@k and win rates.

A record is a response with the `index` of its prompt, one of several where a prompt has several. A response without a
reward is in no mean and no win rate, as in training; for pass@k it has not passed.

Left out: rewards given from Python, and responses scored by how often they beat the others of their prompt
(`lightrlhf.annotate` has both).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag
from lightrlhf.cli.groups import RewardArgs
from lightrlhf.data.responses import ROW, read_responses
from lightrlhf.evaluation.matching import prompt_hash
from lightrlhf.maths.length_control import length_controlled_win_rate
from lightrlhf.maths.ops import share_interval
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


# ------------------------------------------------------------------------------------------------------------ a file
def read_records(path: str, num_rows: int | None = None) -> tuple[list[Record], list[Sample | None]]:
    """Records of the rows of a file of responses, and a sample of each; the sample of a missing response is None.

    A row has a `prompt` and a list `responses`, or one `response`; `rewards` or `reward` are kept. Rows with the same
    `index` and prompt are of one prompt, any other row is another prompt.
    Raises: UsageError naming file, row and column.
    """
    records: list[Record] = []
    samples: list[Sample | None] = []
    prompts: dict[tuple[Any, str], int] = {}
    for number, row in enumerate(read_responses(path, ["prompt"], OPTIONAL)[:num_rows], start=1):
        if row.get("responses") is None:
            if "response" not in row:
                raise UsageError(f"{path}: row {number} has neither 'responses' nor 'response'")
            row = {**row, "responses": [row["response"]], "rewards": [row["reward"]] if "reward" in row else None}
        own = row.get("index")
        key = (own, json.dumps(row["prompt"])) if own is not None else (f"row {number}", "")
        shared = {"prompt": row["prompt"], "index": prompts.setdefault(key, len(prompts))}
        columns = {name: value for name, value in row.items() if name not in ROW}
        given = row.get("rewards")
        for k, text in enumerate(row["responses"]):
            reward = {} if given is None else {"reward": None if text is None else given[k]}
            records.append({**columns, **shared, "response": text, **reward})
        samples += samples_of_row(row)
    return records, samples


def check_same_prompts(records: Sequence[Record], others: Sequence[Record], path: str, other: str) -> None:
    """Raises: UsageError unless two files have responses to the same prompts, as many, in the same order."""
    if len(records) != len(others):
        raise UsageError(f"--responses_file {path} has {len(records)} responses, {other} {len(others)}: give as many")
    for number, (one, two) in enumerate(zip(records, others), start=1):
        if one["prompt"] != two["prompt"]:
            raise UsageError(
                f"--responses_file {path}: response {number} has another prompt than in {other}, "
                f"{as_text(one['prompt'])[:40]!r}; sort both alike, or compare them by lightrlhf.judge"
            )


def describe(samples: Sequence[Sample | None]) -> dict[str, float]:
    """Mean length in words of the responses that there are, and the share of truncated ones where the file says it."""
    given = [sample for sample in samples if sample is not None]
    words = [len(sample.response.split()) for sample in given]
    return {
        "responses": len(given),
        "mean_words": sum(words) / max(len(words), 1),
        "truncated_ratio": sum(sample.truncated for sample in given) / max(len(given), 1),
    }


# ----------------------------------------------------------------------------------------------------------- rewards
def score_records(
    rewards: Rewards, samples: Sequence[Sample | None], records: Sequence[Record]
) -> tuple[dict[str, Any], list[Record]]:
    """Mean rewards, of each too where there are several, and the responses that one failed for; records with `reward`.

    samples: of the records, None where a response is missing, which has no reward.
    """
    scored = iter(rewards.parts([[sample] for sample in samples if sample is not None]))
    parts = [[math.nan] * len(rewards.names) if sample is None else next(scored) for sample in samples]
    records = [{**record, "reward": rewards.total(row)} for record, row in zip(records, parts)]
    results = mean_reward(records)
    if len(rewards.names) > 1:
        for name, column in zip(rewards.names, zip(*parts)):
            results |= mean_of(f"reward/{name}", [None if v is None or math.isnan(v) else v for v in column])
    return results | {f"reward_{kind}": count for kind, count in rewards.failures.items() if count}, records


def mean_reward(records: Sequence[Record]) -> dict[str, Any]:
    """Mean of the records' `reward`."""
    return mean_of("reward", [record["reward"] for record in records])


def mean_of(name: str, scores: Sequence[float | None]) -> dict[str, Any]:
    """The mean of the scores that there are, and the number of responses without one where there are some."""
    valid = [score for score in scores if score is not None]
    missing = len(scores) - len(valid)
    return ({name: sum(valid) / len(valid)} if valid else {}) | ({f"{name}_missing": missing} if missing else {})


def pass_rates(records: list[Record], ks: Sequence[int], threshold: float) -> tuple[dict[str, Any], list[Record]]:
    """pass@k over the prompts with a 95% interval for each k, and the records with `passed`; unchanged without ks.

    Raises: UsageError when a prompt has fewer than k responses.
    """
    if not ks:
        return {}, records
    records = [{**r, "passed": r["reward"] is not None and r["reward"] >= threshold} for r in records]
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record["index"], []).append(record)
    results: dict[str, Any] = {}
    for k in ks:
        few = next((group for group in groups.values() if len(group) < k), None)
        if few is not None:
            start = as_text(few[0]["prompt"])[:40]
            raise UsageError(f"--pass_k {k} needs {k} responses to each prompt; {start!r} has {len(few)}")
        chances = [pass_at_k(len(group), sum(one["passed"] for one in group), k) for group in groups.values()]
        texts = [json.dumps(group[0]["prompt"]) for group in groups.values()]
        results[f"pass@{k}"] = sum(chances) / len(chances)
        results[f"pass@{k}_interval"] = share_interval(chances, texts)
    return results, records


# --------------------------------------------------------------------------------------------------------- win rates
def win_rates(records: Sequence[Record], others: Sequence[Record], by: str, seed: int) -> dict[str, Any]:
    """Win rates of records over others of the same prompts, plain and at equal lengths, with 95% intervals.

    by: what decides, the gold score (`gold`) or the `reward`, the higher one wins; a pair without one does not count.
    seed: of the bootstrap of the prompts.
    """
    won, lengths, prompts = array("d"), [array("q"), array("q")], array("Q")
    for one, other in zip(records, others):
        mine, its = (side["gold"]["score"] if by == "gold" else side["reward"] for side in (one, other))
        if mine is None or its is None or math.isnan(mine) or math.isnan(its):
            continue
        won.append(float(mine > its) + 0.5 * (mine == its))
        for side, words in zip((one, other), lengths):
            words.append(len(side["response"].split()))
        prompts.append(prompt_hash(one))
    if not won:
        return {}
    controlled, controlled_interval = length_controlled_win_rate(won, lengths, prompts, seed)
    return {
        "win_rate": sum(won) / len(won),
        "win_rate_interval": share_interval(won, prompts),
        "length_controlled_win_rate": controlled,
        "length_controlled_win_rate_interval": controlled_interval,
    }
