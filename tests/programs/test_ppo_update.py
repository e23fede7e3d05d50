"""PPO: a whole update, from scores to weights of actor and critic, equals one written in float64 from the papers."""

import copy
import dataclasses
import math
from statistics import mean, pstdev

import pytest
import torch
from helpers import assert_same_gradients, rows_of, tiny_policy, tiny_scalar
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
from lightrlhf.models.probes import enable_packing
from lightrlhf.ppo import PPOArgs, bound_scores, estimate_advantages, predict_values, segment_responses, update
from lightrlhf.rewards.kl import token_rewards

RATE, STEP = 0.02, 5
PROMPTS = rows_of(6, 9, 3, 4, 1, 5)
RESPONSES = rows_of(5, 2, 6, 3, 7, 4)
SCORES = [1.0, -9.0, 0.5, math.nan, 2.0, -0.5]  # one beyond the clip range, one not scored
TRUNCATED = [False, False, True, False, True, False]


@dataclasses.dataclass
class Row:
    """A response, with a number for each of its tokens."""

    prompt: list[int]
    response: list[int]
    score: float
    truncated: bool
    old: list[float]
    ref: list[float]
    correction: list[float]
    values: list[float] = dataclasses.field(default_factory=list)
    advantages: list[float] = dataclasses.field(default_factory=list)
    returns: list[float] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def roles():
    actor, critic = tiny_policy("llama"), tiny_scalar("llama")
    enable_packing(actor)
    enable_packing(critic)
    return actor, critic


@pytest.fixture(scope="module")
def sampled(roles) -> tuple[Rollout, torch.Tensor]:
    return sampled_by_others(roles[0], PROMPTS, RESPONSES, TRUNCATED, 0.7)


# --------------------------------------------------------------------------------------------------------- the papers
def exact_values(critic, row: Row):
    """The value of the state that each token of a response was sampled in: (tokens,)."""
    hidden = critic.model.base_model(torch.tensor([row.prompt + row.response]), use_cache=False).last_hidden_state
    return critic.model.score(hidden)[0, len(row.prompt) - 1 : -1, 0]


def set_advantages(args: PPOArgs, rows: list[Row], critic) -> None:
    """GAE over segments of `ngram` tokens: Schulman et al. 2016, eq. 11-16; Chai et al. 2025, section 3."""
    for row in rows:
        with torch.no_grad():
            row.values = exact_values(critic, row).tolist()
        penalty = args.missing_eos_penalty * row.truncated
        score = min(max(row.score, -args.reward_clip_value), args.reward_clip_value) - penalty
        logs = [old - ref for old, ref in zip(row.old, row.ref)]
        kl = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}[args.kl_estimator]
        rewards = [-args.init_kl_coeff * kl(x) for x in logs]
        rewards[-1] += score
        count = len(rewards)
        parts = [range(i, min(i + args.ngram, count)) for i in range(0, count, args.ngram)]
        values = [mean(row.values[t] for t in part) for part in parts] + [0.0]
        row.advantages, row.returns, advantage = [0.0] * count, [0.0] * count, 0.0
        for j, part in reversed(list(enumerate(parts))):
            reward = sum(args.gae_gamma**i * rewards[t] for i, t in enumerate(part))
            delta = reward + args.gae_gamma * values[j + 1] - values[j]
            advantage = delta + args.gae_gamma * args.gae_lambd * advantage
            for t in part:
                row.advantages[t], row.returns[t] = advantage, advantage + values[j]
    if args.normalize_advantages:
        tokens = [value for row in rows for value in row.advantages]
        for row in rows:
            row.advantages = [(value - mean(tokens)) / pstdev(tokens) for value in row.advantages]


