"""A teacher beside a reward: the gradient of GRPO and PPO is theirs plus the weighted one of distillation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import RunOfOneStep, assert_same_gradients, metrics, rows_of, tiny_policy, tiny_scalar
from helpers.errors import error_naming
from helpers.rollouts import rollout_of, scores_of

from lightrlhf import distill, grpo, ppo
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.distill import DistillArgs
from lightrlhf.grpo import GRPOArgs
from lightrlhf.models.probes import enable_packing
from lightrlhf.ppo import PPOArgs
from lightrlhf.teachers.lesson import TaughtBatch, teach
from lightrlhf.teachers.teacher import SIBLING, add_siblings, seen_by_teacher, with_hint

PROMPT_ROWS = rows_of(6, 9)
PROMPTS = [PROMPT_ROWS[g] for g in (0, 0, 0, 1, 1, 1)]
RESPONSES = rows_of(5, 2, 6, 1, 4, 3)
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
SIZES = {"max_new_tokens": 6, "rollout_size": 2, "mini_batch_size": 6, "micro_batch_size": 3, "model_name": "tiny"}
SIZES |= {"data_dir": "x"}
BESIDE = SIZES | {"reward_function": ["x:y"]}
COEFF = 0.7
TAUGHT = {"teacher_coeff": COEFF}


@pytest.fixture(scope="module")
def student():
    policy = tiny_policy("llama")
    enable_packing(policy)
    return policy


@pytest.fixture(scope="module")
def teacher():
    policy = tiny_policy("llama").requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    return policy


@pytest.fixture(scope="module")
def rollout(student):
    """Of somewhat other weights than the student's, so that ratios are not 1."""
    torch.manual_seed(3)
    rollout = dataclasses.replace(rollout_of(PROMPTS, RESPONSES), group=GROUP, num_groups=2)
    inputs = {"attention_mask": rollout.attention_mask, "action_mask": rollout.action_mask}
    with torch.no_grad():
        own = student(input_ids=rollout.input_ids, **inputs).logprobs
    noise = 0.1 * torch.randn(own.shape)
    return dataclasses.replace(rollout, logprobs=torch.where(rollout.action_mask, own + noise, 0.0))


def gradients_of_distillation(student, teacher, rollout, across: bool, **changes):
    args = DistillArgs(**(SIZES | {"num_generations": 3, "teacher": "y"} | changes))
    run, learned = RunOfOneStep(args, policy=student), rollout.extend(TaughtBatch)
    distill.update_minibatch(run, student, teach(run, student, teacher, rollout, learned, across), learned)
    return run.gradients["policy"]


def gradients_of_grpo(student, teacher, rollout, scores, **changes):
    args = GRPOArgs(**(BESIDE | {"num_generations": 3, "loss_type": "reinforce"} | changes))
    run, batch = RunOfOneStep(args, policy=student), grpo.estimate_advantages(args, rollout, scores_of(scores))
    lesson = teach(run, student, teacher, rollout, batch) if args.has_teacher else None
    found = grpo.update_minibatch(run, student, batch, args.load_loss(), lesson)
    assert ("teacher/kl" in found) == args.has_teacher
    return run.gradients["policy"]


def gradients_of_ppo(student, teacher, rollout, scores, **changes):
    args = PPOArgs(**(BESIDE | {"rollout_size": 6} | changes))
    critic = tiny_scalar("llama")
    run = RunOfOneStep(args, policy=student, critic=critic)
    by_token = torch.where(rollout.action_mask, torch.tensor(scores).nan_to_num()[:, None], 0.0)
    segments = torch.where(rollout.action_mask, rollout.action_mask.long().cumsum(1) - 1, -1)
    batch = ppo.estimate_advantages(args, rollout, by_token, torch.zeros_like(by_token), segments)
    lesson = teach(run, student, teacher, rollout, batch, across=True) if args.has_teacher else None
    ppo.update_minibatch(run, student, critic, batch, lesson)
    return run.gradients["policy"]


def weighted_sum(one, other):
    return {name: one[name] + COEFF * other[name] for name in one}


SETTINGS = [{}, {"beta": 0.5}, {"objective": "sequence"}, {"objective": "sequence", "estimator": "k1"}]
SCORES = [1.0, 0.0, 0.5, 2.0, 0.25, 1.0]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("gradients_of", [gradients_of_grpo, gradients_of_ppo])
def test_the_term_has_the_gradient_of_distillation(gradients_of, changes, student, teacher, rollout):
    across = gradients_of is gradients_of_ppo
    expected = gradients_of_distillation(student, teacher, rollout, across, **changes)
    plain = gradients_of(student, teacher, rollout, SCORES)
    both = gradients_of(student, teacher, rollout, SCORES, **TAUGHT, **changes)
    assert_same_gradients(both, weighted_sum(plain, expected), atol=2e-6)
    cut = gradients_of(student, teacher, rollout, SCORES, **TAUGHT, **changes | {"micro_batch_size": 1})
    assert_same_gradients(cut, both, atol=2e-6)


