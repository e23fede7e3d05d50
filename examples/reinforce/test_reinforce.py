"""REINFORCE: a step has the paper's gradient."""

import math

import pytest
import torch
from helpers import RunOfOneStep, assert_same_gradients, gradients, tiny_policy
from helpers.rollouts import rollout_of
from helpers.updates import exact, exact_logprobs

from lightrlhf.reinforce import ReinforceArgs, update


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_step_has_the_gradient_of_the_paper(micro_batch_size):
    policy, texts = tiny_policy("llama"), [([5, 6, 7], [9, 10, 1]), ([8], [11, 12, 13, 1]), ([9, 4], [14])]
    run = RunOfOneStep(ReinforceArgs(micro_batch_size=micro_batch_size, mini_batch_size=3), policy=policy)
    update(run, policy, rollout_of(*zip(*texts)), torch.tensor([0.5, -2.0, math.nan]))  # the last has no score
    paper = exact(policy)
    first, second = (exact_logprobs(paper, *text).sum() for text in texts[:2])
    (-(0.5 * first - 2.0 * second) / 7).backward()
    assert_same_gradients(gradients(paper), run.gradients["policy"])