def loss_of(args: PPOArgs, actor, critic, rows: list[Row]):
    """Both losses of a mini-batch (Schulman et al. 2017, eq. 7), and the mean of rho - 1 - log rho."""
    policy_loss, value_loss, kl, count = 0.0, 0.0, 0.0, sum(len(row.response) for row in rows)
    bounds = 1 - args.clip_coeff, 1 + args.clip_coeff
    for row in rows:
        entropy = exact_entropy(actor, row.prompt, row.response, args.temperature)
        new, values = exact_logprobs(actor, row.prompt, row.response, args.temperature), exact_values(critic, row)
        for t in range(len(row.response)):
            ratio, advantage = (new[t] - row.old[t]).exp(), row.advantages[t]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(*bounds) * advantage)
            policy_loss = policy_loss - row.correction[t] * surrogate - args.entropy_coeff * entropy[t]
            near = row.values[t] + (values[t] - row.values[t]).clamp(-args.clip_coeff, args.clip_coeff)
            errors = (values[t] - row.returns[t]) ** 2, (near - row.returns[t]) ** 2
            value_loss = value_loss + torch.maximum(*errors) / 2
            kl += (ratio - 1 - ratio.log()).item()
    return policy_loss / count, args.vf_coeff * value_loss / count, kl / count


def expected_roles(args: PPOArgs, roles, sampled: tuple, run: RunOfSteps) -> tuple:
    """Actor and critic after the update, in float64, and how many steps it had."""
    actor, critic = map(exact, roles)
    given = zip(PROMPTS, RESPONSES, SCORES, TRUNCATED)
    rows = [Row(*one, *numbers_in(*sampled, i)) for i, one in enumerate(given)]
    scored = [row for row in rows if not math.isnan(row.score)]
    set_advantages(args, scored, critic)
    steps = 0
    for epoch in range(args.ppo_epochs):
        order = torch.randperm(len(rows), generator=run.ranks.generator(STEP, epoch)).tolist()
        for start in range(0, len(rows), args.mini_batch_size):
            members = [rows[i] for i in order[start : start + args.mini_batch_size]]
            *losses, kl = loss_of(args, actor, critic, [row for row in members if row in scored])
            for loss, role in zip(losses, (actor, critic)):
                loss.backward()
                descend(role, run.rate)
            steps += 1
            if args.max_kl is not None and kl > args.max_kl:
                return actor, critic, steps
    return actor, critic, steps


SETTINGS = [
    {},
    {"mini_batch_size": 3, "ppo_epochs": 2, "gae_gamma": 0.9, "gae_lambd": 0.8, "kl_estimator": "k2"},
    {"ngram": 2, "gae_gamma": 0.9, "gae_lambd": 0.8, "missing_eos_penalty": 0.5, "vf_coeff": 0.5},
    {"entropy_coeff": 0.05, "normalize_advantages": False, "reward_clip_value": 1.5, "kl_estimator": "k3"},
    {"mini_batch_size": 2, "micro_batch_size": 2, "ppo_epochs": 3, "max_kl": 0.024, "init_kl_coeff": 0.5},
]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_an_update_equals_one_in_float64(given, roles, sampled):
    sizes = {"rollout_size": 6, "mini_batch_size": 6, "micro_batch_size": 3, "max_new_tokens": 7, "temperature": 0.7}
    args = PPOArgs(**({"data_dir": "x", "model_name": "tiny", "reward_function": ["x:y"]} | sizes | given))
    actor, critic = map(copy.deepcopy, roles)
    run = RunOfSteps(args, RATE, policy=actor, critic=critic)
    scores = scores_of(SCORES)
    rollout, correction = sampled
    total = bound_scores(args, rollout, scores)[0].total
    scored = rollout.masked(~total.isnan())
    rewards = token_rewards(scored, total, args.init_kl_coeff, args.kl_estimator)
    segments, _ = segment_responses(args, scored, torch.zeros(6, 4), None)
    batch = estimate_advantages(args, scored, rewards, predict_values(critic, scored, 4), segments, correction)
    steps = update(run, actor, critic, batch, STEP)["policy/updates"]
    *expected, expected_steps = expected_roles(args, roles, sampled, run)
    assert steps == expected_steps and (steps < args.ppo_epochs * 6 / args.mini_batch_size) == (args.max_kl is not None)
    for before, after, reference in zip(roles, (actor, critic), expected):
        assert_same_gradients(changes(before, reference, RATE), changes(before, after, RATE), atol=1e-5)
