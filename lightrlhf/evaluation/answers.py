"""Responses of a language model to the rows of a split, and what is measured of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import DecodingArgs, SamplingArgs
from lightrlhf.data.batch import Rollout, finetune_batch, micro_batches, seeded_noise
from lightrlhf.data.flat import View
from lightrlhf.data.splits import Row, check_vocabulary, first_answer, prompt_row
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation.responses import Mean
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.models.forward import device_of
from lightrlhf.models.roles import Policy, policy_inputs, vocabulary_size
from lightrlhf.rewards.scorers import finite

PART = 1024  # responses in memory at a time, enough to fill the slots of an engine


def respond(
    args: SamplingArgs,
    policy: Policy,
    reference: Policy,
    rows: list[Row],
    tokenizer: Tokenizer,
    seed: int,
    batch_size: int,
) -> Rollout:
    """One response per row; the noise depends on the seed alone, so that all models are compared on the same draw."""
    check_vocabulary(rows, vocabulary_size(policy), "the prompts")
    noise = seeded_noise(seed, len(rows), args.max_new_tokens)
    return generate_rollout(policy, reference, rows, args, tokenizer, noise, batch_size)


def respond_in_parts(
    args: SamplingArgs,
    policy: Policy,
    reference: Policy,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    seed: int,
    batch_size: int,
    repeats: int = 1,
) -> Iterator[tuple[Sequence[Row], Rollout]]:
    """Yields some rows and `repeats` responses to each, in order, until all have them; the noise is as of `respond`."""
    check_vocabulary(rows, vocabulary_size(policy), "the prompts")
    generator, size = torch.Generator().manual_seed(seed), max(1, PART // repeats)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        prompts = [row for row in part for _ in range(repeats)]
        noise = torch.rand(len(prompts), args.max_new_tokens, generator=generator)
        yield part, generate_rollout(policy, reference, prompts, args, tokenizer, noise, batch_size)


@torch.no_grad()
def perplexity(policy: Policy, rows: list[Row], pad_id: int, batch_size: int) -> float:
    """exp of the mean cross-entropy of the rows' response tokens, each token counting once."""
    sums: list[torch.Tensor] = []
    count = 0
    for micro in micro_batches(rows, batch_size):
        batch = finetune_batch(micro, pad_id, use_targets=True).to(device_of(policy))
        sums.append(policy(**policy_inputs(batch)).logprobs.sum())
        count += batch.num_actions
    total = -sum(torch.stack(sums).tolist()) if sums else 0.0
    return math.exp(min(total / max(count, 1), 50.0))


def rouge(
    args: DecodingArgs, policy: Policy, rows: Sequence[Row], tokenizer: Tokenizer, seed: int, batch_size: int
) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F1, torchmetrics) of responses against the demonstrations."""
    from torchmetrics.functional.text.rouge import rouge_score

    keys = ("rouge1", "rouge2", "rougeL")
    totals = dict.fromkeys(keys, 0.0)
    prompts = View([rows], change=prompt_row, key="prompts")
    place = 0
    for _, rollout in respond_in_parts(args, policy, policy, prompts, tokenizer, seed, batch_size):
        responses = [response for _, response in rollout.texts]
        part = rows[place : place + len(responses)]
        demonstrations = [decode(tokenizer, row["input_ids"][row["prompt_len"] : first_answer(row)]) for row in part]
        scores = rouge_score(responses, demonstrations, rouge_keys=keys)
        for key in keys:
            totals[key] += float(scores[f"{key}_fmeasure"]) * len(part)
        place += len(part)
    return {key: total / len(rows) for key, total in totals.items()}


def judge_records(judge: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the verdict of the data's judge under `gold`: a dict with `score` and its parts."""
    function = load_function(judge, "the judge of the data")
    prompts, responses = ([record[key] for record in records] for key in ("prompt", "response"))
    return [{**record, "gold": verdict} for record, verdict in zip(records, function(prompts, responses))]


class GoldMeans:
    """Means of the judge's score and its parts."""

    def __init__(self) -> None:
        self.score, self.parts, self.count = Mean(), dict[str, float](), 0

    def add(self, records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Add records with their verdicts under `gold`; returns them."""
        for record in records:
            self.score.add(finite(float(record["gold"]["score"])))
            for name, value in record["gold"].items():
                if name != "score":
                    self.parts[name] = self.parts.get(name, 0) + value
        self.count += len(records)
        return records

    def results(self) -> dict[str, Any]:
        """The mean score as `gold`, and the mean of each part."""
        return self.score.results("gold") | {name: total / self.count for name, total in self.parts.items()}
