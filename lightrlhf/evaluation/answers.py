"""Responses of a language model to the rows of a split, and what is measured of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import DecodingArgs, SamplingArgs
from lightrlhf.data.batch import Rollout, finetune_batch, micro_batches, seeded_noise
from lightrlhf.data.splits import Row, check_vocabulary, first_answer
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.models.forward import device_of
from lightrlhf.models.roles import Policy, policy_inputs, vocabulary_size


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


@torch.no_grad()
def perplexity(policy: Policy, rows: list[Row], pad_id: int, batch_size: int) -> float:
    """exp of the mean cross-entropy of the rows' response tokens, each token counting once."""
    total, count = 0.0, 0
    for micro in micro_batches(rows, batch_size):
        batch = finetune_batch(micro, pad_id, use_targets=True).to(device_of(policy))
        total -= float(policy(**policy_inputs(batch)).logprobs.sum())
        count += batch.num_actions
    return math.exp(min(total / max(count, 1), 50.0))


def rouge(
    args: DecodingArgs, policy: Policy, rows: list[Row], tokenizer: Tokenizer, seed: int, batch_size: int
) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F1, torchmetrics) of responses against the demonstrations."""
    from torchmetrics.text.rouge import ROUGEScore

    prompts = [{"input_ids": row["input_ids"][: row["prompt_len"]]} for row in rows]
    rollout = respond(args, policy, policy, prompts, tokenizer, seed, batch_size)
    responses = [response for _, response in rollout.texts]
    demonstrations = [decode(tokenizer, row["input_ids"][row["prompt_len"] : first_answer(row)]) for row in rows]
    scores = ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL"))(responses, demonstrations)
    return {key: float(scores[f"{key}_fmeasure"]) for key in ("rouge1", "rouge2", "rougeL")}


def judge_records(judge: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the verdict of the data's judge under `gold`: a dict with `score` and its parts."""
    function = load_function(judge, "the judge of the data")
    prompts, responses = ([record[key] for record in records] for key in ("prompt", "response"))
    return [{**record, "gold": verdict} for record, verdict in zip(records, function(prompts, responses))]
