"""GRPO: a whole update, from scores to weights, equals one written in float64 from the papers."""

import copy
import dataclasses
import math
from statistics import mean, pstdev, stdev

import pytest
import torch
from helpers import assert_same_gradients, rows_of, tiny_policy
from helpers.rollouts import scores_of
from helpers.updates import (
    RunOfSteps,
    changes,
    descend,
    exact,
    exact_entropy,
    exact_logprobs,
    numbers_in,
    sampled_by_others,
)

from lightrlhf.data.batch import Rollout
from lightrlhf.grpo import GRPOArgs, estimate_advantages, update
from lightrlhf.models.probes import enable_packing

GROUPS, SIZE, LONGEST, RATE = 4, 3, 6, 0.02
GROUP = [g for g in range(GROUPS) for _ in range(SIZE)]
PROMPT_ROWS = rows_of(6, 9, 3, 4)
PROMPTS = [PROMPT_ROWS[g] for g in GROUP]
RESPONSES = rows_of(5, 2, 6, 1, 6, 4, 3, 6, 2, 4, 1, 5)
SCORES = [1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0, 0.75, 0.0, 0.5, 0.0]  # row 4 has none
TRUNCATED = [False, False, True, False, False, False, False, True, False, False, False, False]


@dataclasses.dataclass
class Row:
    """A response, with a number for each of its tokens."""

    prompt: list[int]
    response: list[int]
    group: int
    score: float
    truncated: bool
    old: list[float]
    ref: list[float]
    correction: list[float]
    advantages: list[float] = dataclasses.field(default_factory=list)

    @property
    def kl(self) -> float:
        return sum(self.old) - sum(self.ref)


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy("llama")
    enable_packing(policy)
    return policy


@pytest.fixture(scope="module")
def sampled(policy) -> tuple[Rollout, torch.Tensor]:
    rollout, correction = sampled_by_others(policy, PROMPTS, RESPONSES, TRUNCATED, 0.7)
    return dataclasses.replace(rollout, group=torch.tensor(GROUP), num_groups=GROUPS), correction


def rows_in(sampled: tuple[Rollout, torch.Tensor]) -> list[Row]:
    given = zip(PROMPTS, RESPONSES, GROUP, SCORES, TRUNCATED)
    return [Row(*one, *numbers_in(*sampled, i)) for i, one in enumerate(given)]


# --------------------------------------------------------------------------------------------------------- the papers
def compared(name: str, score: float, group: list[float], others: list[float], everything: list[float]) -> float:
    """The advantage of a score among those of its group, of the others of the group, and of the rollout."""
    return {
        "std": (score - mean(group)) / (stdev(group) + 1e-6),
        "mean": score - mean(group),
        "batch_std": (score - mean(group)) / (stdev(everything) + 1e-6),
        "rloo": score - mean(others),
        "maxrl": (score - mean(group)) / (mean(group) + 1e-6),
        "none": score,
        "helpers.rewards:median_advantage": score - sorted(group)[(len(group) - 1) // 2],  # torch's, the lower of two
    }[name]


def set_advantages(args: GRPOArgs, rows: list[Row]) -> list[Row]:
    """Set the advantages of scored rows; returns those that are learned from."""
    scored = [row for row in rows if not math.isnan(row.score)]
    for row in scored:
        row.score -= args.missing_eos_penalty * row.truncated
        if args.overlong_buffer:  # DAPO, eq. 13
            over = (len(row.response) - (args.max_new_tokens - args.overlong_buffer)) / args.overlong_buffer
            row.score -= args.overlong_penalty * min(max(over, 0.0), 1.0)
    beta = args.init_kl_coeff if args.kl_placement == "reward" else 0.0
    everything = [row.score for row in scored]
    for row in scored:
        group = [other for other in scored if other.group == row.group]
        scores, others = [one.score for one in group], [one for one in group if one is not row]
        advantage = compared(args.advantage, row.score, scores, [one.score for one in others], everything)
        if args.advantage == "none":  # the reward to go
            penalties = [beta * (old - ref) for old, ref in zip(row.old, row.ref)]
            row.advantages = [advantage - sum(penalties[t:]) for t in range(len(penalties))]
        else:
            advantage -= beta * (row.kl - mean(one.kl for one in (others if args.advantage == "rloo" else group)))
            row.advantages = [advantage] * len(row.response)
    if args.normalize_advantages:
        tokens = [value for row in scored for value in row.advantages]
        for row in scored:
            row.advantages = [(value - mean(tokens)) / pstdev(tokens) for value in row.advantages]
    return [row for row in scored if not (args.overlong_filter and row.truncated)]


def token_loss(args: GRPOArgs, new, ratio, advantage: float):
    """The loss of a token with the log-probability `new` and this ratio, or its response's."""
    low, high = 1 - args.clip_coeff, 1 + (args.clip_coeff_high or args.clip_coeff)
    if args.loss_type == "clip":
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        return loss.clamp(max=-args.dual_clip * advantage) if args.dual_clip and advantage < 0 else loss
    if args.loss_type == "cispo":
        return -ratio.detach().clamp(low, high) * advantage * new
    if args.loss_type == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    return -advantage * new


def loss_of(args: GRPOArgs, policy, rows: list[Row]):
    """The loss of a mini-batch, a sum over rows and tokens."""
    num_tokens, total = sum(len(row.response) for row in rows), 0.0
    prompts = {row.group: sum(len(one.response) for one in rows if one.group == row.group) for row in rows}
    for row in rows:
        new = exact_logprobs(policy, row.prompt, row.response, args.temperature)
        entropy = exact_entropy(policy, row.prompt, row.response, args.temperature)
        ratios = (new - torch.tensor(row.old, dtype=torch.float64)).exp()
        whole = ratios.log().mean().exp()  # GSPO, eq. 7
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(rows) * len(row.response)),
            "sum": 1 / len(rows),
            "constant": 1 / (len(rows) * args.max_new_tokens),
            "prompt": 1 / (len(prompts) * prompts[row.group]),
        }[args.aggregation]
        for t in range(len(row.response)):
            ratio = whole if args.importance_sampling_level == "sequence" else ratios[t]
            loss = token_loss(args, new[t], ratio, row.advantages[t])
            if args.kl_placement == "loss":  # the token's own ratio, whatever that of the loss
                loss = loss + args.init_kl_coeff * ratios[t].detach() * (new[t] - row.ref[t]) ** 2 / 2
            total = total + weight * (row.correction[t] * loss - args.entropy_coeff * entropy[t])
    return total