def test_responses_without_an_advantage_are_taught_and_those_without_a_score_are_not(student, teacher, rollout):
    equal = gradients_of_grpo(student, teacher, rollout, [1.0] * 6, **TAUGHT)
    plain = gradients_of_grpo(student, teacher, rollout, [1.0] * 6)
    expected = gradients_of_distillation(student, teacher, rollout, False)
    assert all(gradient is None or not gradient.any() for gradient in plain.values())
    zero = {name: torch.zeros_like(gradient) for name, gradient in expected.items()}
    assert_same_gradients(equal, weighted_sum(zero, expected), atol=2e-6)
    scores = [1.0, 1.0, math.nan, math.nan, 1.0, 1.0]
    for name in ("position", "sequence"):
        known = gradients_of_grpo(student, teacher, rollout, scores, **TAUGHT, objective=name)
        part = rollout.select(torch.tensor([0, 1, 4, 5]))
        expected = gradients_of_distillation(student, teacher, part, False, objective=name)
        assert_same_gradients(known, weighted_sum(zero, expected), atol=2e-6)


@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_a_run_with_a_teacher_comes_nearer_to_it(program, runs, tmp_path):
    main = {"grpo": grpo.main, "ppo": ppo.main}[program]
    more = ["--teacher", runs.teacher, "--teacher_coeff", "50", "--ppo_epochs", "2", "--objective", "sequence"]
    rows = metrics(main(runs.flags(program, tmp_path, *more)))
    first, *_, last = [row["teacher/kl"] for row in rows if "teacher/kl" in row]
    assert last < first


def test_a_teacher_needs_a_weight_and_a_weight_needs_a_teacher():
    for changes, name in (
        ({"objective": "sequence"}, "--teacher_coeff"),
        ({"teacher_coeff": 1.0, "temperature": 0.7}, "--temperature"),
        ({"teacher_coeff": 1.0, "objective": "sequence", "beta": 0.5}, "--beta"),
    ):
        with error_naming(ValueError, name):
            GRPOArgs(**(BESIDE | changes))


def test_the_best_other_response_of_a_group_is_shown_to_the_teacher(tokenizer):
    prompt, texts = "Do you have tea?", ["Yes.", "No.", "We do, sir.", "Hm."]
    ids = [encode_prompt(tokenizer, prompt)] * 4
    responses = [encode_response(tokenizer, text) for text in texts]
    rollout = rollout_of(ids, responses, tokenizer=tokenizer, columns=[{"asked": prompt}] * 4)
    rollout = dataclasses.replace(rollout, group=torch.tensor([0, 0, 0, 1]), num_groups=2)
    args = GRPOArgs(**(BESIDE | {"num_generations": 2, **TAUGHT, "sibling_score": 0.5, "mini_batch_size": 3}))
    with pytest.raises(RunFailure, match="--privileged_column"):
        add_siblings(args, rollout, torch.zeros(4))
    args = dataclasses.replace(args, privileged_column="asked")
    shown, weights = add_siblings(args, rollout, torch.tensor([0.7, math.nan, 0.9, 2.0]))
    assert weights.tolist() == [1, 1, 1, 0]
    hints = [columns[SIBLING] for columns in shown.columns]
    assert hints[0] == hints[1] == with_hint(prompt, texts[2]) and hints[2] == with_hint(prompt, texts[0])
    assert hints[3] == prompt and "We do, sir." in hints[0]
    bare, _ = add_siblings(args, dataclasses.replace(rollout, columns=[{}] * 4), torch.ones(4))
    with pytest.raises(RunFailure, match="--privileged_column asked: prompt 0"):
        seen_by_teacher(args, dataclasses.replace(bare, row=torch.arange(4)))
    seen = seen_by_teacher(args, shown)
    assert seen.input_ids[3, : len(ids[0])].tolist() == ids[0] and torch.equal(
        seen.action_mask.sum(1), rollout.action_mask.sum(1)
    )


def test_rows_of_weight_0_are_not_taught(student, teacher, rollout):
    """Those without a sibling."""
    args = DistillArgs(**(SIZES | {"num_generations": 3, "teacher": "y", "objective": "sequence"}))
    found = []
    for weights in (None, torch.tensor([1.0, 1, 1, 0, 0, 0])):
        run, learned = RunOfOneStep(args, policy=student), rollout.extend(TaughtBatch)
        lesson = teach(run, student, teacher, rollout, learned)
        lesson.weights = weights
        if weights is None:
            learned = learned.select(torch.arange(3))
        distill.update_minibatch(run, student, lesson, learned)
        found.append(run.gradients["policy"])
    share = sum(map(len, RESPONSES[:3])) / sum(map(len, RESPONSES))
    assert_same_gradients({name: share * value for name, value in found[0].items()}, found[1], atol=2e-6)
