"""Online preference learning: an update, from responses to weights, equals one written in float64 from the papers."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from helpers import CPU, assert_same_gradients, last_checkpoint
from helpers.updates import changes, descend, exact, exact_logprobs

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_prompts
from lightrlhf.data.tokens import decode, encode_response
from lightrlhf.models.loading import load_policy
from lightrlhf.online_dpo import OnlineDPOArgs, learn, score_and_choose
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.training.iterated import Iteration

RATE = 0.05
EPS = 1e6  # so large that a first step of Adam is one of gradient descent
PLAIN = ["--optimizer_eps", EPS, "--learning_rate", RATE * EPS, "--gradient_clip_val", "0", "--lr_warmup_steps", "0"]
SIZES = ["--num_generations", "4", "--mini_batch_size", "6", "--micro_batch_size", "2", "--epochs", "1", *CPU]
TEXTS = [  # four responses to each prompt, no text twice, and their rewards; the last of a row was cut
    (["a warm tea", "tea", "the soup is good today", "we have"], [1.0, 3.0, 2.5, -1.0]),
    (
        ["no", "yes the tea", "a table for two", "the soup of today"],
        [0.5, 0.5, 0.5, 0.5],
    ),  # equal: neither best nor worst
    (["good", "the tea is warm", "two", "a table"], [math.nan, 2.0, math.nan, math.nan]),  # one is scored
    (["the soup", "two soups", "warm", "today the tea is"], [0.0, math.nan, 1.0, 1.25]),
    (["tea for two", "no tea", "yes the soup is warm", "good tea"], [-2.0, -1.0, 0.25, -3.0]),
]


@dataclasses.dataclass
class Response:
    """A scored response."""

    prompt: list[int]
    ids: list[int]
    reward: float


@pytest.fixture(scope="module")
def initial(base_model, tokenizer, tmp_path_factory) -> str:
    return with_tokenizer(base_model, tokenizer, tmp_path_factory.mktemp("initial"), 0.0)


@pytest.fixture(scope="module")
def policy(base_model, tokenizer, tmp_path_factory) -> str:
    """Other weights than the initial policy's."""
    return with_tokenizer(base_model, tokenizer, tmp_path_factory.mktemp("policy"), 0.02)


def with_tokenizer(base_model, tokenizer, folder: Path, noise: float) -> str:
    model = load_policy(str(base_model), ModelArgs(), tokenizer).model
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_responses(folder: Path, cafe_data, tokenizer) -> list[list[Response]]:
    """Write `responses.jsonl` of an iteration; returns what was scored, by prompt."""
    rows, groups = [], []
    for row, (texts, rewards) in zip(load_prompts(cafe_data, "train"), TEXTS):
        prompt = row["input_ids"].tolist()
        ids = [encode_response(tokenizer, text, "") for text in texts]
        ids[-1] = ids[-1][:-1]
        rows.append({"prompt": decode(tokenizer, prompt), "prompt_ids": prompt, "responses": texts})
        rows[-1] |= {"response_ids": ids, "truncated": [False, False, False, True]}
        scored = [Response(prompt, *one) for one in zip(ids, rewards)]
        groups.append([one for one in scored if not math.isnan(one.reward)])
    write_jsonl(folder / "responses.jsonl", rows)
    return groups


def given_rewards(prompts, completions, **columns) -> list[float]:
    known = {text: reward for texts, rewards in TEXTS for text, reward in zip(texts, rewards)}
    return [known[text] for text in completions]


# --------------------------------------------------------------------------------------------------------- the papers
def pair_of(args: OnlineDPOArgs, group: list[Response]) -> tuple[Response, Response] | None:
    """The better and the worse response that are compared; None of equal ones."""
    penalty = args.length_penalty if args.choose_type == "max_min_p" else 0.0
    ordered = sorted((one.reward - penalty * len(one.ids), number) for number, one in enumerate(group))
    if len(ordered) < 2:
        return None
    (best, first), (worst, last) = ordered[-1], ordered[-2 if args.choose_type == "max_max" else 0]
    return (group[first], group[last]) if best > worst else None


def preference_loss(args: OnlineDPOArgs, policy, reference, groups: list[list[Response]]):
    """Rafailov et al. 2023, eq. 7, with smoothed labels; or IPO, Azar et al. 2023, eq. 17, per token."""
    pairs = [pair for group in groups if (pair := pair_of(args, group))]
    total = 0.0
    for pair in pairs:
        ratios = []
        for one in pair:
            with torch.no_grad():
                ref = exact_logprobs(reference, one.prompt, one.ids).sum()
            ratios.append(exact_logprobs(policy, one.prompt, one.ids).sum() - ref)
        if args.loss_type == "ipo":
            chosen, rejected = (ratio / len(one.ids) for ratio, one in zip(ratios, pair))
            loss = (chosen - rejected - 1 / (2 * args.beta)) ** 2
        else:
            gap, smoothing = args.beta * (ratios[0] - ratios[1]), args.label_smoothing
            loss = -(1 - smoothing) * torch.sigmoid(gap).log() - smoothing * torch.sigmoid(-gap).log()
        total = total + loss
    return total / len(pairs)


def best_of_loss(policy, groups: list[list[Response]]):
    """RAFT, Dong et al. 2023, section 3: cross-entropy of the best response, where there is one."""
    best = [max(group, key=lambda one: one.reward) for group in groups if len({one.reward for one in group}) > 1]
    return -sum(exact_logprobs(policy, one.prompt, one.ids).sum() for one in best) / sum(len(one.ids) for one in best)


SETTINGS = [
    ["--beta", "0.5"],
    ["--choose_type", "max_min_p", "--length_penalty", "0.6", "--label_smoothing", "0.1"],
    ["--choose_type", "max_max", "--loss_type", "ipo", "--beta", "0.5"],
    ["--reference", "moving", "--beta", "0.5"],
    ["--training_step", "raft"],
]


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: " ".join(given))
def test_an_update_equals_one_in_float64(given, initial, policy, cafe_data, tokenizer, tmp_path):
    flags = ["--data_dir", cafe_data, "--sft_experiment_dir", initial, *SIZES, *PLAIN]
    args = parse(OnlineDPOArgs, [*map(str, flags), *given])
    groups = write_responses(tmp_path, cafe_data, tokenizer)
    iteration = Iteration(args, 1, tmp_path, policy, initial, str(cafe_data), tokenizer)
    score_and_choose(iteration, given_rewards)
    learn(iteration)
    before, trained, first = (
        load_policy(str(folder), ModelArgs(), tokenizer)
        for folder in (policy, last_checkpoint(tmp_path / "policy"), initial)
    )
    expected = exact(before)
    if args.training_step == "raft":
        loss = best_of_loss(expected, groups)
    else:
        reference = exact(before if args.reference == "moving" else first)
        loss = preference_loss(args, expected, reference, groups)
    loss.backward()
    descend(expected, RATE)
    assert_same_gradients(changes(before, expected, RATE), changes(before, trained, RATE), atol=1e-5)