def expected_policy(args: GRPOArgs, policy, sampled: tuple, run: RunOfSteps, step: int):
    """The policy after the update, in float64."""
    policy, rows = exact(policy), set_advantages(args, rows_in(sampled))
    count = GROUPS * SIZE // args.mini_batch_size
    for epoch in range(args.ppo_epochs):
        place = torch.randperm(GROUPS, generator=run.ranks.generator(step, epoch, -2)).tolist()
        for number in range(count):  # whole groups
            members = [g for g in range(GROUPS) if place[g] * count // GROUPS == number]
            loss_of(args, policy, [row for row in rows if row.group in members]).backward()
            descend(policy, run.rate)
    return policy


KL = {"init_kl_coeff": 0.3}
SETTINGS = [
    {},
    {"advantage": "rloo", **KL, "missing_eos_penalty": 0.5, "aggregation": "sequence", "ppo_epochs": 2},
    {"advantage": "mean", **KL, "kl_placement": "loss", "aggregation": "sum"},
    {
        **KL,
        "kl_placement": "loss",
        "importance_sampling_level": "sequence",
        "clip_coeff": 0.02,
        "aggregation": "prompt",
    },
    {**KL, "overlong_filter": True, "aggregation": "constant"},
    {"advantage": "none", "normalize_advantages": True, **KL, "loss_type": "reinforce"},
    {"advantage": "batch_std", "loss_type": "cispo", "overlong_buffer": 3, "overlong_penalty": 2.0, "ppo_epochs": 2},
    {"advantage": "maxrl", "loss_type": "sapo", "mini_batch_size": 12},
    {"advantage": "mean", "normalize_advantages": True, **KL, "dual_clip": 1.1, "clip_coeff_high": 0.05},
    {"entropy_coeff": 0.3, "aggregation": "sequence", "overlong_filter": True},
    {"advantage": "helpers.rewards:median_advantage", **KL, "entropy_coeff": 0.1, "ppo_epochs": 2},
]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_an_update_equals_one_in_float64(given, policy, sampled):
    sizes = {"num_generations": SIZE, "rollout_size": GROUPS, "mini_batch_size": 6, "micro_batch_size": 3}
    paths = {"data_dir": "x", "model_name": "tiny", "reward_function": ["x:y"]}
    args = GRPOArgs(**(paths | sizes | {"max_new_tokens": LONGEST, "temperature": 0.7} | given))
    trained, step = copy.deepcopy(policy), 5
    run = RunOfSteps(args, RATE, policy=trained)
    scores = scores_of(SCORES)
    rollout, correction = sampled
    batch = estimate_advantages(args, rollout, scores, correction)
    update(run, trained, batch, args.load_loss(), step)
    expected = changes(policy, expected_policy(args, policy, sampled, run, step), RATE)
    # a weight near 1 is stored to 6e-8, which the rate makes 3e-6 in each of up to 4 steps
    assert_same_gradients(expected, changes(policy, trained, RATE), atol=1.5e-5)
